"""Rebuilds the index from the newest checkpoint, in a process beside the training (paper section 3.3)."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from cacheblend_lab.realm.index import PassageIndex, clear_unfinished, embed, newest_step
from cacheblend_lab.realm.inputs import Collator
from cacheblend_lab.realm.model import RealmModel, load_weights
from cacheblend_lab.realm.passages import load_passages, tokenize
from cacheblend_lab.realm.runs import RunDirectory
from cacheblend_rag.errors import ModelError

PASSAGES = "passages.jsonl"
_LOOK_S = 0.2


class Refresher:
    """Starts and ends the process that rebuilds the index; the trainer owns the object."""

    def __init__(self, directory: Path, stage: int, factory: str, device: str):
        """Prepare the process for a run; :meth:`ensure` starts it.

        Args:
            directory: Directory of the run.
            stage: Stage whose checkpoints are indexed.
            factory: FAISS index factory string.
            device: Device that embeds the passages.
        """
        self._arguments = (str(directory), stage, factory, device, torch.get_num_threads())
        self._process: BaseProcess | None = None
        self.starts = 0

    def ensure(self) -> None:
        """Start the process unless it is running."""
        if self._process is None or not self._process.is_alive():
            # Spawn a fresh interpreter: a fork would share the trainer's threads and device.
            context = multiprocessing.get_context("spawn")
            self._process = context.Process(target=refresh, args=self._arguments, daemon=True)
            self._process.start()
            self.starts += 1

    @property
    def pid(self) -> int | None:
        """Return the process's id, or None before the first start."""
        return self._process.pid if self._process is not None else None

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.terminate()
            self._process.join()


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
