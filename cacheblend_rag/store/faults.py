"""Words what the operating system says when it refuses, so that a user can act on it."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock
from safetensors import SafetensorError

from cacheblend_rag.errors import StoreError

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
        raise explain(_os_error(error), root) from error
    except OSError as error:
        raise explain(error, root) from error


def _os_error(error: SafetensorError) -> OSError:
    # The library hands on the system's error as text only.
    number = re.search(r"\(os error (\d+)\)", str(error))
    return OSError(int(number.group(1)) if number else 0, str(error))
