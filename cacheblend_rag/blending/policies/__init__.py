"""Token-selection policies by name. A new policy is a file here and a line in `POLICIES`."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from cacheblend_rag.errors import InputError

if TYPE_CHECKING:
    from cacheblend_rag.blending.policies.base import SelectionPolicy

# Named, not imported: options are checked by programs that need no torch otherwise, such as the command line.
POLICIES = {
    "static": "static.StaticPolicy",
    "static-query": "static.StaticQueryPolicy",
    "hkvd": "hkvd.HKVDPolicy",
    "sink": "sink.SinkPolicy",
    "query": "query.QueryPolicy",
    "hybrid": "hybrid.HybridPolicy",
    "random": "random.RandomPolicy",
    "full-reuse": "ends.FullReusePolicy",
    "full-recompute": "ends.FullRecomputePolicy",
}


def check_policy(name: object) -> None:
    """Refuse a name that is no policy's.

    Raises:
        InputError: No such policy.
    """
    if not isinstance(name, str) or name not in POLICIES:
        raise InputError(f"There is no selection policy {name!r}; known ones: {', '.join(POLICIES)}.")


@cache
def policy(name: str) -> SelectionPolicy:
    """Return the policy called ``name``.

    Raises:
        InputError: No such policy.
    """
    check_policy(name)
    module, kind = POLICIES[name].split(".")
    made: SelectionPolicy = getattr(import_module(f"{__name__}.{module}"), kind)()
    return made
