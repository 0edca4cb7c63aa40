"""Creates files and directories with the permissions of their parent directory, and explains OS errors to users.

No file is opened through a link. A directory that the library makes is private to its user (0700). Files and
directories inside a directory get that directory's permissions, so that a directory shared with a group stays shared.

The module also defines namespaces: parts of a store that are isolated, so that readers of one part see nothing of
another part.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import filelock
from filelock import FileLock, Timeout
from safetensors import SafetensorError

from cacheblend_rag.errors import InputError, StoreError

_ALONE = 0o700
_SHARED = 0o777 | stat.S_ISGID


def make_root(directory: Path) -> None:
    """Make a store's directory and its missing parents, private to this user; existing directories stay unchanged.

    Raises:
        OSError: The directory cannot be made, or the path is not a directory.
    """
    missing = [each for each in directory.parents if not each.exists()]
    for each in (*reversed(missing), directory):
        each.mkdir(_ALONE, exist_ok=True)


def make_inside(directory: Path) -> None:
    """Make a directory, if it is missing, with the permissions of its parent directory.

    Raises:
        OSError: The directory cannot be made, or the path is not a directory.
    """
    if not directory.is_dir():
        directory.mkdir(_ALONE, exist_ok=True)
        with suppress(PermissionError):  # a process of another user made the directory in the meantime
            directory.chmod(directory.parent.stat().st_mode & _SHARED | _ALONE)


def file_mode(directory: Path) -> int:
    """Return the permissions for a file in ``directory``: the directory's permissions without execution.

    Raises:
        OSError: The directory cannot be read.
    """
    return directory.stat().st_mode & 0o666 | 0o600


def create_file(path: Path) -> None:
    """Create an empty file with the permissions of its directory.

    Raises:
        FileExistsError: ``path`` exists, for example as a link.
        OSError: The file cannot be created.
    """
    mode = file_mode(path.parent)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.fchmod(fd, mode)  # the umask may have removed permissions that the directory has
    finally:
        os.close(fd)


def open_file(path: Path | str, flags: int, dir_fd: int | None = None) -> int:
    """Open a regular file and return its descriptor; follow no link, and do not block.

    A relative ``path`` is looked up in the open directory ``dir_fd``, if ``dir_fd`` is given.

    Raises:
        OSError: The file cannot be opened, or is a link, a pipe or another special file.
    """
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=dir_fd)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_text(path: Path) -> str | None:
    """Return the text of a small ASCII file, or None if the file does not exist.

    Raises:
        OSError: The file cannot be read.
    """
    try:
        fd = open_file(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    with os.fdopen(fd, encoding="ascii", errors="replace") as file:
        return file.read()


def write_text(path: Path, text: str) -> None:
    """Write a small file atomically, with the permissions of its directory; after a failure the old file stays.

    Raises:
        OSError: The file cannot be written, or ``path`` is not a regular file.
    """
    with suppress(FileNotFoundError):
        os.close(open_file(path, os.O_WRONLY))
    new = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        create_file(new)
        with os.fdopen(open_file(new, os.O_WRONLY), "w", encoding="utf-8") as file:
            file.write(text)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


_FULL = "free some space, evict entries (cacheblend store evict --to SIZE) or give the store a smaller disk budget"
_DENIED = "give this user the permission or use another store directory (entries that can be read still are)"
_ADVICE = {
    errno.ENOSPC: ("the disk is full", _FULL),
    errno.EDQUOT: ("the disk quota is used up", _FULL),
    errno.EFBIG: ("the entry exceeds the largest file allowed", "raise the file size limit (ulimit -f)"),
    errno.EROFS: ("the file system is read-only", _DENIED),
    errno.EACCES: ("no permission", _DENIED),
    errno.EPERM: ("no permission", _DENIED),
    errno.ENOTDIR: ("not a directory", "use another store directory"),
    errno.EEXIST: ("not a directory", "use another store directory"),
    errno.ENOENT: ("the directory has been removed", "open the store again"),
    errno.EMFILE: ("too many open files", "raise the limit (ulimit -n)"),
    errno.EIO: ("the disk reports an input/output error", "check the disk"),
}


def explain(error: OSError, root: Path, action: str = "write to") -> StoreError:
    """Return the error to show a user if an attempt to ``action`` the store at ``root`` raised ``error``."""
    what, advice = _ADVICE.get(error.errno or 0, (str(error), "check the disk and the directory"))
    if (
        error.errno == errno.ENOTDIR and error.filename and Path(error.filename) != root
    ):  # for example a link inside the store
        what, advice = f"{error.filename} is not a directory", "remove it, or use another store directory"
    return StoreError(f"cannot {action} the KV store {root}: {what}; {advice}")


LOCK_TIMEOUT_S = 60.0
"""Most seconds to wait for the lock of a store's directory."""


@contextmanager
def explained(root: Path) -> Iterator[None]:
    """Convert errors of the system, the lock and safetensors into StoreError.

    Raises:
        StoreError: The ``with`` block could not write under ``root``.
    """
    try:
        yield
    except filelock.Timeout as error:
        raise StoreError(
            f"cannot write to the KV store {root}: another process has held {error.lock_file} for {LOCK_TIMEOUT_S:.0f} s; "
            "stop that process or try again"
        ) from error
    except SafetensorError as error:
        number = re.search(r"\(os error (\d+)\)", str(error))  # safetensors passes on the system's error only as text
        raise explain(OSError(int(number[1]) if number else 0, str(error)), root) from error
    except OSError as error:
        raise explain(error, root) from error


_LOCK_NAME = re.compile(r"[0-9a-f]{16}\.lock")  # `sweep` removes no files with other names


class Spool:
    """Manages a writer's directory ``<root>/tmp/<token>``, and a lock file beside it that the writer's process holds.

    The system frees the lock whenever the process ends; process ids could be reused or belong to another host.
    Callers of every method hold the store's lock, so that no other process sees a spool that is created but not locked.
    """

    def __init__(self, path: Path):
        """Use ``path`` (``<root>/tmp``) from the first :meth:`new_file` on; create no file before."""
        self.path = path
        self._lock: FileLock | None = None
        self._own: Path | None = None
        self._pid = 0

    def new_file(self) -> Path:
        """Return the name of a file that no other writer uses. The directory of the file exists."""
        # A forked child must not rely on its parent's lock, and no process may rely on a removed lock file.
        if self._own is None or self._pid != os.getpid() or not _lock_of(self._own).exists():
            self._register()
        assert self._own is not None
        make_inside(self._own)
        return self._own / secrets.token_hex(8)

    def sweep(self) -> None:
        """Remove the directories of writers that have ended."""
        for path in self.path.glob("*.lock"):
            if not _LOCK_NAME.fullmatch(path.name):
                continue
            with suppress(Timeout), FileLock(path, timeout=0, mode=file_mode(self.path)):
                self._discard(path.with_suffix(""))

    def close(self) -> None:
        """Remove this writer's directory and free its lock."""
        if self._own is not None and self._lock is not None and self._pid == os.getpid():
            self._discard(self._own)
            self._lock.release()
        self._own = self._lock = None

    def _register(self) -> None:
        make_inside(self.path)
        self._own = self.path / secrets.token_hex(8)
        self._lock = FileLock(_lock_of(self._own), mode=file_mode(self.path))
        self._lock.acquire(timeout=0)
        self._pid = os.getpid()

    @staticmethod
    def _discard(directory: Path) -> None:
        # The lock file is removed last: after a crash in between, the next sweep still finds the directory.
        shutil.rmtree(directory, ignore_errors=True)
        _lock_of(directory).unlink(missing_ok=True)


def _lock_of(directory: Path) -> Path:
    return directory.with_suffix(".lock")


DEFAULT_NAME = "default"
"""Namespace of clients that name no namespace; the name is not part of its KV keys."""

MAX_READS = 6
_NAME = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,61}[a-z0-9])?")


@dataclass(frozen=True)
class Namespace:
    """Names one tenant's part of a server: the namespace for new chunks and KV, and the namespaces that are read, too.

    Attributes:
        name: Namespace in which chunks are registered and KV is stored: 1 to 63 of a-z, 0-9, ``.``, ``_`` and ``-``.
        reads: Further namespaces whose chunks and KV are used and not changed; up to :data:`MAX_READS`.

    Raises:
        InputError: A name is invalid, or ``reads`` has too many names.
    """

    name: str = DEFAULT_NAME
    reads: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in (self.name, *self.reads):
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                raise InputError(
                    f"{name!r} cannot name a tenant: give 1 to 63 of a-z, 0-9, '.', '_' and '-', with a letter or digit at "
                    "both ends."
                )
        if self.name in self.reads or len(set(self.reads)) < len(self.reads) or len(self.reads) > MAX_READS:
            raise InputError(
                f"The tenant {self.name!r} reads {list(self.reads)}; name up to {MAX_READS} other tenants, each once."
            )

    def salt(self, own: str | None = None) -> str | None:
        """Return the salt of vLLM's prefix cache for this namespace's prompt with the salt ``own`` (None: no salt)."""
        if self.name == DEFAULT_NAME:
            return own
        return f"tenant:{self.name}" if own is None else f"tenant:{self.name}:{own}"  # no name has a colon

    @staticmethod
    def salted(salt: str | None) -> str:
        """Return the name of the namespace from which :meth:`salt` has made ``salt``."""
        return salt.split(":")[1] if salt is not None and salt.startswith("tenant:") else DEFAULT_NAME


def home_of(store: Path, namespace: str) -> Path:
    """Return the directory of a namespace's index: the store's directory for the default one, else a subdirectory.

    Raises:
        InputError: The name is invalid.
    """
    name = Namespace(namespace).name
    return store if name == DEFAULT_NAME else store / "tenants" / name


def make_home(store: Path, namespace: str) -> None:
    """Make the directory :func:`home_of` in an existing store, with the store's permissions.

    Raises:
        InputError: The name is invalid.
        OSError: The directory cannot be made.
    """
    home = home_of(store, namespace)
    if home != store:
        make_inside(home.parent)
        make_inside(home)


DEFAULT = Namespace()
"""The default namespace, which reads no other namespace."""
