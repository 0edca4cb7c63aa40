"""Reads the bytes of an entry from where they lie."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from cacheblend_rag.errors import StoreUnavailableError
from cacheblend_rag.store.private import open_file


class LayerSource(Protocol):
    """Is the bytes of one entry, wherever they lie; read from any thread.

    Attributes:
        nbytes: How many there are.
        place: Where, as messages say it.
    """

    nbytes: int
    place: str

    def read(self, offset: int, into: torch.Tensor) -> None:
        """Fill ``into``, ``[n]``, uint8, contiguous, with the bytes from ``offset`` on.

        Raises:
            ValueError: There are not as many: the entry is damaged.
            StoreUnavailableError: They cannot be read now, which says nothing about the entry.
        """


class BytesSource:
    """Holds an entry's bytes in memory."""

    def __init__(self, data: bytes, place: str):
        """Hold ``data``, which came from ``place``."""
        self._data, self.nbytes, self.place = np.frombuffer(data, np.uint8), len(data), place

    def read(self, offset: int, into: torch.Tensor) -> None:
        """See :meth:`LayerSource.read`."""
        if offset + len(into) > self.nbytes:
            raise ValueError("the entry ends too early")
        into.numpy()[:] = self._data[offset : offset + len(into)]


class FileSource:
    """Keeps a file open, so that its bytes can be read when the entry is evicted meanwhile, by this process or another.

    Read with ``preadv`` into memory that the reader gives: a mapped file would turn an unreadable sector or a truncation into a
    crash, and could change after it was checked.

    Attributes:
        path: The file.
        inode: Its number, which no other file has while this one is open.
    """

    def __init__(self, path: Path):
        """Open ``path``.

        Raises:
            FileNotFoundError: There is no such file.
            OSError: It cannot be opened, or is no regular file.
        """
        self.path, self.place = path, str(path)
        self._fd = open_file(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._fd)
        status = os.fstat(self._fd)
        self.inode, self.nbytes = status.st_ino, status.st_size

    def read(self, offset: int, into: torch.Tensor) -> None:
        """See :meth:`LayerSource.read`."""
        view = into.numpy().data
        done = 0
        while done < len(view):
            try:
                size = os.preadv(self._fd, [view[done:]], offset + done)
            except OSError as error:
                # EIO too: a network file system reports it for a server that is away.
                raise StoreUnavailableError(f"{self.path} cannot be read now: {error}; check the disk.") from error
            if not size:
                raise ValueError("the file ends too early")
            done += size
