"""Makes files and directories as private as what they lie in, and words the system's refusals so that a user can act on them.

No file is opened through a link. A directory that the library makes is its user's alone (0700); what is made inside a directory
has that directory's permissions, so one that a group was given is shared with that group.

Names namespaces, too: parts of a store whose readers must not see, or notice, what stands in another part.
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


def open_file(path: Path | str, flags: int, dir_fd: int | None = None) -> int:
    """Open a regular file and return its descriptor; follows no link, and waits for nobody.

    A relative ``path`` is looked up in the open directory ``dir_fd``, if one is given.

    Raises:
        OSError: It cannot be opened, or is a link, a pipe or something else.
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
    """Return what a small file of ASCII text holds; None where there is none.

    Raises:
        OSError: It cannot be read.
    """
    try:
        fd = open_file(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    with os.fdopen(fd, encoding="ascii", errors="replace") as file:
        return file.read()


def write_text(path: Path, text: str) -> None:
    """Write a small file in one step, with the permissions of its directory; where that fails, what was there stays.

    Raises:
        OSError: It cannot be written, or what is there is no file.
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
    """Return the error to show a user for ``error``, met in an attempt to ``action`` the store at ``root``."""
    what, advice = _ADVICE.get(error.errno or 0, (str(error), "check the disk and the directory"))
    if (
        error.errno == errno.ENOTDIR and error.filename and Path(error.filename) != root
    ):  # a link inside it, for example
        what, advice = f"{error.filename} is not a directory", "remove it, or use another store directory"
    return StoreError(f"cannot {action} the KV store {root}: {what}; {advice}")


@contextmanager
def explained(root: Path, waited_s: float) -> Iterator[None]:
    """Turn what the system, the lock (held elsewhere for ``waited_s`` seconds) and safetensors raise into StoreError.

    Raises:
        StoreError: The block could not write under ``root``.
    """
    try:
        yield
    except filelock.Timeout as error:
        raise StoreError(
            f"cannot write to the KV store {root}: another process has held {error.lock_file} for {waited_s:.0f} s; "
            "stop that process or try again"
        ) from error
    except SafetensorError as error:
        number = re.search(r"\(os error (\d+)\)", str(error))  # the library hands on the system's error as text only
        raise explain(OSError(int(number[1]) if number else 0, str(error)), root) from error
    except OSError as error:
        raise explain(error, root) from error


_LOCK_NAME = re.compile(r"[0-9a-f]{16}\.lock")  # whatever else stands in the directory is not ours to remove


class Spool:
    """Is a writer's own directory ``<root>/tmp/<token>``, beside a lock file that the writer holds while it lives.

    The system frees the lock when the process dies, however it dies; process ids could be reused or of another host.
    Every method needs the store's lock, so that a spool is never seen between its creation and its locking.
    """

    def __init__(self, path: Path):
        """Use ``path`` (``<root>/tmp``) once there is something to write; touches nothing yet."""
        self.path = path
        self._lock: FileLock | None = None
        self._own: Path | None = None
        self._pid = 0

    def new_file(self) -> Path:
        """Return the name of a file that no other writer uses. The directory of the file exists."""
        # A forked child must not count on its parent's lock, nor anyone on a lock file that is gone.
        if self._own is None or self._pid != os.getpid() or not _lock_of(self._own).exists():
            self._register()
        assert self._own is not None
        make_inside(self._own)
        return self._own / secrets.token_hex(8)

    def sweep(self) -> None:
        """Remove what dead writers left behind."""
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
        # The lock file goes last: after a crash in between, the next sweep still finds the directory.
        shutil.rmtree(directory, ignore_errors=True)
        _lock_of(directory).unlink(missing_ok=True)


def _lock_of(directory: Path) -> Path:
    return directory.with_suffix(".lock")


DEFAULT_NAME = "default"
"""The namespace of whoever names none; the keys of its entries do not hold its name."""

MAX_READS = 6
_NAME = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,61}[a-z0-9])?")


@dataclass(frozen=True)
class Namespace:
    """Says where chunks and KV are written, and where else they are looked for: what one tenant has of a server.

    Attributes:
        name: What is registered and stored goes under it. 1 to 63 of a-z, 0-9, ``.``, ``_`` and ``-``.
        reads: Namespaces whose chunks and KV are used, too, and not changed; up to :data:`MAX_READS`.

    Raises:
        InputError: A name that cannot be one, or too many.
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
        """Return the salt of vLLM's prefix cache for a prompt from here that has a salt of its ``own``, or none."""
        if self.name == DEFAULT_NAME:
            return own
        return f"tenant:{self.name}" if own is None else f"tenant:{self.name}:{own}"  # no name has a colon

    @staticmethod
    def salted(salt: str | None) -> str:
        """Return the name of the namespace whose prompts have such a salt."""
        return salt.split(":")[1] if salt is not None and salt.startswith("tenant:") else DEFAULT_NAME


def home_of(store: Path, namespace: str) -> Path:
    """Return the directory of a namespace's own index: the store's for the default one, else one inside it.

    Raises:
        InputError: A name that cannot be one.
    """
    name = Namespace(namespace).name
    return store if name == DEFAULT_NAME else store / "tenants" / name


def make_home(store: Path, namespace: str) -> None:
    """Make that directory in an existing store, with the store's permissions.

    Raises:
        InputError: A name that cannot be one.
        OSError: It cannot be made.
    """
    home = home_of(store, namespace)
    if home != store:
        make_inside(home.parent)
        make_inside(home)


DEFAULT = Namespace()
"""The default namespace, which reads no other."""
