"""Replays a blend's passes in a vLLM worker as CUDA graphs; vLLM's own are for the tokens of its steps.

A graph is the model's forward, as vLLM compiled it, over so many tokens, with our kernels' attention. It reads from the device
which tokens they are, where they stand, which pages are the sequence's and where in them fresh KV goes. Before a group of layers
it waits for their stored KV, by the event that :mod:`cacheblend_rag.blending.bulk` records.
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

# What a question may look at in a graph: of each layer so much is copied out of its pages, however long the prompt is.
_MOST_LOOKED_AT = 16384


class Gave(NamedTuple):
    """Holds what a pass gives: hidden states ``[tokens, hidden]``, and for a question how much it attends to each key.

    ``sums``, ``[kv_heads, keys]``, fp32, are over layers; see :meth:`~cacheblend_rag.engines.vllm.attention.Kernels.watch`.
    """

    hidden: torch.Tensor
    sums: torch.Tensor | None = None


class Given(NamedTuple):
    """Holds what a pass is told: token ids and positions, ``[tokens]``, in host memory, and the sequence's pages.

    ``shares``, ``[tokens]``, fp32, in host memory, says how much the attention of a question's tokens counts.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    pages: Pages
    shares: torch.Tensor | None = None


@dataclass(frozen=True)
class _Captured:
    """Holds what a graph reads, what runs it, and what it leaves.

    ``tokens`` are ids, positions and slots, ``[3, tokens]``; ``where`` is the sequence's pages, int32, or of a question the slots
    of all its keys; ``shares`` is ``[tokens]``, fp32.
    """

    tokens: torch.Tensor
    where: torch.Tensor
    shares: torch.Tensor
    left: Gave
    replay: Callable[[], object]


class PagedGraphs:
    """Keeps the graphs of one worker's model, all of whose layers share one set of pages."""

    def __init__(
        self,
        scatter: Callable[..., Gave],
        look: Callable[..., Gave],
        arrived: Callable[[int], None],
        agree: Callable[[bool], bool],
        pages: tuple[int, int],
        device: torch.device,
    ):
        """Capture nothing yet: a pass (the model's ``scatter`` or ``look``) is captured when one of its width has run twice.

        ``arrived`` lets the stream wait for a layer's stored KV, and is captured along; ``agree`` says whether something holds on
        every tensor-parallel rank; ``pages`` are how many a sequence has at the most, and the tokens in one.
        """
        self._scatter, self._look, self._arrived, self._device = scatter, look, arrived, device
        self._most_pages, self._keys = pages[0], min(pages[0] * pages[1], _MOST_LOOKED_AT)
        self._replays: Replays[_Captured] = Replays(agree)
        self._pool: Any = None

    def run(self, given: Given) -> Gave | None:
        """Return what a pass gives, until the next one; None if there is no graph for so many tokens.

        All stored KV must be in the pages or on its way.
        """
        looks = given.shares is not None
        made = self._replays.serving(len(given.positions), looks) if self._fits(given) else None
        return None if made is None else self._replay(made, given)

    def ran(self, given: Given, gave: Gave) -> Callable[[], None] | None:
        """Take note of a pass that :meth:`run` had no graph for, and of what it gave.

        Returns:
            What captures it, if it is due: to be called while its pages are the sequence's. It is computed again, twice.
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
        # A question's tokens may have no pages: nothing is written.
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
        # What is compiled and allocated at first use must not be captured.
        run(lambda layer: None)
        left, replay, self._pool = capture(lambda: run(self._arrived), self._pool)
        return _Captured(tokens, where, shares, left, replay)
