"""Holds the index of a run in training: the trainer searches the newest index, another process builds new ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from cacheblend_lab.realm.index import PassageIndex, embed, newest_step
from cacheblend_lab.realm.inputs import Collator
from cacheblend_lab.realm.model import RealmModel
from cacheblend_lab.realm.passages import Tokenized
from cacheblend_lab.realm.refresh import Refresher
from cacheblend_lab.realm.runs import RunDirectory, Told


class RenewedIndex:
    """Holds the vectors of all passages, computed by parameters that are some steps old (paper section 3.3)."""

    def __init__(self, run: RunDirectory, model: RealmModel, passages: Sequence[Tokenized], collator: Collator):
        """Set the run; the index may be built later.

        Args:
            run: Directory of the indexes and checkpoints.
            model: Model whose document tower computes the vectors.
            passages: All passages of the corpus.
            collator: Makes batches of passages.
        """
        self._run, self._model, self._passages, self._collator = run, model, passages, collator
        self._index: PassageIndex | None = None

    def build(self, step: int, factory: str) -> None:
        """Build the index from the current parameters in the calling process, unless the newest index is of this step.

        Args:
            step: Training step of the current parameters.
            factory: FAISS index factory string.
        """
        if newest_step(self._run.index) != step:
            vectors = embed(self._model.document.eval(), self._passages, self._collator)
            assert vectors is not None
            PassageIndex.build(vectors, step, factory).save(self._run.index)

    def newest(self) -> PassageIndex:
        """Return the newest index; the file is read only if it is newer than the index in memory.

        Raises:
            InputError: The run has no index.
        """
        step = newest_step(self._run.index)
        if self._index is None or (step is not None and step > self._index.step):
            self._index = PassageIndex.load(self._run.index)
        return self._index

    @contextmanager
    def renewed(self, stage: int, steps: int, factory: str) -> Iterator[Callable[[int], None]]:
        """Run another process inside the context that rebuilds the index from new checkpoints; the trainer never waits.

        Args:
            stage: Stage whose checkpoints are indexed.
            steps: Number of steps of the stage, after which the caller uses :meth:`build`; 0 never rebuilds the index.
            factory: FAISS index factory string.

        Yields:
            A function to call with the step after each checkpoint; it restarts a killed process.
        """
        refresher = Refresher(self._run.path, stage, factory, str(self._collator.device))

        def saved(step: int) -> None:
            if step < steps:
                refresher.ensure()

        try:
            saved(0)
            yield saved
        finally:
            refresher.close()

    def vectors(self, rows: Sequence[Sequence[int | None]]) -> Tensor:
        """Return the candidates' vectors by the current parameters, with gradients to the document tower.

        The index only selects the candidates.

        Args:
            rows: Candidates of each query; None is the null document. All rows must have one length.

        Returns:
            ``[rows, candidates, vector]``.
        """
        used = sorted({at for row in rows for at in row}, key=lambda at: -1 if at is None else at)
        documents = [None if at is None else self._passages[at] for at in used]
        vectors: Tensor = self._model.document(self._collator.documents(documents))
        place = {at: number for number, at in enumerate(used)}
        return vectors[torch.tensor([[place[at] for at in row] for row in rows], device=vectors.device)]


def age(index: PassageIndex, step: int) -> Told:
    """Return the figures of an index at a training step: the step of the index, and its age in steps."""
    return {"index_step": index.step, "staleness": step - index.step}
