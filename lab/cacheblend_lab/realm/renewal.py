"""Holds the index of a run while a stage trains: the newest is searched, another process makes newer ones."""

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
    """Vectors of all passages, by parameters that are a few steps old (paper section 3.3)."""

    def __init__(self, run: RunDirectory, model: RealmModel, passages: Sequence[Tokenized], collator: Collator):
        """Take the run's index, once there is one.

        Args:
            run: Where indexes and checkpoints are.
            model: Its document tower makes the vectors.
            passages: All of them.
            collator: Makes them into batches.
        """
        self._run, self._model, self._passages, self._collator = run, model, passages, collator
        self._index: PassageIndex | None = None

    def build(self, step: int, factory: str) -> None:
        """Make the index of the current parameters, here, unless there is one of this step.

        Args:
            step: Of the parameters.
            factory: Kind of FAISS index.
        """
        if newest_step(self._run.index) != step:
            vectors = embed(self._model.document.eval(), self._passages, self._collator)
            assert vectors is not None
            PassageIndex.build(vectors, step, factory).save(self._run.index)

    def newest(self) -> PassageIndex:
        """Return the newest index, read only if it is newer than the one before.

        Raises:
            InputError: There is none.
        """
        step = newest_step(self._run.index)
        if self._index is None or (step is not None and step > self._index.step):
            self._index = PassageIndex.load(self._run.index)
        return self._index

    @contextmanager
    def renewed(self, stage: int, steps: int, factory: str) -> Iterator[Callable[[int], None]]:
        """Have another process renew the index meanwhile, from each checkpoint; the trainer never waits for it.

        Args:
            stage: Whose checkpoints.
            steps: How many the stage has, behind whose last one :meth:`build` makes the index; 0 never renews it.
            factory: Kind of FAISS index.

        Yields:
            What is to be called with the step after each checkpoint: it starts the process again if it was killed.
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
        """Return the vectors of candidates by the current parameters, whose gradients reach the document tower.

        The index only says which passages to look at.

        Args:
            rows: Candidates of each query, None being the null document; all rows of one length.

        Returns:
            ``[rows, candidates, vector]``.
        """
        used = sorted({at for row in rows for at in row}, key=lambda at: -1 if at is None else at)
        documents = [None if at is None else self._passages[at] for at in used]
        vectors: Tensor = self._model.document(self._collator.documents(documents))
        place = {at: number for number, at in enumerate(used)}
        return vectors[torch.tensor([[place[at] for at in row] for row in rows], device=vectors.device)]


def age(index: PassageIndex, step: int) -> Told:
    """Return the figures of an index in a step: which it was, and how many steps old."""
    return {"index_step": index.step, "staleness": step - index.step}
