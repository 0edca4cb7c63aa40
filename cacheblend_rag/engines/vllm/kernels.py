"""Runs our kernels in a vLLM worker: stored KV goes straight into pages, scattered tokens attend in one launch a layer.

Without them each run of neighbouring tokens is a request of its own to vLLM's attention, which gives every request at least
one tile, most of it empty. Here a pass's tokens share tiles, and vLLM's attention is replaced while the pass runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch

from cacheblend_rag.blending.bulk import Arrivals, StoredLayers
from cacheblend_rag.blending.rope import Move
from cacheblend_rag.blending.transfer import transfer_to
from cacheblend_rag.engines.kernels.check import attention_works, placing_works, shares_work
from cacheblend_rag.store.kv import LayerKV

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from cacheblend_rag.engines.kernels.place import Layers

# Backends whose pages are known to us, and whose attention does nothing that the kernel does not.
_BACKENDS = {"FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "CPU_ATTN"}
# Half a tile of vLLM's kernels: runs with more rows, tokens times heads, are left to them (benchmarks/attention_tiles.py).
_ROWS = 64


@dataclass(frozen=True)
class Scattered:
    """Attention metadata of a pass that our kernel serves.

    Attributes:
        positions: ``[tokens]``, ascending, int64, on the device.
        table: The sequence's pages, int32, on the device.
    """

    positions: torch.Tensor
    table: torch.Tensor


def kernels_for(layers: Sequence[Any], pages: Sequence[LayerKV], config: VllmConfig) -> Kernels | None:
    """Return the kernels for a model's attention ``layers`` and their ``pages``; None where they cannot serve all of them."""
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
    """Let ``attend`` compute the attention of ``layers``: called with a layer's index, then as vLLM calls ``impl.forward``.

    vLLM calls that outside of what is compiled, once the tokens' own KV is in the pages.
    """
    for index, layer in enumerate(layers):
        layer.impl.forward = partial(attend, index)  # in front of the class's own
    try:
        yield
    finally:
        for layer in layers:
            del layer.impl.forward


class Kernels:
    """The kernels, bound to a model's attention layers.

    Attributes:
        can_watch: Whether :meth:`watch` serves all of them.
    """

    def __init__(self, layers: Sequence[Any], pages: Sequence[LayerKV]):
        """Take the layers and views of each one's pages; see :func:`kernels_for`."""
        self._layers, self._pages = layers, pages
        # Tried now, not while a request waits.
        self.can_watch = all(_can_watch(layer, pages[0].k) for layer in layers)
        self._group = min(int(layer.num_heads) // int(layer.num_kv_heads) for layer in layers)

    def are_faster(self, tokens: int, runs: int) -> bool:
        """Say whether to attend with ours, for so many tokens in so many runs of neighbours."""
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
        """Write the attention of ``query`` to ``output``, as :func:`~cacheblend_rag.engines.vllm.watching.attend_and_sum` does.

        ``sums``, ``[kv_heads, keys]``: see :func:`~cacheblend_rag.engines.kernels.attention.add_shares`.
        """
        from cacheblend_rag.engines.kernels.attention import add_shares, attend

        scale, window = layer.impl.scale, layer.sliding_window
        lse = torch.empty(query.shape[:2], device=query.device)
        attend(query, kv.k[None], kv.v[None], positions, None, output, scale, 0.0, window, _sinks(layer), lse)
        add_shares(query, kv.k, positions, shares, lse, sums[: len(kv.k)], scale, window)

    def place(self, layer: int, kv: LayerKV, move: Move | None, slots: torch.Tensor) -> None:
        """Write ``kv``, ``[kv_heads, tokens, head_dim]``, with its keys moved, at ``slots``, ``[tokens]``, of the pages."""
        from cacheblend_rag.engines.kernels.place import place

        place(kv, move, slots, *self._pages[layer])

    def place_layers(self, stored: StoredLayers, slots: torch.Tensor) -> Callable[[int], None] | None:
        """Begin to place all of ``stored`` at ``slots``, ``[tokens]``; return what to call before a layer reads its pages.

        None where layers differ, or what is stored is of another dtype.
        """
        transfer, layers = transfer_to(slots.device), self._alike
        if transfer is None or layers is None or any(x.kv.layer(0).k.dtype != layers.keys.dtype for x in stored.spans):
            return None
        from cacheblend_rag.engines.kernels.place import place_in_bulk

        place_in_bulk(stored, slots, layers, transfer, self.arrivals)
        return self.arrivals.wait

    @cached_property
    def arrivals(self) -> Arrivals:
        """Tells when stored KV has been placed: what runs on the device, and what was captured there."""
        return Arrivals(self._pages[0].k.device, len(self._pages), external=True)

    @cached_property
    def _alike(self) -> Layers | None:
        from cacheblend_rag.engines.kernels.place import Layers

        return Layers.of(self._pages)

    def attending(self) -> AbstractContextManager[None]:
        """Replace vLLM's attention; the passes that run meanwhile have :class:`Scattered` as metadata."""
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
        """Write ``output`` and return it."""
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
