"""Captures repeated passes as CUDA graphs, for every engine, and finds the captured graph for a later pass."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, Final, Generic, TypeVar

import torch

_log = logging.getLogger(__name__)

# Pairs (maximum tokens, step): widths of captured passes are multiples of the step. A pass of few tokens takes as long
# as a pass of one, since all weights are read. Passes longer than the last maximum keep a GPU busy without a graph.
_WIDTHS: Final = ((1, 1), (32, 32), (128, 64), (512, 32), (1024, 64), (2048, 128))
# A graph may have up to this factor more tokens than the pass: capturing takes longer than the padding of many prompts.
_SERVES: Final = 9 / 8
# Maximum relative error of a graph against the ordinary pass: matrix products of more rows round differently.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}

Kind = tuple[int, bool]
"""Number of tokens of a pass, and whether the pass measures their attention."""
_Result = TypeVar("_Result")
_Made = TypeVar("_Made")


def capture(run: Callable[[], _Result], pool: Any) -> tuple[_Result, Callable[[], object], Any]:
    """Capture the GPU work of ``run``; return the result, a function that replays the work, and the memory pool."""
    graph = torch.cuda.CUDAGraph()
    # Other threads may page-lock memory during the capture.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        result = run()
    return result, graph.replay, graph.pool()


def padded(values: torch.Tensor, width: int) -> torch.Tensor:
    """Return ``values``, ``[tokens]``, padded to ``width`` with the last value: repeating a token changes nothing."""
    return torch.cat([values, values[-1:].expand(width - len(values))])


class Replays(Generic[_Made]):
    """Keeps the captured passes of one model.

    Attributes:
        passes: Captured passes, by kind.
        refused: Whether this model runs without graphs from now on.
    """

    def __init__(self, agree: Callable[[bool], bool] = bool):
        """Start without captured passes; ``agree`` returns whether a value is true on every tensor-parallel rank."""
        self.passes: dict[Kind, _Made] = {}
        self.refused = False
        self._met: set[Kind] = set()
        self._agree = agree

    def forget(self) -> None:
        """Discard all captured passes, because the memory that they read and write is gone."""
        self.passes, self._met = {}, set()

    def serving(self, tokens: int, looked: bool = False) -> _Made | None:
        """Return the captured pass for ``tokens``, with measured attention if ``looked``; None if there is none."""
        own = _width(tokens)
        widths = [width for width, looks in self.passes if looks == looked and own <= width <= _SERVES * own]
        return self.passes[min(widths), looked] if widths else None

    def due(self, tokens: int, looked: bool = False) -> Kind | None:
        """Record a pass without a graph; return the pass's kind to capture if the kind has run before, else None."""
        kind = _width(tokens), looked
        if self.refused or not kind[0] or kind in self.passes:
            return None
        if kind in self._met:
            return kind
        self._met.add(kind)
        return None

    def add(
        self,
        kind: Kind,
        make: Callable[[], _Made],
        replay: Callable[[_Made], Iterable[tuple[torch.Tensor, torch.Tensor]]],
    ) -> None:
        """Capture a pass by ``make`` and keep it if it computes the same as the ordinary pass; else refuse graphs.

        ``replay`` runs the captured pass and returns pairs of its results and the ordinary pass's results.
        """
        made, why = None, "another rank cannot capture a pass"
        try:
            made = make()
        except Exception as failure:  # the model waits for the device, or its shapes depend on computed values
            why = _first_line(failure)
        # A rank that replayed alone would wait for the other ranks for ever.
        if not self._agree(made is not None) or made is None:
            self._refuse(why)
            return
        try:
            pairs = [(got.float(), want) for got, want in replay(made)]
            error = max(float((got - want).norm() / want.float().norm().clamp_min(1e-30)) for got, want in pairs)
        except Exception as failure:
            pairs, error, why = [], float("inf"), _first_line(failure)
        else:
            why = f"what a graph gives differs by {error:.2g}"
        if self._agree(bool(pairs) and error < _TOLERANCE.get(pairs[0][1].dtype, 0.0)):
            self.passes[kind] = made
        else:
            self._refuse(why)

    def _refuse(self, why: str) -> None:
        self.refused = True
        _log.warning("Blends do without CUDA graphs, more slowly: %s", why)


def _first_line(failure: Exception) -> str:
    return f"{type(failure).__name__}: {failure}".splitlines()[0]


def _width(tokens: int) -> int:
    """Return the width of the graph for a pass of ``tokens`` tokens; 0 if no graph is that wide."""
    for most, step in _WIDTHS:
        if tokens <= most:
            return -(-tokens // step) * step
    return 0
