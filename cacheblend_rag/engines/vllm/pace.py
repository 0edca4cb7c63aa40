"""Measures the time of the workers' work, and computes how much blending fits into a step while requests stream.

The first rank measures; the scheduler averages and sends the same numbers to all ranks. Each rank cuts a blend's passes
by these numbers, and ranks that cut differently would wait for each other for ever.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import torch

from cacheblend_rag.blending.costs import Computed

PREFILL: Final = "prefill"
"""Kind of work of ordinary steps."""
LEAST_PREFILL: Final = 256
"""Least tokens of a step that measures prefill: the time of a shorter step is the time of reading the weights."""
_NEW: Final = 0.2  # weight of a new measurement in the average
_LEAST_SEGMENT: Final = 64  # a shorter pass reads all weights for few tokens


class Pace:
    """Averages seconds per token in the scheduler, by kind of work, with exponentially fading weights."""

    def __init__(self) -> None:
        self.seconds_per_token: dict[str, float] = {}

    def take(self, times: Mapping[str, tuple[float, float]]) -> None:
        """Add measured tokens and seconds to the averages."""
        # A new dictionary: the old one may be on its way to the workers.
        self.seconds_per_token = {**self.seconds_per_token}
        for kind, (tokens, seconds) in times.items():
            if tokens > 0 and seconds > 0:
                old = self.seconds_per_token.get(kind)
                new = seconds / tokens
                self.seconds_per_token[kind] = new if old is None else (1 - _NEW) * old + _NEW * new


class Allowance:
    """Holds the rest of the time that a worker's blends may take in one step."""

    def __init__(self, pace: Mapping[str, float], step_tokens: float):
        """Allow the time that an ordinary prefill of ``step_tokens`` tokens takes.

        Until a prefill has been measured, a token of any kind of work counts as one token of prefill.
        """
        self._pace = pace if PREFILL in pace else {PREFILL: 1.0}
        self._left = step_tokens * self._pace[PREFILL]

    def tokens(self, kind: str, share: float) -> int:
        """Return how many tokens of ``kind`` through a ``share`` of the layers still fit: 0, or at least 64."""
        if self._left <= 0:
            return 0
        return max(_LEAST_SEGMENT, int(self._left / self._seconds(kind, share)))

    def spend(self, kind: str, share: float, tokens: int) -> None:
        """Subtract the time of ``tokens`` of ``kind`` through a ``share`` of the layers."""
        self._left -= tokens * self._seconds(kind, share)

    def _seconds(self, kind: str, share: float) -> float:
        return max(share, 1e-3) * self._pace.get(kind, self._pace[PREFILL])


class Stopwatch:
    """Adds up the seconds of several pieces of work, and counts the pieces that the device has not finished yet."""

    def __init__(self) -> None:
        self.seconds, self.pending = 0.0, 0


class StepClock:
    """Measures tokens and seconds by kind of work: on a device by events, without waiting, on a CPU by the clock."""

    def __init__(self, device: torch.device):
        self._device = device
        self._pending: deque[tuple[str, float, Any, Any, Stopwatch]] = deque()
        self._whole: list[tuple[Stopwatch, Computed, float]] = []
        self._times: dict[str, tuple[float, float]] = {}
        self.totals: dict[str, tuple[float, float]] = {}

    def mark(self) -> Any:
        """Return a time stamp: the clock's time on a CPU, else an event recorded in the current stream."""
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.get_device_module(self._device).Event(enable_timing=True)
        event.record()
        return event

    def add(self, kind: str, tokens: float, begin: Any, watch: Stopwatch | None = None) -> None:
        """Record work on ``tokens`` tokens (times the share of layers) from ``begin`` until now, also in ``watch``."""
        watch = watch or Stopwatch()
        if self._device.type == "cpu":
            self._sum(kind, tokens, time.perf_counter() - begin, watch)
        else:
            watch.pending += 1
            self._pending.append((kind, tokens, begin, self.mark(), watch))

    def complete(self, watch: Stopwatch, work: Computed, waited_s: float = 0.0) -> None:
        """Record that ``watch`` has timed ``work``, whose seconds are open, and ``waited_s`` of waits for stored KV."""
        self._whole.append((watch, work, waited_s))

    def take_computed(self) -> list[Computed]:
        """Return the computations completed since the last call, as far as :meth:`take` has read their measurements."""
        done = [whole for whole in self._whole if not whole[0].pending]
        self._whole = [whole for whole in self._whole if whole[0].pending]
        found = (replace(work, seconds=watch.seconds - waited) for watch, work, waited in done)
        return [took for took in found if took.tokens > 0 and took.seconds > 0]

    def take(self) -> dict[str, tuple[float, float]]:
        """Return tokens and seconds, by kind, of the work that has ended since the last call, without waiting."""
        while self._pending and self._pending[0][3].query():
            kind, tokens, begin, end, watch = self._pending.popleft()
            watch.pending -= 1
            self._sum(kind, tokens, begin.elapsed_time(end) / 1000, watch)
        times, self._times = self._times, {}
        return times

    def _sum(self, kind: str, tokens: float, seconds: float, watch: Stopwatch) -> None:
        watch.seconds += seconds
        for sums in (self._times, self.totals):
            before = sums.get(kind, (0.0, 0.0))
            sums[kind] = before[0] + tokens, before[1] + seconds
