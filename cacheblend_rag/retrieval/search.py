"""Finds the vectors nearest to a question: packed in a file from 100,000 on, those added since in memory.

FAISS packs them into a quarter of their size, as an inverted file of 8-bit scalars, mapped, of which a search reads a small part.
What it finds are candidates, whose similarities are computed from the vectors as they are in the index. The file can always be
made again.
"""

from __future__ import annotations

import hashlib
import logging
import math
import uuid
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from cacheblend_rag.errors import StoreError
from cacheblend_rag.retrieval.database import IndexDatabase
from cacheblend_rag.retrieval.embedding import PackedVectors, Vectors
from cacheblend_rag.store.files import create_file

PACKED_FROM = 100_000
"""Fewer vectors are searched one by one, in memory: that is exact, and takes milliseconds."""
_FRESH = 0.2  # share of vectors that may be new or gone before all are packed again
_FIRST = 64  # candidates, at least, whose similarity is computed exactly

logger = logging.getLogger(__name__)


class VectorSearch:
    """Finds what is nearest to a question, following the database; :meth:`search` relies on a transaction's lock."""

    def __init__(self, database: IndexDatabase):
        """Follow ``database``; nothing is read before the first search."""
        self._database, self._vectors = database, database.vectors
        self._generation: Hashable = None
        self._described: PackedVectors | None = None
        self._packed: Any = None
        self._first = self._last = 0  # what stands in memory came after the first id, up to the last
        self._recent: Any = None

    def search(self, question: Vectors, k: int) -> list[tuple[int, float]]:
        """Return the rows and cosine similarities of the ``k`` chunks whose best window is nearest to ``question``."""
        self._follow()
        parts = [part for part in (self._packed, self._recent) if part is not None and part.ntotal]
        for part in parts:
            if question.shape[0] != part.d:
                raise StoreError(
                    f"The embedding model gives vectors of {question.shape[0]} numbers, the index in "
                    f"{self._database.path.parent} holds {part.d}. Rebuild the index."
                )
        total, wanted, wider = sum(part.ntotal for part in parts), max(4 * k, _FIRST), 1
        while True:
            ids = [i for part in parts for i in _candidates(part, question, wanted, wider)]
            found = self._vectors.nearest(ids, question)
            if len(found) >= k or wanted >= total:
                return found[:k]
            # Several windows of one chunk, or vectors that are gone, were among them.
            wanted, wider = 4 * wanted, 4 * wider

    def pack(self) -> int:
        """Pack all vectors where that pays and has not been done; return how many were packed. Not inside a transaction."""
        last, before = self._vectors.last(), self._vectors.packed()
        usable = before is not None and self._opened(before) is not None
        count = self._vectors.count(last=last)
        if count < PACKED_FROM or (before is not None and usable and not self._outdated(before, count)):
            return 0
        try:
            sample = self._vectors.sample(sample_size(count), last)
            path, checksum = pack(self._database.path, sample, self._vectors.between(0, last), count)
        except OSError as error:
            logger.warning("The vectors cannot be packed: %s. All of them are searched in memory.", error)
            return 0
        with self._database.transaction():
            # Where fewer are left, another process has replaced them meanwhile.
            if self._vectors.count(last=last) > (1 - _FRESH) * count:
                self._vectors.put_packed(PackedVectors(path.name, checksum, last, count))
        # The one before may just be about to be opened.
        wanted = {described.file for described in (self._vectors.packed(), before if usable else None) if described}
        for file in packed_files(self._database.path):
            if file.name not in wanted:
                file.unlink(missing_ok=True)
        return count

    def _outdated(self, packed: PackedVectors, count: int) -> bool:
        kept = self._vectors.count(last=packed.last)
        return (packed.vectors - kept) + (count - kept) > _FRESH * count

    def _follow(self) -> None:
        generation = self._database.generation()
        if generation == self._generation:
            return
        described = self._vectors.packed()
        if described != self._described:
            self._packed = self._opened(described) if described is not None else None
            self._described = described
            self._recent = None
            self._first = described.last if described is not None and self._packed is not None else 0
        if self._recent is not None and self._recent.ntotal > 1000 + 1.5 * self._vectors.count(self._first):
            self._recent = None  # most of them are gone
        self._read_recent()
        self._generation = generation

    def _read_recent(self) -> None:
        import faiss

        for ids, vectors in self._vectors.between(self._last if self._recent is not None else self._first):
            # Vectors of another length follow only where all were replaced.
            if self._recent is None or self._recent.d != vectors.shape[1]:
                self._recent = faiss.IndexIDMap2(faiss.IndexFlatIP(vectors.shape[1]))
            self._recent.add_with_ids(vectors, ids)
            self._last = int(ids[-1])

    def _opened(self, described: PackedVectors) -> Any:
        if described == self._described and self._packed is not None:
            return self._packed
        path = self._database.path.with_name(described.file)
        try:
            return open_packed(path, described.checksum)
        except (OSError, ValueError, RuntimeError) as error:
            logger.warning(
                "The packed vectors %s cannot be used (%s): all are read into memory. Index again to pack them.",
                path,
                error,
            )
            return None


def _candidates(part: Any, question: Vectors, wanted: int, wider: int) -> list[int]:
    """Return the ids of up to ``wanted`` vectors near to the question, out of ``wider`` times as many lists as usual."""
    import faiss

    params: Any = None
    if isinstance(part, faiss.IndexIVF):
        params = faiss.SearchParametersIVF()
        params.nprobe = part.nlist if wanted >= part.ntotal else min(part.nprobe * wider, part.nlist)
    ids = part.search(question[None], min(wanted, part.ntotal), params=params)[1][0]
    return [int(i) for i in ids if i >= 0]


_TRAINED_ON = 64  # vectors for each list
_QUESTIONS = 256
_NEIGHBOURS = 10
_RECALL = 0.99
_NEARNESS = 0.6  # cosine similarity of a typical question to the passage that answers it


def pack(
    index: Path, sample: Vectors, pages: Iterator[tuple[npt.NDArray[np.int64], Vectors]], count: int
) -> tuple[Path, bytes]:
    """Write a file of packed vectors; return its path and checksum.

    How many of its lists a search reads is found here: the least with which questions made from the sample find 99% of the ten
    vectors nearest to them.

    Args:
        index: The index's own file, beside which it is put.
        sample: Vectors to train on, ``[vectors, dimension]``; see :func:`sample_size`.
        pages: Ids and vectors to pack.
        count: About how many these are.

    Raises:
        OSError: It cannot be written.
    """
    import faiss

    dimension = sample.shape[1]
    coarse = faiss.IndexFlatIP(dimension)
    packed = faiss.IndexIVFScalarQuantizer(
        coarse, dimension, _lists(count), faiss.ScalarQuantizer.QT_8bit, faiss.METRIC_INNER_PRODUCT, False
    )
    packed.train(sample)
    for ids, vectors in pages:
        packed.add_with_ids(vectors, ids)
    packed.nprobe = _probes(packed, _questions(sample))
    path = index.with_name(f"{index.name}-vectors-{uuid.uuid4().hex}")
    unfinished = path.with_name(path.name + ".tmp")
    try:
        create_file(unfinished)
        faiss.write_index(packed, str(unfinished))
        unfinished.replace(path)
    except RuntimeError as error:  # how FAISS tells what the system refuses
        raise OSError(f"{path}: {error}") from error
    finally:
        unfinished.unlink(missing_ok=True)
    return path, _checksum(path)


def sample_size(count: int) -> int:
    """Return how many of ``count`` vectors :func:`pack` wants as its sample."""
    return min(count, max(_TRAINED_ON * _lists(count), _QUESTIONS))


def open_packed(path: Path, checksum: bytes) -> Any:
    """Map a file of packed vectors; return FAISS's index.

    Raises:
        OSError: It cannot be read.
        ValueError: It is not as it was written.
        RuntimeError: FAISS cannot read it.
    """
    import faiss

    if _checksum(path) != checksum:
        raise ValueError("it fails its checksum")
    return faiss.read_index(str(path), faiss.IO_FLAG_MMAP | faiss.IO_FLAG_READ_ONLY)


def packed_files(index: Path) -> list[Path]:
    """Return all files of packed vectors beside an index's own file, unfinished ones too."""
    return sorted(index.parent.glob(f"{index.name}-vectors-*"))


def _lists(count: int) -> int:
    return max(round(math.sqrt(count)), 1)


def _questions(sample: Vectors) -> Vectors:
    """Return unit vectors as near to vectors of the sample as questions are to the passages that answer them."""
    draw = np.random.default_rng(0)
    chosen = sample[draw.choice(len(sample), min(_QUESTIONS, len(sample)), replace=False)]
    other = sample[draw.permutation(len(sample))[: len(chosen)]]
    other = other - (other * chosen).sum(1, keepdims=True) * chosen
    other /= np.maximum(np.linalg.norm(other, axis=1, keepdims=True), 1e-6)
    return np.asarray(_NEARNESS * chosen + (1 - _NEARNESS**2) ** 0.5 * other, np.float32)


def _probes(packed: Any, questions: Vectors) -> int:
    """Return how many lists to read."""
    lists: int = packed.nlist
    packed.nprobe = lists
    wanted = packed.search(questions, _NEIGHBOURS)[1]
    probes = 1
    while probes < lists:
        packed.nprobe = probes
        found = packed.search(questions, _NEIGHBOURS)[1]
        if np.mean([np.isin(*pair).mean() for pair in zip(wanted, found, strict=True)]) >= _RECALL:
            break
        probes *= 2
    return min(probes, lists)


def _checksum(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).digest()
