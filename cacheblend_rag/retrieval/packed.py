"""Packs vectors into a quarter of their size, in a mapped file of which a search reads a small part.

FAISS does it: an inverted file of 8-bit scalars. What it finds are candidates, whose similarities are computed from the vectors
as they are in the index. The file can always be made again.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from cacheblend_rag.retrieval.embedding import Vectors
from cacheblend_rag.store.files import create_file

_TRAINED_ON = 64  # vectors for each list
_QUESTIONS = 256
_NEIGHBOURS = 10
_RECALL = 0.99
_NEARNESS = 0.6  # cosine similarity of a typical question to the passage that answers it
_BLOCK = 1 << 24


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
    state = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            state.update(block)
    return state.digest()
