"""Runs a vLLM model's own forward at given positions, and reads and writes its paged KV cache by position."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from vllm.forward_context import set_forward_context
from vllm.model_executor.models.interfaces import requires_raw_input_tokens
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform

from cacheblend_rag.blending.rope import CosSin, Move, moved
from cacheblend_rag.blending.target import StopForward
from cacheblend_rag.blending.transfer import sent
from cacheblend_rag.engines.vllm.attention import Kernels, PassMetadata, Scattered, kernels_for, watching
from cacheblend_rag.engines.vllm.graphs import Gave, PagedGraphs
from cacheblend_rag.engines.vllm.pages import (
    BlockIds,
    PageGroup,
    Pages,
    TiledPages,
    first_part,
    gaps,
    page_groups,
    pages_of,
    read_page,
    runs_in_pages,
    slots_of,
)
from cacheblend_rag.store.kv import LayerKV

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

# Most tokens of a pass that takes Python longer than a GPU. A graph suits such a pass even if the tokens are one run,
# for which vLLM's attention would be better.
_FEW = 256


class PagedModel:
    """Runs the loaded model on its paged KV cache. Position ``p`` of a sequence is slot ``p`` of its pages in order."""

    def __init__(
        self,
        model: Any,
        device: torch.device,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        kv_caches: dict[str, torch.Tensor],
    ):
        self.model, self.device, self.config = model, device, vllm_config
        # vLLM lists the caches group by group.
        self.names = sorted(kv_caches, key=extract_layer_index)
        self.num_layers = len(self.names)
        self._caches = kv_caches
        self.attention = [vllm_config.compilation_config.static_forward_context[name] for name in self.names]
        self.kv_heads, self.head_dim = int(self.attention[0].num_kv_heads), int(self.attention[0].head_size)
        assert isinstance(vllm_config.model_config.dtype, torch.dtype)
        self.dtype: torch.dtype = vllm_config.model_config.dtype
        self.vocab_size = int(vllm_config.model_config.get_vocab_size())
        takes = vllm_config.model_config
        self._embeds = bool(takes.supports_multimodal_inputs or takes.enable_prompt_embeds)
        self.block_size = int(vllm_config.cache_config.block_size)
        self.num_blocks = int(kv_cache_config.num_blocks)
        self.groups: Sequence[PageGroup] = page_groups(kv_cache_config)
        self.group_of = [
            next(i for i, group in enumerate(kv_cache_config.kv_cache_groups) if name in group.layer_names)
            for name in self.names
        ]
        scheduler = vllm_config.scheduler_config
        self._max_tokens = int(scheduler.max_num_batched_tokens)
        # GPU backends have buffers for max_num_seqs sequences. The CPU's backend has none, and a second segment would
        # read all weights again.
        self._max_runs = self._max_tokens if current_platform.is_cpu() else int(scheduler.max_num_seqs)
        self._before_layer: Callable[[int], None] | None = None
        self.kernels: Kernels | None = None
        self.graphs: PagedGraphs | None = None
        self._metadata = PassMetadata(
            dict(zip(self.names, self.attention, strict=True)), vllm_config, kv_cache_config, device
        )

    @property
    def kernel_block_size(self) -> int:
        """Return the tokens in a page of the attention kernel; some kernels split the scheduler's blocks."""
        return int(self._caches[self.names[0]].shape[2])

    @cached_property
    def _pages(self) -> list[LayerKV | TiledPages]:
        on_cpu = bool(current_platform.is_cpu())
        # In vLLM's CPU backend each layer names the instruction set of its kernels.
        instructions = (getattr(attention, "isa", None) for attention in self.attention)
        return [pages_of(self._caches[name], on_cpu, isa) for name, isa in zip(self.names, instructions, strict=True)]

    # Methods for the paged cache.

    def window(self, layer: int) -> int | None:
        """Return how many tokens a token sees in ``layer``, including itself; None for all earlier tokens."""
        return getattr(self.attention[layer], "sliding_window", None)

    def slots(self, group: int, block_ids: BlockIds, positions: torch.Tensor) -> torch.Tensor:
        """Return the cache slots ``[tokens]`` (int64, on the CPU) of positions of a sequence, in the layers of ``group``.

        Raises:
            MissingPageError: A position has no page.
        """
        return slots_of(block_ids[group], positions.cpu(), self.block_size)

    def write(self, layer: int, kv: LayerKV, slots: torch.Tensor) -> None:
        """Write ``kv``, ``[kv_heads, tokens, head_dim]``, to ``slots`` with the backend's own update, in any layout."""
        attention = self.attention[layer]
        k, v = (t.transpose(0, 1) for t in kv)
        if not current_platform.is_cpu():  # only the CPU's kernel takes any strides
            k, v = k.contiguous(), v.contiguous()
        attention.impl.do_kv_cache_update(attention, k, v, attention.kv_cache, sent(slots, self.device))

    def place(self, layer: int, kv: LayerKV, move: Move | None, slots: torch.Tensor) -> None:
        """Write stored ``kv``, ``[kv_heads, tokens, head_dim]``, with keys rotated by ``move``, to device ``slots``."""
        if self.kernels is None:
            self.write(layer, moved(kv, move), slots)
        else:
            self.kernels.place(layer, kv, move, slots)

    def read(self, layer: int, slots: torch.Tensor) -> LayerKV:
        """Return a copy of the KV at ``slots``, ``[kv_heads, tokens, head_dim]``."""
        pages, cache = self._pages[layer], self._caches[self.names[layer]]
        _, heads, size, width = cache.shape
        if not current_platform.is_cpu():
            assert isinstance(pages, LayerKV)  # only a CPU has tiles
            slots = sent(slots, cache.device)
            at_pages, rows = slots // size, slots % size
            return LayerKV(*(x[at_pages, :, rows].transpose(0, 1).contiguous() for x in pages))
        # Copied run by run: gathering single tokens along a strided axis takes three times as long.
        copy = LayerKV(*(cache.new_empty(heads, len(slots), width // 2) for _ in range(2)))
        at = 0
        for run in runs_in_pages(slots, size):
            page, first = divmod(int(run[0]), size)
            end = at + len(run)
            copy.k[:, at:end], copy.v[:, at:end] = read_page(pages, page, first, first + len(run))
            at = end
        return copy

    def layout_is_known(self) -> bool:
        """Return whether :meth:`read` returns what :meth:`write` wrote, in every layer; overwrites the first blocks."""
        generator = torch.Generator().manual_seed(0)
        count = 3 * self.block_size // 2
        slots = torch.randperm(2 * self.block_size, generator=generator)[:count] + self.block_size
        for layer in range(self.num_layers):
            keys = torch.randn(self.kv_heads, count, self.head_dim, generator=generator).to(self.device, self.dtype)
            want = LayerKV(keys, -keys)
            try:
                self.write(layer, want, slots)
                got = self.read(layer, slots)
            except (RuntimeError, ValueError, IndexError, AttributeError):
                return False
            if not (torch.equal(got.k, want.k) and torch.equal(got.v, want.v)):
                return False
        return True

    def find_kernels(self) -> Kernels | None:
        """Return the kernels if all layers are supported; the layout must be known. The caller assigns ``kernels``."""
        plain = [pages for pages in self._pages if isinstance(pages, LayerKV)]
        return kernels_for(self.attention, plain, self.config) if len(plain) == self.num_layers else None

    def find_graphs(self, agree: Callable[[bool], bool]) -> PagedGraphs | None:
        """Return graphs for this model's passes; None in eager mode, without CUDA or kernels, or for several groups."""
        eager = self.device.type != "cuda" or self.config.model_config.enforce_eager
        if eager or self.kernels is None or len(self.groups) > 1:
            return None
        pages = -(-self.config.model_config.max_model_len // self.block_size), self.block_size
        return PagedGraphs(self.scatter, self.look, self.kernels.arrivals.wait, agree, pages, self.device)

    def graphs_for(self, positions: torch.Tensor) -> PagedGraphs | None:
        """Return the graphs if graphs suit a pass over ``positions``, ``[tokens]``, in host memory, else None."""
        return self.graphs if len(positions) <= _FEW or self.scatters(positions) else None

    # Methods for the model's own forward.

    def segment(self, positions: torch.Tensor, most: int | None = None) -> torch.Tensor:
        """Return the first of ascending ``positions``: at most ``most``, within the tokens and sequences of a step."""
        runs = self._max_tokens if self.kernels else self._max_runs
        return first_part(positions, min(self._max_tokens, most or self._max_tokens), runs)

    @torch.inference_mode()
    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        pages: Pages,
        before_layer: Callable[[int], None],
        stop_layer: int | None = None,
        rotate_by: int = 0,
        compiled: bool = True,
    ) -> LayerKV | torch.Tensor:
        """Run tokens ``ids``, ``[tokens]``, at ascending ``positions``, ``[tokens]``, of a sequence; both are in host memory.

        Each token sees the sequence's keys up to its own position. ``before_layer`` is called with each layer's index
        before the layer writes or reads KV. ``rotate_by`` is added to the positions for RoPE alone. ``compiled`` runs
        compiled code, which calls no hooks of modules.

        Returns:
            The stop layer's fresh KV (not written to the cache), or the hidden states ``[tokens, hidden]``.
        """
        at = sent(positions, self.device)
        slots = [sent(pages.at(group, positions), self.device) for group in range(len(self.groups))]
        with self._attention_at(positions, at, pages, slots) as metadata, self._stopping_at(stop_layer):
            try:
                rotated = at + rotate_by if rotate_by else at
                return self._pass(ids, rotated, metadata, slots, before_layer, compiled=compiled and stop_layer is None)
            except StopForward as stop:
                return stop.fresh

    def scatter(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        table: torch.Tensor,
        before_layer: Callable[[int], None],
    ) -> Gave:
        """Run tokens with the kernels' attention, from device tensors alone, so that a graph can capture the pass.

        ``ids``, ``positions`` and ``slots``, the slots of fresh KV in all layers, are ``[tokens]``; ``table`` holds the
        block ids of the sequence's pages, int32.
        """
        assert self.kernels is not None
        with self.kernels.attending():
            metadata = self._of_layers([Scattered(positions, table)])
            return Gave(self._pass(ids, positions, metadata, [slots], before_layer))

    def look(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        slots: Sequence[torch.Tensor],
        shares: torch.Tensor,
        before_layer: Callable[[int], None],
    ) -> Gave:
        """Run a question's tokens over a copy of the sequence's KV and sum up their attention, without writing KV.

        ``slots`` holds, for each group, the slots of the positions from 0 on, ``[keys]``; positions that no token sees
        may have any slot. ``shares``, ``[tokens]``, fp32, holds the factor of each token's attention. The other
        arguments are as in :meth:`scatter`.
        """
        sums = torch.zeros(max(int(x.num_kv_heads) for x in self.attention), len(slots[0]), device=self.device)

        def read(layer: int) -> LayerKV:
            before_layer(layer)
            return self.read(layer, slots[self.group_of[layer]])

        with watching(self.attention, self.kernels, read, positions, shares, sums):
            return Gave(self.run_unwritten(ids, positions), sums)

    def run_unwritten(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Call the model as :meth:`run` does, with vLLM's attention replaced by the caller, and without storing KV."""
        config, names = self.config, dict.fromkeys(self.names)
        fused = bool(config.compilation_config.pass_config.fuse_attn_quant)
        with set_forward_context(names, config, num_tokens=len(positions), slot_mapping={}, skip_compiled=fused):
            return self.run(ids, positions)

    def _pass(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: dict[str, Any],
        slots: Sequence[torch.Tensor],
        before_layer: Callable[[int], None],
        compiled: bool = True,
    ) -> torch.Tensor:
        """Run tokens at ``positions`` on the device, with attention ``metadata`` and each group's ``slots``."""
        with set_forward_context(
            metadata,
            self.config,
            num_tokens=len(positions),
            slot_mapping=self._of_layers(slots),
            skip_compiled=not compiled,
        ):
            try:
                before_layer(0)
                self._before_layer = before_layer
                return self.run(ids, positions)
            finally:
                self._before_layer = None

    def run(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Call the model with ``ids``, ``[tokens]``, in host memory, at ``positions`` on the device, as vLLM's runner does.

        Models that take images or prompt embeddings are compiled for embeddings, and get embeddings for text, too.
        """
        given, embeds = sent(ids.int(), self.device), None
        if self._embeds:
            embeds = self.model.embed_input_ids(given)
        hidden: torch.Tensor = self.model(
            input_ids=given if embeds is None or requires_raw_input_tokens(self.model) else None,
            positions=positions,
            intermediate_tensors=None,
            inputs_embeds=embeds,
        )
        return hidden

    def attention_begins(self, name: str) -> None:
        """Let the running pass, if any, prepare the layer behind ``name``; compiled code calls this method, too.

        The layer ``name`` has already written its fresh KV, and stored KV placed there now would overwrite fresh KV.
        """
        if self._before_layer is not None and (index := self.names.index(name) + 1) < self.num_layers:
            self._before_layer(index)

    def scatters(self, positions: torch.Tensor) -> bool:
        """Return whether the kernels compute attention for a pass over ``positions``, ``[tokens]``, in host memory."""
        if self.kernels is None:
            return False
        runs = int(gaps(positions).sum()) + 1
        return runs > self._max_runs or self.kernels.are_faster(len(positions), runs)

    @contextmanager
    def _stopping_at(self, layer: int | None) -> Iterator[None]:
        if layer is None:
            yield
            return
        handle = self.attention[layer].register_forward_pre_hook(_stop, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    @contextmanager
    def _attention_at(
        self, positions: torch.Tensor, at: torch.Tensor, pages: Pages, slots: Sequence[torch.Tensor]
    ) -> Iterator[dict[str, Any]]:
        """Choose the attention of a pass over ``positions`` (``at`` on the device); yield each layer's metadata."""
        if self.scatters(positions):
            assert self.kernels is not None
            scattered = [Scattered(at, table[0]) for table in pages.tables]
            with self.kernels.attending():
                yield self._of_layers(scattered)
        else:
            yield self._metadata.build(positions, at, pages.tables, slots)

    def _of_layers(self, of_groups: Sequence[Any]) -> dict[str, Any]:
        """Return a dict from each layer's name to the item of ``of_groups`` for the layer's group."""
        return {name: of_groups[group] for name, group in zip(self.names, self.group_of, strict=True)}

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits ``[vocab]`` of the last hidden state, on every rank."""
        from vllm.distributed import get_tp_group

        logits = self.model.compute_logits(hidden[-1:])
        group = get_tp_group()
        if group.world_size > 1:
            # On some platforms only the first rank gathers the logits.
            if logits is None:
                logits = torch.empty(1, self.vocab_size, dtype=hidden.dtype, device=hidden.device)
            logits = group.broadcast(logits[:, : self.vocab_size].contiguous(), src=0)
        last: torch.Tensor = logits[0, : self.vocab_size].float()
        return last

    def rope_tables(self) -> list[CosSin]:
        """Return every distinct RoPE table of the model, in fp32."""
        found = {id(m): m for m in self.model.modules() if hasattr(m, "cos_sin_cache")}
        return [_table(module, self.device) for module in found.values()]


def _stop(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    key = kwargs["key"] if "key" in kwargs else args[1]
    value = kwargs["value"] if "value" in kwargs else args[2]
    # Each rank has its own share of the query heads and KV heads: key and value are [tokens, heads * head_dim].
    shape = (key.shape[0], module.num_kv_heads, -1)
    raise StopForward(LayerKV(*(t.reshape(shape).transpose(0, 1).clone() for t in (key, value))))


def _table(module: Any, device: torch.device) -> CosSin:
    # The module may hold its table in the model's dtype; rotating stored keys needs fp32.
    make = getattr(module, "_compute_cos_sin_cache", None)
    table = (make() if make is not None else module.cos_sin_cache).float().to(device)

    def cos_sin(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = table[positions.to(device)].chunk(2, dim=-1)
        return torch.cat([cos, cos], dim=-1), torch.cat([sin, sin], dim=-1)

    return cos_sin
