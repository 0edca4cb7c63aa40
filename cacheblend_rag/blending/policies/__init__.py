"""Token-selection policies by name. A new policy is a file here and a line in `POLICIES`."""

from __future__ import annotations

from cacheblend_rag.blending.policies.base import Candidates, SelectionPolicy
from cacheblend_rag.blending.policies.ends import FullPolicy, NonePolicy
from cacheblend_rag.blending.policies.hkvd import HKVDPolicy
from cacheblend_rag.blending.policies.hybrid import HybridPolicy
from cacheblend_rag.blending.policies.query import QueryPolicy
from cacheblend_rag.blending.policies.random import RandomPolicy
from cacheblend_rag.blending.policies.sink import SinkPolicy
from cacheblend_rag.errors import InputError

__all__ = ["POLICIES", "Candidates", "SelectionPolicy", "policy"]

POLICIES: dict[str, SelectionPolicy] = {
    p.name: p
    for p in (HKVDPolicy(), SinkPolicy(), QueryPolicy(), HybridPolicy(), RandomPolicy(), NonePolicy(), FullPolicy())
}


def policy(name: str) -> SelectionPolicy:
    """Return the policy called ``name``.

    Raises:
        InputError: No such policy.
    """
    try:
        return POLICIES[name]
    except KeyError:
        raise InputError(f"There is no selection policy {name!r}; known ones: {', '.join(POLICIES)}.") from None
