"""Replays a blend's passes in a vLLM worker as CUDA graphs; vLLM's own graphs serve only the tokens of vLLM's steps.

See "Graphs" in docs/internals/devices.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from cacheblend_rag.blending.transfer import sent
from cacheblend_rag.engines.replay import Replays, capture, padded
from cacheblend_rag.engines.vllm.pages import Pages

# Most keys that a question in a graph may attend to: a graph copies as many keys of each layer for every prompt.
_MOST_LOOKED_AT = 16384


class Gave(NamedTuple):
    """Holds the result of a pass: hidden states ``[tokens, hidden]`` and, for a question, the attention to each key.

    ``sums``, ``[kv_heads, keys]``, fp32, is the attention summed over layers; see
    :meth:`~cacheblend_rag.engines.vllm.attention.Kernels.watch`.
    """

    hidden: torch.Tensor
    sums: torch.Tensor | None = None


class Given(NamedTuple):
    """Holds the input of a pass: token ids and positions, ``[tokens]``, in host memory, and the sequence's pages.

    ``shares``, ``[tokens]``, fp32, in host memory, holds the factor of each token's attention, for a question.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    pages: Pages
    shares: torch.Tensor | None = None


@dataclass(frozen=True)
class _Captured:
    """Holds the input tensors of a graph, its result ``left``, and the function that replays the graph.

    ``tokens`` holds ids, positions and slots, ``[3, tokens]``. ``where`` holds the sequence's pages, int32, or for a
    question the slots of all keys, int64. ``shares`` is ``[tokens]``, fp32.
    """

    tokens: torch.Tensor
    where: torch.Tensor
    shares: torch.Tensor
    left: Gave
    replay: Callable[[], object]


class PagedGraphs:
    """Holds the graphs of one worker's model, whose layers must all share one set of pages."""

    def __init__(
        self,
        scatter: Callable[..., Gave],
        look: Callable[..., Gave],
        arrived: Callable[[int], None],
        agree: Callable[[bool], bool],
        pages: tuple[int, int],
        device: torch.device,
    ):
        """Start without graphs: a pass (``scatter`` or ``look``) is captured once a pass of its width has run twice.

        ``arrived`` makes the stream wait for a layer's stored KV, and is captured with the pass. ``agree`` returns
        whether a condition holds on every tensor-parallel rank. ``pages`` holds the most pages of a sequence and the
        tokens of a page.
        """
        self._scatter, self._look, self._arrived, self._device = scatter, look, arrived, device
        self._most_pages, self._keys = pages[0], min(pages[0] * pages[1], _MOST_LOOKED_AT)
        self._replays: Replays[_Captured] = Replays(agree)
        self._pool: Any = None

    def run(self, given: Given) -> Gave | None:
        """Return the result of a pass, valid until the next pass; None if there is no graph for its number of tokens.

        All stored KV must be in the pages, or its transfer must have begun.
        """
        looks = given.shares is not None
        made = self._replays.serving(len(given.positions), looks) if self._fits(given) else None
        return None if made is None else self._replay(made, given)

    def ran(self, given: Given, gave: Gave) -> Callable[[], None] | None:
        """Record a pass that :meth:`run` had no graph for, and its result ``gave``.

        Returns:
            A function that captures the pass, if a capture is due, to be called while the pages still belong to the
            sequence. The function computes the pass twice more.
        """
        kind = self._replays.due(len(given.positions), given.shares is not None) if self._fits(given) else None
        if kind is None:
            return None

        def replay(made: _Captured) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            again = self._replay(made, given)
            yield again.hidden, gave.hidden
            if again.sums is not None and gave.sums is not None:
                yield again.sums[:, : gave.sums.shape[1]], gave.sums

        return partial(self._replays.add, kind, partial(self._capture, kind[0], given), replay)

    def _fits(self, given: Given) -> bool:
        return given.shares is None or int(given.positions[-1]) < self._keys

    @torch.inference_mode()
    def _replay(self, made: _Captured, given: Given) -> Gave:
        self._tell(made.tokens, made.where, made.shares, given)
        made.replay()
        return made.left._replace(hidden=made.left.hidden[: len(given.positions)])

    def _tell(self, tokens: torch.Tensor, where: torch.Tensor, shares: torch.Tensor, given: Given) -> None:
        ids, positions, pages, own_shares = given
        # A question's tokens may have no pages, since their KV is not written.
        rows = (ids, positions, pages.at(0, positions) if own_shares is None else positions)
        tokens.copy_(sent(torch.stack([padded(row, tokens.shape[1]) for row in rows]), self._device))
        own = (pages.tables[0][0] if own_shares is None else pages.on_device[0])[: len(where)]
        where[: len(own)] = own
        if own_shares is not None:
            shares.zero_()[: len(own_shares)] = sent(own_shares, self._device)

    @torch.inference_mode()
    def _capture(self, width: int, given: Given) -> _Captured:
        tokens = torch.empty(3, width, dtype=torch.int64, device=self._device)
        shares = torch.empty(width, device=self._device)
        looks = given.shares is not None
        keys, dtype = (self._keys, torch.int64) if looks else (self._most_pages, torch.int32)
        where = torch.zeros(keys, dtype=dtype, device=self._device)
        self._tell(tokens, where, shares, given)
        ids, positions, slots = tokens.unbind()
        run: Callable[[Callable[[int], None]], Gave] = (
            partial(self._look, ids, positions, [where], shares)
            if looks
            else partial(self._scatter, ids, positions, slots, where)
        )
        # The first run compiles and allocates; a capture must do neither.
        run(lambda layer: None)
        left, replay, self._pool = capture(lambda: run(self._arrived), self._pool)
        return _Captured(tokens, where, shares, left, replay)
