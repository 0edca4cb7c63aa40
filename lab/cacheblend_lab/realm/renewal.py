"""Holds the index of a run in training, which another process rebuilds from the newest checkpoint (paper section 3.3)."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from cacheblend_lab.realm.index import PassageIndex, clear_unfinished, embed, newest_step
from cacheblend_lab.realm.model import RealmModel, load_weights
from cacheblend_lab.realm.passages import Collator, Tokenized, load_passages, tokenize
from cacheblend_lab.realm.runs import RunDirectory, Told
from cacheblend_rag.errors import ModelError

PASSAGES = "passages.jsonl"
_LOOK_S = 0.2


def refresh(directory: str, stage: int, factory: str, device: str, threads: int) -> None:
    """Index each newest checkpoint, until the parent process has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer handles Ctrl-C
    torch.set_num_threads(threads)
    parent = multiprocessing.parent_process()

    def wanted() -> bool:
        return parent is not None and parent.is_alive()

    run = RunDirectory(Path(directory))
    lock = FileLock(run.path / "refresh.lock")
    while wanted():
        try:
            lock.acquire(timeout=1)
        except Timeout:
            continue  # the refresher of a killed trainer still holds the lock
        with lock:
            clear_unfinished(run.index)
            _keep_fresh(run, stage, factory, torch.device(device), wanted)


def _keep_fresh(run: RunDirectory, stage: int, factory: str, device: torch.device, wanted: Callable[[], bool]) -> None:
    model = RealmModel.load(run.path)
    tower = model.document.to(device).eval()
    passages = tokenize(load_passages(run.path / PASSAGES), model.tokenizer, model.shape.passage_tokens)
    collator = Collator(model.tokenizer, device)
    while wanted():
        newest = run.newest(stage)
        if newest is None or newest[1] <= (newest_step(run.index) or 0):
            time.sleep(_LOOK_S)
            continue
        try:
            load_weights(tower, newest[2], "document.")
        except (OSError, ModelError):
            continue  # a newer checkpoint has replaced it meanwhile
        vectors = embed(tower, passages, collator, wanted)
        if vectors is not None:
            PassageIndex.build(vectors, newest[1], factory).save(run.index)


class RenewedIndex:
    """Holds the vectors of all passages, computed by parameters that are some steps old (paper section 3.3)."""

    def __init__(self, run: RunDirectory, model: RealmModel, passages: Sequence[Tokenized], collator: Collator):
        """Set the run; the index may be built later."""
        self._run, self._model, self._passages, self._collator = run, model, passages, collator
        self._index: PassageIndex | None = None

    def build(self, step: int, factory: str) -> None:
        """Build the index from the current parameters in the calling process, unless the newest index is of this step."""
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
        arguments = (str(self._run.path), stage, factory, str(self._collator.device), torch.get_num_threads())
        started: list[BaseProcess] = []

        def saved(step: int) -> None:
            if step < steps and not any(process.is_alive() for process in started):
                # Spawn a fresh interpreter: a fork would share the trainer's threads and device.
                context = multiprocessing.get_context("spawn")
                started.append(context.Process(target=refresh, args=arguments, daemon=True))
                started[-1].start()

        try:
            saved(0)
            yield saved
        finally:
            for process in started:
                process.terminate()
                process.join()

    def vectors(self, rows: Sequence[Sequence[int | None]]) -> Tensor:
        """Return the candidates' vectors by the current parameters, with gradients to the document tower.

        The index only selects the candidates. None in ``rows`` is the null document; all rows must have one length.

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
