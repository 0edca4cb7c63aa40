"""Finds token-selection policies by name: ours, and those that installed packages add by an entry point.

A new policy of ours is a class in `base.py` and a line in `POLICIES`; `examples/third_party_policy` is one in its own package.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

from cacheblend_rag.errors import InputError

if TYPE_CHECKING:
    from cacheblend_rag.blending.policies.base import SelectionPolicy

# Named, not imported: options are checked by programs that need no torch otherwise, such as the command line.
POLICIES = {
    "static": "StaticPolicy",
    "static-query": "StaticQueryPolicy",
    "hkvd": "HKVDPolicy",
    "query": "QueryPolicy",
    "full-reuse": "FullReusePolicy",
    "full-recompute": "FullRecomputePolicy",
}
GROUP = "cacheblend_rag.policies"
"""The entry-point group of other packages' policies."""


def check_policy(which: object) -> None:
    """Refuse what is neither a policy nor the name of one; raises InputError."""
    if isinstance(which, str):
        if which not in POLICIES and which not in _installed():
            raise _unknown(which)
        return
    from cacheblend_rag.blending.policies.base import SelectionPolicy

    if not isinstance(which, SelectionPolicy):
        raise _unknown(which)
    name = getattr(which, "name", None)
    if not isinstance(name, str) or not name:
        raise InputError(f"The selection policy {which!r:.200} has no name; give its class one.")
    if name in POLICIES and type(which) is not type(policy(name)):
        raise InputError(f"{type(which).__name__} is called {name!r}, as a policy of ours is; give it another name.")


def policy(which: str | SelectionPolicy) -> SelectionPolicy:
    """Return the policy of that name, or the one given.

    Raises:
        InputError: No such policy, or a package's cannot be loaded.
    """
    if not isinstance(which, str):
        return which
    check_policy(which)
    return _named(which)


def possible(wanted: SelectionPolicy, ranked: bool, watched: bool) -> SelectionPolicy:
    """Return ``wanted``, or the policy that takes its place where chunks are not ranked or attention is not to be watched."""
    chosen = wanted
    while (chosen.needs_static and not ranked) or (chosen.needs_attention and not watched):
        chosen = policy(chosen.without_static if chosen.needs_static and not ranked else chosen.without_attention)
    return chosen


def gave_way(wanted: SelectionPolicy, chosen: SelectionPolicy, ratio: float, unranked: bool) -> str:
    """Say in words that another policy chose, by which ratio, and why."""
    why = (
        "not all chunks are ranked" if wanted.needs_static and unranked else "this model's attention cannot be watched"
    )
    return f"; {wanted.name} gave way to {chosen.name} {ratio:.3g}, since {why}"


def policy_name(which: str | SelectionPolicy) -> str:
    """Return a policy's name, to be written down or shown."""
    return which if isinstance(which, str) else which.name


def name_elsewhere(which: str | SelectionPolicy) -> str:
    """Return the name by which another process finds the same policy.

    Raises:
        InputError: An object that is not what its name stands for there.
    """
    name = policy_name(which)
    if isinstance(which, str):
        return name
    if name in POLICIES or name in _installed():
        there = policy(name)
        if type(there) is type(which) and vars(there) == vars(which):
            return name
    kind = type(which)
    raise InputError(
        f"The selection policy {name!r} is an object of this process; vLLM's processes and servers find policies by name. "
        f"Register '{kind.__module__}:{kind.__qualname__}' as {name!r} in the entry-point group {GROUP!r} of a package that is "
        "installed there, too."
    )


@cache
def _named(name: str) -> SelectionPolicy:
    if name in POLICIES:
        ours: SelectionPolicy = getattr(import_module(f"{__name__}.base"), POLICIES[name])()
        return ours
    return _load(name, _installed()[name])


@cache
def _installed() -> dict[str, list[EntryPoint]]:
    """Return other packages' policies; looked for once, and only when a name is not ours: it takes tens of milliseconds."""
    found: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=GROUP):
        found.setdefault(point.name, []).append(point)
    return found


def _load(name: str, points: list[EntryPoint]) -> SelectionPolicy:
    from cacheblend_rag.blending.policies.base import SelectionPolicy

    packages = " and ".join(point.dist.name if point.dist else point.value for point in points)
    if len(points) > 1:
        raise InputError(f"The selection policy {name!r} is in several packages, {packages}; remove all but one.")
    try:
        found = points[0].load()
        made = found() if isinstance(found, type) else found
    except Exception as error:  # whatever a package does when it is imported
        raise InputError(
            f"The selection policy {name!r} of the package {packages} cannot be loaded ({type(error).__name__}: {error}); "
            "mend or remove that package."
        ) from error
    if not isinstance(made, SelectionPolicy) or made.name != name:
        raise InputError(
            f"The package {packages} has {points[0].value!r} for the selection policy {name!r}, which is no SelectionPolicy of "
            "that name; mend or remove that package."
        )
    return made


def _unknown(which: object) -> InputError:
    known = ", ".join([*POLICIES, *_installed()])
    return InputError(
        f"There is no selection policy {which!r:.200}; known ones: {known}. "
        f"Packages add others by the entry-point group {GROUP!r}."
    )
