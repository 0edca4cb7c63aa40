"""Finds what other packages add by entry points: selection policies, tiers of a store, commands."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any, TypeVar

from cacheblend_rag.errors import CacheBlendError, InputError

_T = TypeVar("_T")


def names(group: str) -> set[str]:
    """Return the names of the entry points in a group, without importing any package."""
    return entry_points(group=group).names


def load(group: str, name: str, kind: str, use: Callable[[Any], _T]) -> _T:
    """Load the entry point ``name`` of a group and return what ``use`` makes of the loaded object.

    ``kind`` says in the error what the entry point adds, as ``tier``. ``use`` may raise any exception.

    Raises:
        InputError: Several packages have the name, or the package cannot be imported, or ``use`` failed.
        CacheBlendError: ``use`` raised the error.
    """
    points = list(entry_points(group=group, name=name))
    packages = " and ".join(point.dist.name if point.dist else point.value for point in points)
    if len(points) > 1:
        raise InputError(f"The {kind} {name!r} is in several packages, {packages}; remove all but one.")
    try:
        return use(points[0].load())
    except CacheBlendError:
        raise
    except Exception as error:  # any exception from importing a package
        raise InputError(
            f"The {kind} {name!r} of the package {packages} ({points[0].value!r} in the entry-point group {group!r}) cannot be "
            f"used ({type(error).__name__}: {error}); mend, update or remove that package."
        ) from error
