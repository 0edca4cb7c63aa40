"""Tests the loader's error for KV that comes too late."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cacheblend_rag.blending import loader
from cacheblend_rag.blending.loader import LayerLoader
from cacheblend_rag.blending.plan import StoredSpan
from cacheblend_rag.blending.reads import UnusableSpanError
from cacheblend_rag.store.kv import LayerKV, StoredKV
from tests.store.samples import kv_of

NO_ROPE: Any = SimpleNamespace(rotations=lambda *_: None, move=lambda *_, **__: None)


class HeldUp(StoredKV):
    """An entry whose reads wait for an event."""

    tier = "disk"

    def __init__(self) -> None:
        self._kv, self.go_on = kv_of(1), threading.Event()
        self.num_layers, self.num_tokens, self.start = self._kv.num_layers, self._kv.num_tokens, self._kv.start
        self.nbytes = self.stored_nbytes = self._kv.nbytes

    def layer(self, index: int) -> LayerKV:
        assert self.go_on.wait(60)
        return self._kv.layer(index)

    def static_deviation(self) -> None:
        return None


@pytest.fixture
def held_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldUp]:
    ticks = count()  # the clock advances a second with each look
    monkeypatch.setattr(loader, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    made = HeldUp()
    yield made
    made.go_on.set()


def loading(kv: StoredKV, most_wait_s: float | None) -> LayerLoader:
    in_ram = StoredSpan(0, 3, kv_of(2))
    return LayerLoader((), (in_ram, StoredSpan(5, 8, kv)), NO_ROPE, 2, torch.device("cpu"), most_wait_s=most_wait_s)


def test_a_late_layer_names_its_spans_and_reports_the_wait(held_up: HeldUp) -> None:
    late = loading(held_up, 0.0)
    with pytest.raises(UnusableSpanError, match="positions 5 to 8 is late") as raised, late:
        late.layer(0)
    assert (raised.value.late, [span.start for span in raised.value.spans]) == (True, [5])
    assert raised.value.waited_s == 1.0


def test_kv_given_up_before_any_computation_was_waited_for_from_the_start(held_up: HeldUp) -> None:
    with loading(held_up, None) as late:
        for elapsed in (1.0, 2.0):
            assert late.too_late().waited_s == elapsed
        assert late.too_late(0.5).waited_s == 0.5
        held_up.go_on.set()
