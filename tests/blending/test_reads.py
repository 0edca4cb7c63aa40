"""Tests what reading stored KV took, by tier."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest

from cacheblend_rag.blending.reads import ReadMeter
from cacheblend_rag.store import events
from cacheblend_rag.store.events import TierReads

DISK: Any = SimpleNamespace(tier="disk", stored_nbytes=800, num_layers=8)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    now = SimpleNamespace(s=0.0)
    monkeypatch.setattr(events, "time", SimpleNamespace(perf_counter=lambda: now.s))
    return now


def test_reads_one_after_the_other_add_up(clock) -> None:
    measured = ReadMeter()
    for took in (1.0, 2.0):
        with measured.reading(DISK):
            clock.s += took
        clock.s += 10.0  # the computation's time
    assert measured.taken() == {"disk": TierReads(200, 2, 3.0)}


def test_reads_side_by_side_take_their_time_once(clock) -> None:
    measured, begun, over = ReadMeter(), Barrier(4), Barrier(4)

    def read() -> None:
        with measured.reading(DISK):
            begun.wait()
            over.wait()

    with ThreadPoolExecutor(3) as pool:
        done = [pool.submit(read) for _ in range(3)]
        begun.wait()
        clock.s = 5.0
        over.wait()
        for each in done:
            each.result()
    assert measured.taken() == {"disk": TierReads(300, 3, 5.0)}


def test_ram_is_not_measured_and_a_read_that_fails_has_no_bytes(clock) -> None:
    measured = ReadMeter()
    with measured.reading(SimpleNamespace(tier="ram", stored_nbytes=800, num_layers=8)):  # type: ignore[arg-type]
        clock.s += 1.0
    assert measured.taken() == {}
    with pytest.raises(OSError), measured.reading(DISK):
        clock.s += 1.0
        raise OSError
    assert measured.taken() == {"disk": TierReads(0, 0, 1.0)}
