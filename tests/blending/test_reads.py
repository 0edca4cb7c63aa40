"""Tests the measured times of reads, by tier."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cacheblend_rag.blending.plan import StoredSpan
from cacheblend_rag.blending.reads import ReadMeter, UnusableSpanError, reads_of
from cacheblend_rag.errors import DamagedKVError, StoreUnavailableError
from cacheblend_rag.store import events
from cacheblend_rag.store.events import TierReads
from cacheblend_rag.store.kv import LayerKV, StoredKV
from tests.store.samples import kv_of

DISK: Any = SimpleNamespace(tier="disk", stored_nbytes=800, num_layers=8)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    now = SimpleNamespace(s=0.0)
    monkeypatch.setattr(events, "time", SimpleNamespace(perf_counter=lambda: now.s))
    return now


def test_times_of_successive_reads_add_up(clock) -> None:
    measured = ReadMeter()
    for took in (1.0, 2.0):
        with measured.reading(DISK):
            clock.s += took
        clock.s += 10.0  # time of the computation
    assert measured.taken() == {"disk": TierReads(200, 2, 3.0)}


def test_parallel_reads_count_their_time_once(clock) -> None:
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


def test_reads_from_ram_are_not_measured_and_a_failed_read_counts_no_bytes(clock) -> None:
    measured = ReadMeter()
    with measured.reading(SimpleNamespace(tier="ram", stored_nbytes=800, num_layers=8)):  # type: ignore[arg-type]
        clock.s += 1.0
    assert measured.taken() == {}
    with pytest.raises(OSError), measured.reading(DISK):
        clock.s += 1.0
        raise OSError
    assert measured.taken() == {"disk": TierReads(0, 0, 1.0)}


class Broken(StoredKV):
    """An entry of three tokens that cannot be read."""

    num_layers, num_tokens, start, nbytes, stored_nbytes = 2, 3, 0, 576, 576

    def __init__(self, tier: str, error: Exception):
        self.tier, self._error = tier, error

    def layer(self, index: int) -> LayerKV:
        raise self._error

    def static_deviation(self) -> None:
        return None


@pytest.mark.parametrize("tier", ["ram", "disk"])
@pytest.mark.parametrize("error", [DamagedKVError("cut"), StoreUnavailableError("away")], ids=["damaged", "away"])
def test_only_the_unreadable_entry_is_named(tier: str, error: Exception) -> None:
    whole, broken = StoredSpan(0, 3, kv_of(1)), StoredSpan(5, 8, Broken(tier, error))
    reads = reads_of(lambda _: (whole, broken), 2, torch.device("cpu"))
    with pytest.raises(UnusableSpanError, match="positions 5 to 8 cannot be used") as raised:
        reads.parts(0)
    reads.close()
    assert (raised.value.spans, raised.value.late, raised.value.__cause__) == ((broken,), False, error)
