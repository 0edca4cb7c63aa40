"""Makes files and directories as private as what they lie in, and never opens one through a link.

A directory that the library makes is its user's alone (0700); what is made inside a directory has that directory's
permissions, so one that a group was given is shared with that group.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

_ALONE = 0o700
_SHARED = 0o777 | stat.S_ISGID


def make_root(directory: Path) -> None:
    """Make a store's directory and those above it, for this user alone, where they are missing; what exists stays as it is.

    Raises:
        OSError: It cannot be made, or is no directory.
    """
    missing = [each for each in directory.parents if not each.exists()]
    for each in (*reversed(missing), directory):
        each.mkdir(_ALONE, exist_ok=True)


def make_inside(directory: Path) -> None:
    """Make a directory, where it is missing, with the permissions of the one that it lies in.

    Raises:
        OSError: It cannot be made, or is no directory.
    """
    if not directory.is_dir():
        directory.mkdir(_ALONE, exist_ok=True)
        with suppress(PermissionError):  # another process of another user made it meanwhile
            directory.chmod(directory.parent.stat().st_mode & _SHARED | _ALONE)


def file_mode(directory: Path) -> int:
    """Return the permissions of a file in ``directory``: those of the directory, but for execution.

    Raises:
        OSError: It cannot be looked at.
    """
    return directory.stat().st_mode & 0o666 | 0o600


def create_file(path: Path) -> None:
    """Create an empty file with the permissions of its directory.

    Raises:
        FileExistsError: There is something at ``path``, a link for example.
        OSError: It cannot be created.
    """
    mode = file_mode(path.parent)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.fchmod(fd, mode)  # the umask may have taken what the directory gives
    finally:
        os.close(fd)


def open_file(path: Path, flags: int) -> int:
    """Open a regular file and return its descriptor; follows no link, and waits for nobody.

    Raises:
        OSError: It cannot be opened, or is a link, a pipe or something else.
    """
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
    except BaseException:
        os.close(fd)
        raise
    return fd


def write_text(path: Path, text: str) -> None:
    """Write a small file, created as by :func:`create_file` where it is missing.

    Raises:
        OSError: It cannot be written.
    """
    with suppress(FileExistsError):
        create_file(path)
    with os.fdopen(open_file(path, os.O_WRONLY | os.O_TRUNC), "w", encoding="utf-8") as file:
        file.write(text)
