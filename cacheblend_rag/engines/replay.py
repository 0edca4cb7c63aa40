"""Captures passes as CUDA graphs when they come again, for whichever engine runs them, and says which later ones each serves."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, Final, Generic, TypeVar

import torch

_log = logging.getLogger(__name__)

# Up to so many tokens, passes of a multiple of the second number are captured: few take as long as one, for the weights must be
# read. Passes of more than all these keep a GPU busy without a graph.
_WIDTHS: Final = ((1, 1), (32, 32), (128, 64), (512, 32), (1024, 64), (2048, 128))
# A graph of so many times as many tokens serves, too: capturing takes longer than many prompts' padding.
_SERVES: Final = 9 / 8
# Relative error up to which a graph gives what the pass gave that it was made of: products of more rows round otherwise.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}

Kind = tuple[int, bool]
"""Of how many tokens a pass is, and whether their attention is asked for."""
_Result = TypeVar("_Result")
_Made = TypeVar("_Made")


def capture(run: Callable[[], _Result], pool: Any) -> tuple[_Result, Callable[[], object], Any]:
    """Capture what ``run`` queues; return what it returns, what replays it, and the memory pool that the next may share."""
    graph = torch.cuda.CUDAGraph()
    # Other threads page-lock memory meanwhile.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        result = run()
    return result, graph.replay, graph.pool()


def padded(values: torch.Tensor, width: int) -> torch.Tensor:
    """Return ``values``, ``[tokens]``, and their last one again up to ``width``: computed again, it gives the same numbers."""
    return torch.cat([values, values[-1:].expand(width - len(values))])


class Replays(Generic[_Made]):
    """Keeps what was captured of one model's passes.

    Attributes:
        passes: What was captured, by kind.
        refused: Whether this model goes on without graphs.
    """

    def __init__(self, agree: Callable[[bool], bool] = bool):
        """Capture nothing yet; ``agree`` says whether something holds on every tensor-parallel rank."""
        self.passes: dict[Kind, _Made] = {}
        self.refused = False
        self._met: set[Kind] = set()
        self._agree = agree

    def forget(self) -> None:
        """Let go of all that was captured: the memory that it reads and writes is gone."""
        self.passes, self._met = {}, set()

    def serving(self, tokens: int, looked: bool = False) -> _Made | None:
        """Return what was captured for a pass of ``tokens``, whose attention is asked for if ``looked``; None if nothing was."""
        own = _width(tokens)
        widths = [width for width, looks in self.passes if looks == looked and own <= width <= _SERVES * own]
        return self.passes[min(widths), looked] if widths else None

    def due(self, tokens: int, looked: bool = False) -> Kind | None:
        """Take note of a pass that nothing served; return as what it is to be captured, if it has come a second time."""
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
        """Capture a pass by ``make``, unless it gives something else.

        ``replay`` runs what was captured; it returns pairs of what that gave and what the ordinary pass gave.
        """
        made, why = None, "another rank cannot capture a pass"
        try:
            made = make()
        except Exception as failure:  # a model that waits for the device, or whose shapes depend on what it computes
            why = _first_line(failure)
        # A rank that replayed alone would wait for the others for ever.
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
    """Return how many tokens the graph has that serves so many; 0 for none."""
    for most, step in _WIDTHS:
        if tokens <= most:
            return -(-tokens // step) * step
    return 0
