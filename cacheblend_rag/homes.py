"""Expands a home directory at the beginning of a path."""

from __future__ import annotations

from pathlib import Path

from cacheblend_rag.errors import InputError


def from_home(path: Path | str) -> Path:
    """Return ``path`` with a leading ``~`` or ``~user`` replaced by the home directory.

    Raises:
        InputError: The home directory is not known: the user does not exist, or HOME is not set.
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
