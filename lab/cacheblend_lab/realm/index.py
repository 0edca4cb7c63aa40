"""Searches the passages' vectors, computed by the document tower of one step, for the largest inner products."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cacheblend_lab.realm.model import Tower
from cacheblend_lab.realm.passages import Collator, Tokenized
from cacheblend_rag.errors import InputError

_VECTORS, _ABOUT = "vectors.faiss", "about.json"
_BATCH = 64
_KEPT = 2


class PassageIndex:
    """Holds the passages' vectors in FAISS.

    Attributes:
        step: Training step of the parameters that computed the vectors.
        size: Number of passages.
    """

    def __init__(self, vectors: Any, step: int):
        """Wrap a FAISS index; see :meth:`build` and :meth:`load`."""
        self._faiss = vectors
        self.step = step
        self.size: int = vectors.ntotal

    @classmethod
    def build(cls, vectors: Tensor, step: int, factory: str = "Flat") -> PassageIndex:
        """Index vectors.

        Args:
            vectors: ``[passages, vector]``.
            step: Training step of the parameters that computed the vectors.
            factory: FAISS index factory string; ``Flat`` is exact.

        Raises:
            InputError: FAISS does not know the kind of index, or cannot build it from the vectors.
        """
        import faiss

        array = np.ascontiguousarray(vectors.detach().cpu().float().numpy())
        try:
            index = faiss.index_factory(array.shape[1], factory, faiss.METRIC_INNER_PRODUCT)
            if not index.is_trained:
                index.train(array)
            index.add(array)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[-1]
            raise InputError(
                f"FAISS makes no index {factory!r} of {len(array)} vectors ({reason}); Flat always works."
            ) from None
        return cls(index, step)

    def search(self, queries: Tensor, k: int, without: Sequence[int] | None = None) -> list[list[int]]:
        """Return the ``k`` passages with the largest inner product with each query, best first.

        Args:
            queries: ``[queries, vector]``.
            k: Number of passages per query; a smaller index returns fewer.
            without: Passage to exclude for each query: the source of the query.
        """
        wanted = min(k + (without is not None), self.size)
        array = np.ascontiguousarray(queries.detach().cpu().float().numpy())
        _, found = self._faiss.search(array, wanted)
        rows = []
        for number, row in enumerate(found.tolist()):
            banned = without[number] if without is not None else -1
            rows.append([int(at) for at in row if at not in (-1, banned)][:k])
        return rows

    def vectors(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Return the indexed vectors of passages: ``[rows, passages, vector]``; all rows must have one length."""
        flat = np.asarray([at for row in rows for at in row], np.int64)
        found = torch.from_numpy(np.asarray(self._faiss.reconstruct_batch(flat)))
        return found.view(len(rows), -1, found.shape[-1])

    def save(self, directory: Path) -> None:
        """Write the index into its own subdirectory, made visible by one rename; the two newest indexes remain."""
        import faiss

        aside = directory / f".building-{os.getpid()}"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        faiss.write_index(self._faiss, str(aside / _VECTORS))
        _write_about(aside, self.step, self.size)
        place = _place(directory, self.step)
        if place.exists():
            shutil.rmtree(aside)
            return
        aside.rename(place)
        for old in _steps(directory)[:-_KEPT]:
            shutil.rmtree(old, ignore_errors=True)

    @classmethod
    def load(cls, directory: Path) -> PassageIndex:
        """Read the newest complete index.

        Raises:
            InputError: The directory has no complete index.
        """
        import faiss

        for place in reversed(_steps(directory)):
            try:
                about = json.loads((place / _ABOUT).read_text(encoding="utf-8"))
                return cls(faiss.read_index(str(place / _VECTORS)), about["step"])
            except (OSError, RuntimeError, ValueError):
                continue  # a newer index has replaced it meanwhile
        raise InputError(f"There is no index in {directory}; `cacheblend realm pretrain` makes one.")


def newest_step(directory: Path) -> int | None:
    """Return the step of the newest index in a directory, without reading the index; None without an index."""
    steps = _steps(directory)
    return int(steps[-1].name.removeprefix("step-")) if steps else None


def bring_index(source: Path, target: Path) -> None:
    """Link or copy the newest index of one run into another run, as the index of step 0."""
    newest = _steps(source)[-1]
    size = json.loads((newest / _ABOUT).read_text(encoding="utf-8"))["passages"]
    clear_unfinished(target)
    aside = target / f".building-{os.getpid()}"
    aside.mkdir(parents=True)
    link(newest / _VECTORS, aside / _VECTORS)
    _write_about(aside, 0, size)
    aside.rename(_place(target, 0))


def link(source: Path, target: Path) -> None:
    """Make a hard link to a file, or a copy if the file system has no hard links."""
    try:
        os.link(source, target)
    except OSError:
        aside = target.with_name(f".{target.name}.{os.getpid()}")  # an interrupted copy leaves no partial `target`
        shutil.copyfile(source, aside)
        aside.replace(target)


def embed(
    tower: Tower, passages: Sequence[Tokenized], collator: Collator, go_on: Callable[[], bool] = lambda: True
) -> Tensor | None:
    """Return the vectors of passages: ``[passages, vector]``; None as soon as ``go_on`` returns False."""
    # Batches of similar lengths need less padding.
    order = sorted(range(len(passages)), key=lambda at: len(passages[at].body))
    found: Tensor | None = None
    with torch.no_grad():
        for start in range(0, len(order), _BATCH):
            if not go_on():
                return None
            batch = order[start : start + _BATCH]
            vectors = tower(collator.documents([passages[at] for at in batch])).cpu()
            if found is None:
                found = torch.empty(len(passages), vectors.shape[1])
            found[torch.tensor(batch)] = vectors
    return found


def clear_unfinished(directory: Path) -> None:
    """Remove the unfinished directories of a killed process; only the directory's one writer may call it."""
    for left in directory.glob(".building-*"):
        shutil.rmtree(left, ignore_errors=True)


def _steps(directory: Path) -> list[Path]:
    return sorted(directory.glob("step-*"))


def _place(directory: Path, step: int) -> Path:
    return directory / f"step-{step:08d}"


def _write_about(directory: Path, step: int, size: int) -> None:
    (directory / _ABOUT).write_text(json.dumps({"step": step, "passages": size}), encoding="utf-8")
