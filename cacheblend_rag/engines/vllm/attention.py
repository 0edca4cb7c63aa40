"""Computes attention for passes over scattered tokens in a vLLM worker, by this package's kernels or by vLLM.

Without the kernels, each run of neighbouring tokens is a separate request to vLLM's attention. A question is watched
with this package's own attention, since vLLM's attention returns no weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import set_current_vllm_config
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

from cacheblend_rag.blending.bulk import Arrivals, StoredLayers
from cacheblend_rag.blending.rope import Move
from cacheblend_rag.blending.transfer import sent, transfer_to
from cacheblend_rag.engines.kernels.check import attention_works, can_place, placing_works, shares_work
from cacheblend_rag.engines.vllm.pages import gaps
from cacheblend_rag.store.kv import LayerKV

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    from cacheblend_rag.engines.kernels.place import Layers

# Backends with a known page layout, whose attention has no feature that the kernel lacks.
_BACKENDS = {"FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "CPU_ATTN"}
# Half a tile of vLLM's kernels: runs with more rows (tokens times heads) are left to vLLM's kernels.
_ROWS = 64
# Most scores in memory at once. On a CPU as many as its caches hold: allocating more takes as long as the products.
_SCORES = {"cpu": 1 << 19}
_MOST_SCORES = 1 << 24


@dataclass(frozen=True)
class Scattered:
    """Holds the attention metadata of a pass that this package's kernel computes.

    Attributes:
        positions: Positions of the tokens, ``[tokens]``, ascending, int64, on the device.
        table: Block ids of the sequence's pages, int32, on the device.
    """

    positions: torch.Tensor
    table: torch.Tensor


def kernels_for(layers: Sequence[Any], pages: Sequence[LayerKV], config: VllmConfig) -> Kernels | None:
    """Return the kernels for a model's attention ``layers`` and their ``pages``; None if any layer is unsupported."""
    model = config.model_config
    plain = not getattr(model, "is_mm_prefix_lm", False) and getattr(model, "rswa_window", None) is None
    fused = config.compilation_config.pass_config.fuse_attn_quant
    if not plain or fused or not all(_serves(layer) for layer in layers):
        return None
    shapes = {(int(x.num_heads), int(x.num_kv_heads), int(x.head_size), _sinks(x) is not None) for x in layers}
    memory = pages[0].k
    where = memory.device, memory.dtype
    work = all(
        placing_works(*where, kv_heads, dim) and attention_works(*where, heads, kv_heads, dim, sinks)
        for heads, kv_heads, dim, sinks in sorted(shapes)
    )
    return Kernels(layers, pages) if work else None


def _serves(layer: Any) -> bool:
    impl = layer.impl
    return (
        layer.get_attn_backend().get_name() in _BACKENDS
        and layer.head_size == getattr(layer, "head_size_v", layer.head_size)
        and all(getattr(impl, name, None) is None for name in ("alibi_slopes", "kv_sharing_target_layer_name"))
        and getattr(impl, "chunk_lookback", -1) < 0
    )


def _sinks(layer: Any) -> torch.Tensor | None:
    return getattr(layer.impl, "sinks", None)


def _can_watch(layer: Any, memory: torch.Tensor) -> bool:
    shape = int(layer.num_heads), int(layer.num_kv_heads), int(layer.head_size)
    return not getattr(layer.impl, "logits_soft_cap", None) and shares_work(memory.device, memory.dtype, *shape)


@contextmanager
def attention_replaced(layers: Sequence[Any], attend: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Replace vLLM's ``impl.forward`` of ``layers`` by ``attend``, which gets a layer's index before vLLM's arguments.

    vLLM calls ``impl.forward`` outside compiled code, once the tokens' own KV is in the pages.
    """
    for index, layer in enumerate(layers):
        layer.impl.forward = partial(attend, index)  # an attribute of the instance hides the class's method
    try:
        yield
    finally:
        for layer in layers:
            del layer.impl.forward


class Kernels:
    """Runs the kernels for a model's attention layers.

    Attributes:
        can_watch: Whether :meth:`watch` supports every layer.
    """

    def __init__(self, layers: Sequence[Any], pages: Sequence[LayerKV]):
        """Bind the kernels to ``layers`` and to views of each layer's ``pages``; see :func:`kernels_for`."""
        self._layers, self._pages = layers, pages
        # Checked here, so that no request waits for the check.
        self.can_watch = all(_can_watch(layer, pages[0].k) for layer in layers)
        self._group = min(int(layer.num_heads) // int(layer.num_kv_heads) for layer in layers)

    def are_faster(self, tokens: int, runs: int) -> bool:
        """Return whether the kernels are faster than vLLM's attention for ``tokens`` in ``runs`` runs of neighbours."""
        return tokens * self._group < runs * _ROWS

    def watch(
        self,
        layer: Any,
        query: torch.Tensor,
        kv: LayerKV,
        positions: torch.Tensor,
        shares: torch.Tensor,
        sums: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        """Write the attention of ``query`` to ``output`` and add the weights to ``sums``; see :func:`attend_and_sum`.

        ``sums`` is ``[kv_heads, keys]``; see :func:`~cacheblend_rag.engines.kernels.attention.add_shares`.
        """
        from cacheblend_rag.engines.kernels.attention import add_shares, attend

        scale, window = layer.impl.scale, layer.sliding_window
        lse = torch.empty(query.shape[:2], device=query.device)
        attend(query, kv.k[None], kv.v[None], positions, None, output, scale, 0.0, window, _sinks(layer), lse)
        add_shares(query, kv.k, positions, shares, lse, sums[: len(kv.k)], scale, window)

    def place(self, layer: int, kv: LayerKV, move: Move | None, slots: torch.Tensor) -> None:
        """Write ``kv``, ``[kv_heads, tokens, head_dim]``, with keys rotated by ``move``, to ``slots``, ``[tokens]``."""
        from cacheblend_rag.engines.kernels.place import place

        place(kv, move, slots, *self._pages[layer])

    def place_layers(self, stored: StoredLayers, slots: torch.Tensor) -> Callable[[int], None] | None:
        """Start to write ``stored`` to ``slots``, ``[tokens]``; return a function to call before a layer reads pages.

        Return None if the device has no streams, the layers' caches differ, or the kernels do not support the format.
        """
        transfer, layers = transfer_to(slots.device), self._alike
        if transfer is None or layers is None:
            return None
        keys = layers.keys
        if not can_place(stored, keys.device, keys.dtype, *keys.shape[1::2]):
            return None
        from cacheblend_rag.engines.kernels.place import place_in_bulk

        place_in_bulk(stored, slots, layers, transfer, self.arrivals)
        return self.arrivals.wait

    @cached_property
    def arrivals(self) -> Arrivals:
        """Return the events after which stored KV is in place, for running passes and for captured graphs."""
        return Arrivals(self._pages[0].k.device, len(self._pages), external=True)

    @cached_property
    def _alike(self) -> Layers | None:
        from cacheblend_rag.engines.kernels.place import Layers

        return Layers.of(self._pages)

    def attending(self) -> AbstractContextManager[None]:
        """Replace vLLM's attention; passes that run meanwhile must have :class:`Scattered` as metadata."""
        return attention_replaced(self._layers, self._attend)

    def _attend(
        self,
        index: int,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Scattered,
        output: torch.Tensor,
        **_: Any,
    ) -> torch.Tensor:
        """Write the attention to ``output`` and return ``output``."""
        from cacheblend_rag.engines.kernels.attention import attend

        attend(
            query,
            *self._pages[index],
            attn_metadata.positions,
            attn_metadata.table,
            output,
            layer.impl.scale,
            getattr(layer.impl, "logits_soft_cap", None) or 0.0,
            layer.sliding_window,
            _sinks(layer),
        )
        return output


def watching(
    layers: Sequence[Any],
    kernels: Kernels | None,
    read: Callable[[int], LayerKV],
    positions: torch.Tensor,
    shares: torch.Tensor,
    sums: torch.Tensor,
) -> AbstractContextManager[None]:
    """Replace the attention of ``layers`` by watched attention over copied KV, by ``kernels`` if the kernels can watch.

    ``read`` copies a layer's KV. The fresh KV of the pass overwrites the copy at ``positions``. The other arguments are
    as for :func:`attend_and_sum`; ``sums`` is ``[kv_heads, keys]``.
    """

    def watch(
        index: int, layer: Any, query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **given: Any
    ) -> torch.Tensor:
        kv, output = read(index), given["output"]
        for whole, fresh in zip(kv, (k, v), strict=True):
            whole[:, positions] = fresh.transpose(0, 1)
        if kernels is None or not kernels.can_watch:
            output.copy_(attend_and_sum(layer, query, kv, positions, shares, sums).view_as(output))
        else:
            kernels.watch(layer, query, kv, positions, shares, sums, output)
        return output  # type: ignore[no-any-return]

    return attention_replaced(layers, watch)


def attend_and_sum(
    layer: Any, query: torch.Tensor, kv: LayerKV, positions: torch.Tensor, shares: torch.Tensor, sums: torch.Tensor
) -> torch.Tensor:
    """Return the attention of ``query`` in fp32, shaped like ``query``, and add the attention weights to ``sums``.

    Args:
        layer: vLLM's attention layer, with its window, soft cap and sinks.
        query: Queries of the tokens, ``[tokens, heads, head_dim]``.
        kv: KV of the sequence's positions from 0 on, ``[kv_heads, keys, head_dim]``.
        positions: Positions of the tokens, ``[tokens]``, ascending.
        shares: Factor of each token's attention in ``sums``, ``[tokens]``, fp32.
        sums: ``[1, keys]`` or more rows, fp32; the weights, averaged over heads, are added to the first row.
    """
    impl, window = layer.impl, layer.sliding_window
    count, heads, dim = query.shape
    kv_heads, groups = kv.k.shape[0], heads // kv.k.shape[0]
    query = (query.float() * impl.scale).view(count, kv_heads, groups, dim).transpose(0, 1)
    out = query.new_empty(count, kv_heads, groups, dim)
    sinks = getattr(impl, "sinks", None)
    if sinks is not None:
        sinks = sinks.float().view(kv_heads, 1, groups, 1)
    most = _SCORES.get(query.device.type, _MOST_SCORES)
    begin, longest = 0, int(positions[-1]) + 1
    while begin < count:
        part = slice(begin, begin + max(1, most // (groups * longest)))
        begin, at = part.stop, positions[part]
        # No query sees the keys before the first query's window or behind the last query.
        first, end = 0 if window is None else max(0, int(at[0]) - window + 1), int(at[-1]) + 1
        free = 0 if window is not None else int(at[0]) + 1  # number of keys that every query sees
        keys = torch.arange(first + free, end, device=at.device)
        hidden = keys > at[:, None]
        if window is not None:
            hidden |= keys <= at[:, None] - window
        together = max(1, most // (len(at) * groups * (end - first)))
        for head in range(0, kv_heads, together):
            own = slice(head, head + together)
            scores = query[own, part].flatten(1, 2) @ kv.k[own, first:end].transpose(1, 2).float()
            if cap := getattr(impl, "logits_soft_cap", None):
                scores = (scores / cap).tanh() * cap
            scores = scores.view(-1, len(at), groups, end - first)
            scores[..., free:].masked_fill_(hidden[:, None], float("-inf"))
            if sinks is not None:
                # A sink is one more score for each head, which takes a share of the attention and adds no value.
                scores = torch.cat([scores, sinks[own].expand(*scores.shape[:3], 1)], dim=-1)
            weights = scores.softmax(-1)[..., : end - first]
            sums[0, first:end].add_(shares[part] @ weights.sum((0, 2)), alpha=1 / heads)
            found = weights.flatten(1, 2) @ kv.v[own, first:end].float()
            out[part, own] = found.view(-1, len(at), groups, dim).transpose(0, 1)
    return out.view(count, heads, dim)


class PassMetadata:
    """Builds attention metadata with separate builders, since vLLM's steps use the buffers of vLLM's own builders."""

    def __init__(
        self, layers: Mapping[str, Any], config: VllmConfig, kv_cache_config: KVCacheConfig, device: torch.device
    ):
        self._device = device
        with set_current_vllm_config(config):
            self._builders = [_builders(group, layers, config, device) for group in kv_cache_config.kv_cache_groups]

    def build(
        self, positions: torch.Tensor, at: torch.Tensor, tables: Sequence[torch.Tensor], slots: Sequence[torch.Tensor]
    ) -> dict[str, Any]:
        """Return the metadata of each layer, by name.

        Args:
            positions: Positions of the tokens, ``[tokens]``, ascending, in host memory.
            at: Copy of ``positions`` on the device.
            tables: Block ids of the sequence for each KV cache group, ``[1, blocks]``, on the device.
            slots: Slots of the positions for each group, ``[tokens]``, on the device.
        """
        metadata: dict[str, Any] = {}
        common = self._common(positions, at)
        for table, own_slots, builders in zip(tables, slots, self._builders, strict=True):
            pages = table.expand(common.num_reqs, -1).contiguous()
            own = common.replace(block_table_tensor=pages, slot_mapping=own_slots)
            for names, builder in builders:
                metadata |= dict.fromkeys(names, builder.build(common_prefix_len=0, common_attn_metadata=own))
        return metadata

    def _common(self, positions: torch.Tensor, at: torch.Tensor) -> CommonAttentionMetadata:
        """Describe each run of neighbouring positions as one request on the same pages; mask and window are then exact.

        The caller fills in the pages and slots of each group.
        """
        count = len(positions)
        breaks = torch.nonzero(gaps(positions)).flatten() + 1
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), breaks])
        ends = torch.cat([breaks, torch.tensor([count])])
        query_starts = torch.cat([starts, ends[-1:]]).to(torch.int32)
        lengths = (positions[ends - 1] + 1).to(torch.int32)
        return CommonAttentionMetadata(
            query_start_loc=sent(query_starts, self._device),
            query_start_loc_cpu=query_starts,
            seq_lens=sent(lengths, self._device),
            num_reqs=len(starts),
            num_actual_tokens=count,
            max_query_len=int((ends - starts).max()),
            max_seq_len=int(lengths.max()),
            block_table_tensor=torch.empty(0),
            slot_mapping=torch.empty(0),
            causal=True,
            positions=at,
            is_prefilling=torch.ones(len(starts), dtype=torch.bool),
            seq_lens_cpu_upper_bound=lengths,
        )


def _builders(
    group: KVCacheGroupSpec, layers: Mapping[str, Any], config: VllmConfig, device: torch.device
) -> list[tuple[list[str], Any]]:
    """Return new metadata builders for the layers of ``group``: one per backend and KV spec."""
    shared: dict[Any, list[str]] = {}
    for name in group.layer_names:
        spec = group.kv_cache_spec
        if isinstance(spec, UniformTypeKVCacheSpecs):
            spec = spec.kv_cache_specs[name]
        shared.setdefault((layers[name].get_attn_backend(), spec), []).append(name)
    return [
        (names, backend.get_builder_cls()(spec, names, config, device)) for (backend, spec), names in shared.items()
    ]
