"""Tests how many tokens of a blend a step computes while streams run."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed; make setup installs it")

from cacheblend_rag.blending.costs import Computed
from cacheblend_rag.engines.vllm import pace as module
from cacheblend_rag.engines.vllm.pace import Allowance, Pace, StepClock, Stopwatch


def test_unmeasured_passes_count_each_token_as_one() -> None:
    allowance = Allowance({}, 1000)
    assert allowance.tokens("sparse", 1.0) == 1000
    assert allowance.tokens("dense", 0.25) == 4000
    allowance.spend("dense", 0.25, 2000)
    assert allowance.tokens("sparse", 1.0) == 500


def test_slow_passes_get_the_time_of_a_prefill_and_fewer_tokens() -> None:
    allowance = Allowance({"prefill": 0.001, "sparse": 0.004}, 2000)
    assert allowance.tokens("sparse", 1.0) == 500
    assert allowance.tokens("dense", 1.0) == 2000
    allowance.spend("sparse", 1.0, 500)
    assert allowance.tokens("dense", 1.0) == 0


def test_times_of_blends_are_ignored_until_prefill_is_measured() -> None:
    assert Allowance({"sparse": 0.004}, 500).tokens("sparse", 1.0) == 500


def test_a_segment_has_64_tokens_at_least() -> None:
    allowance = Allowance({"prefill": 0.001, "sparse": 0.5}, 100)
    assert allowance.tokens("sparse", 1.0) == 64


def test_the_average_follows_new_measurements_without_changing_sent_values() -> None:
    pace = Pace()
    pace.take({"prefill": (100, 1.0)})
    sent = pace.seconds_per_token
    for _ in range(30):
        pace.take({"prefill": (100, 2.0), "sparse": (0, 1.0)})
    assert pace.seconds_per_token["prefill"] == pytest.approx(0.02, rel=0.01)
    assert sent == {"prefill": 0.01}
    assert "sparse" not in pace.seconds_per_token


def test_a_cpu_is_measured_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([10.0, 12.5])
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(now))
    clock = StepClock(torch.device("cpu"))
    clock.add("dense", 40, clock.mark())
    assert clock.take() == {"dense": (40, 2.5)}
    assert clock.take() == {}


def test_waiting_for_stored_kv_is_not_counted_as_computing(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([10.0, 12.5, 20.0, 20.5])
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(now))
    clock, watch = StepClock(torch.device("cpu")), Stopwatch()
    clock.add("dense", 40, clock.mark(), watch)
    clock.add("sparse", 10, clock.mark(), watch)
    assert clock.take_computed() == []
    clock.complete(watch, Computed(50, 200, 0.0, 150, 2.0, 10), waited_s=1.0)
    clock.complete(Stopwatch(), Computed(0, 200, 0.0))  # a blend without computed tokens is not measured
    assert clock.take_computed() == [Computed(50, 200, 2.0, 150, 2.0, 10)]
    assert clock.take_computed() == []


class Event:
    """A device's event in a list in order of recording; the device has passed the first `ended` events."""

    recorded: ClassVar[list[Event]] = []
    ended = 0

    def __init__(self, enable_timing: bool = False):
        assert enable_timing

    def record(self) -> None:
        self.index = len(self.recorded)
        self.recorded.append(self)

    def query(self) -> bool:
        return self.index < Event.ended

    def elapsed_time(self, end: Event) -> float:
        assert end.query(), "the device was asked before it was done"
        return 500.0 * (end.index - self.index)

    def synchronize(self) -> None:
        raise AssertionError("the device was waited for")


def test_a_device_is_measured_by_events_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Event, "recorded", [])
    monkeypatch.setattr(Event, "ended", 0)
    device: Any = torch.device("cuda", 0)
    monkeypatch.setattr(torch, "get_device_module", lambda _: type("Module", (), {"Event": Event}))
    clock, watch = StepClock(device), Stopwatch()
    begin = clock.mark()
    clock.add("prefill", 100, begin, watch)
    clock.add("sparse", 10, clock.mark(), watch)
    clock.complete(watch, Computed(110, 200, 0.0))
    assert clock.take() == {}
    Event.ended = 2
    assert clock.take() == {"prefill": (100, 0.5)}
    assert clock.take_computed() == []
    Event.ended = 4
    assert clock.take() == {"sparse": (10, 0.5)}
    assert clock.take_computed() == [Computed(110, 200, 1.0)]
