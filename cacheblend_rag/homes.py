"""Finds the home directory that a path begins at."""

from __future__ import annotations

from pathlib import Path

from cacheblend_rag.errors import InputError


def from_home(path: Path | str) -> Path:
    """Return a path with the home directory that a ``~`` at its beginning means.

    Raises:
        InputError: It is not known: there is no such user, or HOME is not set.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        who = Path(path).parts[0]
        unknown = "HOME is not set" if who == "~" else f"there is no user {who[1:]}"
        raise InputError(
            f"{path}: the home directory {who} is not known, since {unknown}. Give the whole path, or ./{path} for what "
            "is called so."
        ) from error
