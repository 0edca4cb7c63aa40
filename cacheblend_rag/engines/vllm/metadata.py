"""Tells vLLM's attention of a pass over scattered positions of one sequence: each run of neighbours is a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import set_current_vllm_config
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

from cacheblend_rag.blending.transfer import sent
from cacheblend_rag.engines.vllm.pages import gaps

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec


class PassMetadata:
    """Builds attention metadata with builders of our own: vLLM's have buffers that its own steps use."""

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
            positions: Ascending, ``[tokens]``, in host memory.
            at: The same, on the device.
            tables: For each KV cache group the sequence's block ids, ``[1, blocks]``, on the device.
            slots: For each group the positions' slots, ``[tokens]``, on the device.
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
        """Describe each run of neighbouring positions as one request on the same pages: its mask, window and all, is exact.

        The pages, each group's own, are still to be filled in.
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
    """Return metadata builders of our own for the layers of ``group``, one for those that share a backend and a kind of KV."""
    shared: dict[Any, list[str]] = {}
    for name in group.layer_names:
        spec = group.kv_cache_spec
        if isinstance(spec, UniformTypeKVCacheSpecs):
            spec = spec.kv_cache_specs[name]
        shared.setdefault((layers[name].get_attn_backend(), spec), []).append(name)
    return [
        (names, backend.get_builder_cls()(spec, names, config, device)) for (backend, spec), names in shared.items()
    ]
