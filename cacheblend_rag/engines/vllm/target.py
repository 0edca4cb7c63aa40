"""Drives the model in vLLM's worker for the fusor, a request in the paged cache at a time, and for the parity gate.

A watched pass has attention of our own, since vLLM's shows no weights. It writes nothing into the paged cache, so it may run
tokens that have no pages yet, as the question has none while a blend runs.
"""

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
from cacheblend_rag.blending.transfer import sent
from cacheblend_rag.engines.vllm.graphs import Gave, Given
from cacheblend_rag.engines.vllm.kernels import attention_replaced
from cacheblend_rag.engines.vllm.paged import PagedModel
from cacheblend_rag.engines.vllm.pages import MissingPageError, Pages
from cacheblend_rag.store.kv import ChunkKV, LayerKV

# Scores in memory at once. On a CPU as many as its caches hold: fresh memory for more costs as much as the products.
_SCORES = {"cpu": 1 << 19}
_MOST_SCORES = 1 << 24


class WatchedPass(Watch):
    """Runs tokens of a sequence over the KV in its pages and sums up what those from a position on attend to."""

    def __init__(
        self,
        paged: PagedModel,
        ids: torch.Tensor,
        pages: Pages,
        before_layer: Callable[[int], None],
        watch_from: int,
    ):
        """Run tokens of the prompt ``ids``, ``[prompt tokens]``, the first of which have their KV in ``pages``.

        Args:
            paged: The model.
            ids: Token ids, in host memory.
            pages: Those of the first positions, or of all.
            before_layer: Called with each layer's index before its pages are read.
            watch_from: The first watched position.
        """
        self._paged, self._ids, self._pages = paged, ids, pages
        self._before_layer, self._watch_from = before_layer, watch_from
        self._computed: list[list[tuple[torch.Tensor, torch.Tensor, LayerKV]]] = [[] for _ in paged.attention]
        self._total = torch.zeros(len(ids), device=paged.device)
        # In host memory, and on the device.
        self._at = self._positions = torch.empty(0, dtype=torch.int64)
        self._watched = 0
        # For what a pass sees, from one position to another: where it is in each group's pages.
        self._slots: dict[tuple[int, int, int], torch.Tensor] = {}

    @torch.inference_mode()
    def run(self, positions: torch.Tensor) -> None:
        """Run the tokens at ascending ``positions``, ``[tokens]``, in host memory; every later call's lie behind them."""
        paged = self._paged
        self._at, self._positions = positions, sent(positions, paged.device)
        with attention_replaced(paged.attention, self._attend_layer):
            paged.run_unwritten(self._ids[positions], self._positions)
        self._watched += int((positions >= self._watch_from).sum())

    def mean(self) -> torch.Tensor:
        """Attention to each token of the prompt, ``[prompt tokens]``, fp32, mean over layers, heads and watched tokens."""
        return self._total / (len(self._paged.attention) * self._watched)

    def _attend_layer(
        self,
        layer: int,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: None,
        output: torch.Tensor,
        **_: Any,
    ) -> torch.Tensor:
        """Write the attention of ``query``, ``[tokens, heads, head_dim]``, to ``output`` and return it."""
        self._before_layer(layer)
        # Copies: compiled code uses the memory again.
        fresh = LayerKV(*(t.transpose(0, 1).clone() for t in (key, value)))
        self._computed[layer].append((self._at, self._positions, fresh))
        window = self._paged.window(layer)
        first = 0 if window is None else max(0, int(self._at[0]) - window + 1)
        found = self._attend(module.impl, query, self._visible(layer, first), first, window)
        return output.copy_(found.view_as(output))

    def _visible(self, layer: int, first: int) -> LayerKV:
        """Return the KV of position ``first`` to the last that runs: the pages', and over it what this computed."""
        end = int(self._at[-1]) + 1
        where = self._paged.group_of[layer], first, end
        if where not in self._slots:
            self._slots[where] = sent(self._pages.between(*where), self._paged.device)
        kv = self._paged.read(layer, self._slots[where])
        if lacking := end - first - kv.k.shape[1]:
            kv = LayerKV(*(pad(t, (0, 0, 0, lacking)) for t in kv))
        for at, positions, fresh in self._computed[layer]:
            before = int((at < first).sum())
            own = positions[before:] - first
            for whole, part in zip(kv, fresh, strict=True):
                whole[:, own] = part[:, before:]
        return kv

    def _attend(self, impl: Any, query: torch.Tensor, kv: LayerKV, first: int, window: int | None) -> torch.Tensor:
        """Return the attention ``[tokens, heads, head_dim]`` of ``query``, shaped like it, in fp32; sum up the watched part.

        ``kv`` is that of the positions from ``first`` on; a token sees no more than ``window`` of them, itself included.
        """
        count, heads, dim = query.shape
        kv_heads, groups = kv.k.shape[0], heads // kv.k.shape[0]
        query = (query.float() * impl.scale).view(count, kv_heads, groups, dim).transpose(0, 1)
        out = query.new_empty(count, kv_heads, groups, dim)
        sinks = getattr(impl, "sinks", None)
        if sinks is not None:
            sinks = sinks.float().view(kv_heads, 1, groups, 1)
        most = _SCORES.get(query.device.type, _MOST_SCORES)
        begin = 0
        while begin < count:
            part = slice(begin, begin + max(1, most // (groups * kv.k.shape[1])))
            begin = part.stop
            at, seen = self._positions[part], int(self._at[part][-1]) + 1 - first
            # All keys up to the first query's position are seen by all queries, but for those before a window.
            free = 0 if window is not None else int(self._at[part][0]) + 1 - first
            keys = torch.arange(first + free, first + seen, device=at.device)
            hidden = keys > at[:, None]
            if window is not None:
                hidden |= keys <= at[:, None] - window
            unwatched = int((self._at[part] < self._watch_from).sum())
            together = max(1, most // (len(at) * groups * seen))
            for head in range(0, kv_heads, together):
                own = slice(head, head + together)
                scores = query[own, part].flatten(1, 2) @ kv.k[own, :seen].transpose(1, 2).float()
                if cap := getattr(impl, "logits_soft_cap", None):
                    scores = (scores / cap).tanh() * cap
                scores = scores.view(-1, len(at), groups, seen)
                scores[..., free:].masked_fill_(hidden[:, None], float("-inf"))
                if sinks is not None:
                    # One more score for each head, which takes its share of the attention and gives nothing.
                    scores = torch.cat([scores, sinks[own].expand(*scores.shape[:3], 1)], dim=-1)
                weights = scores.softmax(-1)[..., :seen]
                self._total[first : first + seen].add_(weights[:, unwatched:].sum((0, 1, 2)), alpha=1 / heads)
                found = weights.flatten(1, 2) @ kv.v[own, :seen].float()
                out[part, own] = found.view(-1, len(at), groups, dim).transpose(0, 1)
        return out


class KernelWatch(Watch):
    """Runs a question with the kernels, by a graph if there is one; keeps nothing from one part of it to the next."""

    def __init__(self, target: PagedTarget, paged: PagedModel, watch_from: int, before_layer: Callable[[int], None]):
        self._target, self._paged, self._watch_from, self._before_layer = target, paged, watch_from, before_layer
        self._asked = torch.empty(0, dtype=torch.int64)
        self._total = torch.zeros(len(target.ids), device=paged.device)

    @torch.inference_mode()
    def run(self, positions: torch.Tensor) -> None:
        """Run the tokens at ascending ``positions``, ``[tokens]``, in host memory, and those before them, uncounted."""
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
        """Attention to each token of the prompt, ``[prompt tokens]``, fp32, mean over layers, heads and watched tokens."""
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
    """One prompt being blended into its blocks.

    Attributes:
        placed: Whether all that is stored is in place, or on its way.
        due: Captures the last pass, if that is due.
    """

    def __init__(self, paged: PagedModel, rope: Rope, token_ids: Sequence[int], pages: Pages):
        """Fill ``pages`` with the KV of ``token_ids``."""
        self._paged, self.rope, self.pages = paged, rope, pages
        self.placed = False
        self.due: Callable[[], None] | None = None
        self.ids = torch.tensor(token_ids)
        self.num_layers, self.device = paged.num_layers, paged.device
        self.hidden: torch.Tensor | None = None

    def place(self, layer: int, kv: LayerKV, positions: torch.Tensor, move: Move | None) -> None:
        slots = self.pages.on_device[self._paged.group_of[layer]]
        self._paged.place(layer, kv, move, slots[positions])

    def place_layers(self, stored: StoredLayers) -> Callable[[int], None] | None:
        kernels = self._paged.kernels
        if kernels is None or len(self.pages.on_device) > 1:  # groups of layers have pages of their own
            return None
        waiting = kernels.place_layers(stored, self.pages.on_device[0][stored.positions])
        self.placed = waiting is not None
        return waiting

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
        """See :class:`~cacheblend_rag.blending.target.BlendTarget`: attention by distance alone (ALiBi) is not watched."""
        return all(getattr(each.impl, "alibi_slopes", None) is None for each in self._paged.attention)

    def attention(self, watch_from: int, before_layer: Callable[[int], None]) -> Watch:
        """See :class:`~cacheblend_rag.blending.target.BlendTarget`. Nothing is written: positions without blocks may be run."""
        paged = self._paged
        if paged.kernels is not None and paged.kernels.can_watch:
            return KernelWatch(self, paged, watch_from, before_layer)
        return WatchedPass(self._paged, self.ids, self.pages, before_layer, watch_from)

    def segment(self, positions: torch.Tensor, most: int | None = None) -> torch.Tensor:
        return self._paged.segment(positions, most)

    def all_reduce(self, deviation: torch.Tensor) -> torch.Tensor:
        """Sum over ranks; each holds its own KV heads."""
        return sum_over_ranks(deviation)

    def agree(self, ok: bool) -> bool:
        return all_ranks(ok)


class PagedSubject(GateSubject):
    """Lets the gate drive the worker's model. Uses the cache's first blocks: only while no request runs."""

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
        """Return pages of its own for each group of layers: groups share the memory of a block."""
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
        slots = [pages.between(group, 0, tokens) for group in range(len(self._paged.groups))]
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
