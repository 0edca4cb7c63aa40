"""Token-selection policies by name. A new policy is a file here and a line in `POLICIES`."""

from __future__ import annotations

from cacheblend_rag.errors import InputError
from cacheblend_rag.selection.base import Candidates, SelectionPolicy
from cacheblend_rag.selection.ends import FullPolicy, NonePolicy
from cacheblend_rag.selection.hkvd import HKVDPolicy
from cacheblend_rag.selection.hybrid import HybridPolicy
from cacheblend_rag.selection.query import QueryPolicy
from cacheblend_rag.selection.random import RandomPolicy
from cacheblend_rag.selection.sink import SinkPolicy

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
