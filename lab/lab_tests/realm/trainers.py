"""Runs pre-training in processes that a test may kill, as well as their refreshers, forked because spawning imports
PyTorch."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import faiss
import torch

from cacheblend_lab.realm import renewal
from cacheblend_lab.realm.pretrain import PretrainSettings, pretrain
from lab_tests.realm.conftest import SHAPE, articles

_context = multiprocessing.get_context("forkserver")


@contextmanager
def training(bert: Path, output: Path, steps: int) -> Iterator[tuple[int, Connection]]:
    """Start a run and kill it in the end; yield its process id and its reports: each step's number and stage."""
    told, theirs = _context.Pipe(duplex=False)
    process = _context.Process(target=_train, args=(theirs, bert, output, steps))
    process.start()
    theirs.close()
    assert process.pid is not None
    try:
        yield process.pid, told
    finally:
        process.kill()
        process.join()
        told.close()


def _train(told: Connection, bert: Path, output: Path, steps: int) -> None:
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)  # threads do not survive a fork
    # An application starts it with pickled arguments; test_finetune.py covers these.
    renewal.multiprocessing = SimpleNamespace(  # type: ignore[attr-defined]
        get_context=lambda _: multiprocessing.get_context("fork"), parent_process=multiprocessing.parent_process
    )
    sizes = {"warm_steps": 4, "warm_batch": 4, "batch": 2, "candidates": 2, "refresh_every": 5}
    how = PretrainSettings(str(bert), SHAPE, steps=steps, **sizes)
    pretrain(articles(), output, how, torch.device("cpu"), lambda done, _, at: told.send((int(done), at)))
