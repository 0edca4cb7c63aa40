"""Finds the folders of a user, writes files of settings there, and remembers the sums of large files."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeVar

import xxhash

from cacheblend_rag.errors import InputError

_T = TypeVar("_T")
_SETTLED_S = 2.0
"""Age of a file's last change from which on another change gets another time, on every file system."""


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


def user_folder(kind: Literal["cache", "data"]) -> Path:
    """Return the folder of this user's files: CACHEBLEND_HOME, else the system's cache or data folder of the user.

    Raises:
        InputError: The user has no home directory, and CACHEBLEND_HOME is not set.
    """
    if home := os.environ.get("CACHEBLEND_HOME"):
        return Path(home)
    try:
        try:
            from platformdirs import user_cache_path, user_data_path
        except ImportError:  # an image with only torch and transformers, which is always Linux
            return Path.home() / (".cache" if kind == "cache" else ".local/share") / "cacheblend"
        return (user_cache_path if kind == "cache" else user_data_path)("cacheblend")
    except RuntimeError as error:  # in a container whose user has no account
        raise InputError(
            "This user has no home directory, where what is kept for them would lie. Set HOME, or CACHEBLEND_HOME to a "
            "directory for it."
        ) from error


def write_json(file: Path, data: Any) -> None:
    """Write a JSON file of the user as a whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    temporary.replace(file)


def remembered_sum(kind: str, files: Iterable[Path], compute: Callable[[], str]) -> str:
    """Return ``compute()``, the sum of the contents of ``files``; remember the sum while no file changes.

    ``kind`` names the way of computing: the same files have another sum of another kind. A file has changed if its path,
    size, time of change or inode number differs. A model of gigabytes is therefore read once, and not at every start.

    Raises:
        OSError: A file does not exist.
    """
    states = [(str(file.absolute()), file.stat()) for file in files]
    told = [(name, each.st_size, each.st_mtime_ns, each.st_ctime_ns, each.st_ino) for name, each in states]

    def settled() -> bool:
        return all(time.time() - max(each.st_mtime, each.st_ctime) > _SETTLED_S for _, each in states)

    return remembered("sums", [kind, told], str, compute, settled)


def remembered(
    folder: str, key: Any, type_: type[_T], compute: Callable[[], _T], lasts: Callable[[], bool] = lambda: True
) -> _T:
    """Return ``compute()``, a JSON value of ``type_``; remember the value for ``key`` in a ``folder`` of the cache.

    Without a home directory, or if the cache cannot be written, the value is computed each time. A value for which
    ``lasts()`` is False is not remembered.
    """
    try:
        kept = user_folder("cache") / folder / f"{xxhash.xxh3_128(json.dumps(key).encode()).hexdigest()}.json"
    except InputError:  # a user without a home directory
        return compute()
    with suppress(OSError, ValueError):
        if isinstance(known := json.loads(kept.read_text(encoding="utf-8")), type_):
            return known
    found = compute()
    if lasts():
        with suppress(OSError):
            write_json(kept, found)
    return found
