"""Runs the model in vLLM's worker for the fusor, one request in the paged cache at a time, and for the parity gate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.functional import pad
from vllm.distributed import get_tp_group, tensor_model_parallel_all_reduce

from cacheblend_rag.blending.bulk import StoredLayers
from cacheblend_rag.blending.gate import GateSubject
from cacheblend_rag.blending.rope import Move, Rope, rope_of_runs, two_runs
from cacheblend_rag.blending.target import BlendTarget, Watch
from cacheblend_rag.blending.transfer import sent, whole_numbers
from cacheblend_rag.engines.vllm.graphs import Gave, Given
from cacheblend_rag.engines.vllm.paged import PagedModel
from cacheblend_rag.engines.vllm.pages import MissingPageError, Pages
from cacheblend_rag.store.kv import ChunkKV, LayerKV


class PagedWatch(Watch):
    """Watches a question's attention, by a graph if there is one; stores no KV between the parts of the question."""

    def __init__(self, target: PagedTarget, paged: PagedModel, watch_from: int, before_layer: Callable[[int], None]):
        self._target, self._paged, self._watch_from, self._before_layer = target, paged, watch_from, before_layer
        self._asked = torch.empty(0, dtype=torch.int64)
        self._total = torch.zeros(len(target.ids), device=paged.device)

    @torch.inference_mode()
    def run(self, positions: torch.Tensor) -> None:
        """Run the tokens at ascending ``positions``, ``[tokens]``, in host memory, and all earlier parts, uncounted."""
        target, device = self._target, self._paged.device
        self._asked = asked = torch.cat([self._asked, positions])
        shares = (asked >= max(self._watch_from, int(positions[0]))).float()
        given = Given(target.ids[asked], asked, target.pages, shares)
        graphs = self._paged.graphs if target.placed else None
        gave = None if graphs is None else graphs.run(given)
        if gave is None:
            slots = [pad(own, (0, len(self._total) - len(own))) for own in target.pages.on_device]
            on_device = sent(asked, device), slots, sent(shares, device)
            gave = self._paged.look(given.ids, *on_device, self._before_layer)
            target.due = None if graphs is None else graphs.ran(given, gave)
        assert gave.sums is not None
        seen = min(len(self._total), gave.sums.shape[1])
        self._total[:seen] += gave.sums.sum(0)[:seen]

    def mean(self) -> torch.Tensor:
        """Return the attention to each token, ``[prompt tokens]``, fp32, mean over layers, heads and watched tokens."""
        watched = int((self._asked >= self._watch_from).sum())
        return self._total / (len(self._paged.attention) * watched)


def all_ranks(ok: bool) -> bool:
    """Return whether ``ok`` holds on every tensor-parallel rank."""
    group = get_tp_group()
    if group.world_size == 1:
        return ok
    votes = torch.tensor([int(ok)])
    torch.distributed.all_reduce(votes, torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    return bool(votes)


def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of ``values`` over all tensor-parallel ranks."""
    total: torch.Tensor = tensor_model_parallel_all_reduce(values)
    return total


class PagedTarget(BlendTarget):
    """Blends one prompt into the prompt's pages.

    Attributes:
        due: Function that captures the last pass; None if no capture is due.
    """

    def __init__(self, paged: PagedModel, rope: Rope, token_ids: Sequence[int], pages: Pages):
        """Fill ``pages`` with the KV of ``token_ids``."""
        self._paged, self.rope, self.pages = paged, rope, pages
        self.due: Callable[[], None] | None = None
        self.ids = whole_numbers(token_ids)
        self.num_layers, self.device = paged.num_layers, paged.device
        self.hidden: torch.Tensor | None = None

    def place(self, layer: int, kv: LayerKV, positions: torch.Tensor, move: Move | None) -> None:
        slots = self.pages.on_device[self._paged.group_of[layer]]
        self._paged.place(layer, kv, move, slots[positions])

    def place_layers(self, stored: StoredLayers) -> Callable[[int], None] | None:
        kernels = self._paged.kernels
        if kernels is None or len(self.pages.on_device) > 1:  # each group of layers has separate pages
            return None
        return kernels.place_layers(stored, self.pages.on_device[0][stored.positions])

    def forward(
        self, positions: torch.Tensor, before_layer: Callable[[int], None], stop_layer: int | None = None
    ) -> LayerKV | None:
        given = Given(self.ids[positions], positions, self.pages)
        graphs = self._paged.graphs_for(positions) if self.placed and stop_layer is None else None
        gave = None if graphs is None else graphs.run(given)
        if gave is None:
            result = self._paged.forward(given.ids, positions, self.pages, before_layer, stop_layer)
            if isinstance(result, LayerKV):
                return result
            gave = Gave(result)
            self.due = None if graphs is None else graphs.ran(given, gave)
        self.hidden = gave.hidden
        return None

    @property
    def shows_attention(self) -> bool:
        """See :class:`~cacheblend_rag.blending.target.BlendTarget`; attention with ALiBi slopes cannot be watched."""
        return all(getattr(each.impl, "alibi_slopes", None) is None for each in self._paged.attention)

    def attention(self, watch_from: int, before_layer: Callable[[int], None]) -> PagedWatch:
        """See :class:`~cacheblend_rag.blending.target.BlendTarget`; no KV is written, so positions need no pages."""
        return PagedWatch(self, self._paged, watch_from, before_layer)

    def segment(self, positions: torch.Tensor, most: int | None = None) -> torch.Tensor:
        return self._paged.segment(positions, most)

    def all_reduce(self, deviation: torch.Tensor) -> torch.Tensor:
        """Sum ``deviation`` over ranks, each of which holds its own KV heads."""
        return sum_over_ranks(deviation)

    def agree(self, ok: bool) -> bool:
        return all_ranks(ok)


class PagedSubject(GateSubject):
    """Gives the gate access to the worker's model. Uses the cache's first blocks, so no request may run meanwhile."""

    def __init__(self, paged: PagedModel):
        self._paged = paged
        self.num_layers, self.vocab_size, self.dtype = paged.num_layers, paged.vocab_size, paged.dtype

    @property
    def window(self) -> int | None:
        windows = [window for layer in range(self.num_layers) if (window := self._paged.window(layer)) is not None]
        return min(windows, default=None)

    def fits(self, tokens: int) -> bool:
        within_pages = len(self._paged.groups) * self._blocks(tokens) < self._paged.num_blocks
        return within_pages and tokens < self._paged.config.model_config.max_model_len

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._paged.block_size)

    def _pages(self, tokens: int) -> Pages:
        """Return separate pages for each group of layers, since groups share the memory of a block."""
        if not self.fits(tokens):
            raise MissingPageError(f"vLLM's KV cache has no room for a prompt of {tokens} tokens")
        count = self._blocks(tokens)
        ids = [range(1 + i * count, 1 + (i + 1) * count) for i in range(len(self._paged.groups))]
        return Pages(self._paged, ids, tokens)

    def detect_rope(self) -> Rope:
        return rope_of_runs(self._paged.rope_tables(), two_runs(self.full_prefill, self.vocab_size))

    def full_prefill(self, token_ids: Sequence[int], offset: int = 0) -> tuple[torch.Tensor, ChunkKV]:
        ids, rest = torch.tensor(token_ids), torch.arange(len(token_ids))
        pages = self._pages(len(token_ids))
        hidden: Any = None
        while len(rest):
            part = self._paged.segment(rest)
            hidden = self._paged.forward(ids[part], part, pages, lambda layer: None, rotate_by=offset)
            rest = rest[len(part) :]
        return self._paged.logits(hidden), ChunkKV(self._read(pages, len(ids)), offset)

    def _read(self, pages: Pages, tokens: int) -> list[LayerKV]:
        slots = [pages.at(group, torch.arange(tokens)) for group in range(len(self._paged.groups))]
        return [self._paged.read(layer, slots[group]) for layer, group in enumerate(self._paged.group_of)]

    def kv(self, target: Any) -> list[LayerKV]:
        assert isinstance(target, PagedTarget)
        return self._read(target.pages, len(target.ids))

    def target(self, token_ids: Sequence[int], rope: Rope) -> BlendTarget:
        return PagedTarget(self._paged, rope, token_ids, self._pages(len(token_ids)))

    def logits(self, target: Any) -> torch.Tensor:
        assert isinstance(target, PagedTarget)
        assert target.hidden is not None
        return self._paged.logits(target.hidden)
