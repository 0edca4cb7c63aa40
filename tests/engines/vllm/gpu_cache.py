"""Make a paged model with a cache in vLLM's GPU layouts, without a GPU and without a model."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backends import flash_attn, triton_attn
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from cacheblend_rag.engines.vllm import attention, paged
from cacheblend_rag.engines.vllm.pages import Pages

NAMES = ["layers.0.attn", "layers.1.attn", "layers.2.attn"]
HEADS, KV_HEADS, DIM, BLOCK, BLOCKS = 4, 2, 32, 16, 12
# The layouts of the backends up to Hopper; FlashInfer on Blackwell takes the layouts that keep a head's tokens together.
LAYOUTS = get_supported_kv_cache_layouts([flash_attn.FlashAttentionBackend, triton_attn.TritonAttentionBackend])
BACKENDS = {
    "FLASH_ATTN": (flash_attn.FlashAttentionImpl, flash_attn, "reshape_and_cache_flash"),
    "TRITON_ATTN": (triton_attn.TritonAttentionImpl, triton_attn, "triton_reshape_and_cache_flash"),
}


def allocate(layout: KVCacheLayout, dtype: torch.dtype) -> tuple[KVCacheConfig, dict[str, torch.Tensor]]:
    """Return groups and each layer's cache as vLLM allocates them: all blocks of all layers in one allocation."""
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=KV_HEADS, head_size=DIM, dtype=dtype)
    config = SimpleNamespace(
        attention_config=SimpleNamespace(hisparse_config=None),
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: layout,
            num_gpu_blocks_override=None,
            prefix_cache_retention_interval=None,
        ),
    )
    memory = BLOCKS * len(NAMES) * spec.page_size_bytes
    groups = get_kv_cache_config_from_groups(config, [KVCacheGroupSpec(NAMES, spec)], memory)  # type: ignore[arg-type]
    assert groups.num_blocks == BLOCKS
    return groups, allocate_kv_cache(groups, torch.device("cpu"), layout)


def scatter(
    key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, *_: Any
) -> None:
    """Write ``[tokens, heads, dim]`` into ``[blocks, tokens, heads, dim]``, as the compiled kernel of a backend's update does."""
    keys[slots // BLOCK, slots % BLOCK] = key
    values[slots // BLOCK, slots % BLOCK] = value


class Describing:
    """A backend's metadata builder that returns the common metadata unchanged."""

    def __init__(self, *_: Any):
        pass

    def build(self, common_prefix_len: int, common_attn_metadata: Any) -> Any:
        return common_attn_metadata


class Layer(SimpleNamespace):
    """An attention layer of vLLM with the backend's update of the cache, and without its attention."""

    def __init__(self, backend: str, cache: torch.Tensor, **impl: Any):
        cls = BACKENDS[backend][0]
        own = cls.__new__(cls)
        named = type("Backend", (), {"get_name": lambda: backend, "get_builder_cls": lambda: Describing})
        vars(own).update(
            attn_type="decoder",
            head_size=DIM,
            num_kv_heads=KV_HEADS,
            kv_cache_dtype="auto",
            _is_per_token_head_quant=False,
            scale=0.2,
            **impl,
        )
        super().__init__(
            impl=own,
            kv_cache=cache,
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_size=DIM,
            head_size_v=DIM,
            sliding_window=None,
            _k_scale=None,
            _v_scale=None,
            get_attn_backend=lambda: named,
        )


def paged_model(
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    layout: KVCacheLayout,
    dtype: torch.dtype = torch.float32,
    **impl: Any,
) -> paged.PagedModel:
    """Return the model's paged cache as on a GPU."""
    _, module, update = BACKENDS[backend]
    monkeypatch.setattr(module, update, scatter, raising=False)
    monkeypatch.setattr(paged, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    monkeypatch.setattr(attention, "set_current_vllm_config", lambda _: nullcontext())
    groups, caches = allocate(layout, dtype)
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            dtype=dtype, get_vocab_size=lambda: 10, supports_multimodal_inputs=False, enable_prompt_embeds=False
        ),
        cache_config=SimpleNamespace(block_size=BLOCK),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64, max_num_seqs=4),
        compilation_config=SimpleNamespace(
            static_forward_context={name: Layer(backend, cache, **impl) for name, cache in caches.items()},
            pass_config=SimpleNamespace(fuse_attn_quant=False),
        ),
    )
    return paged.PagedModel(None, torch.device("cpu"), config, groups, caches)  # type: ignore[arg-type]


def described(model: paged.PagedModel, block_ids: Sequence[int], positions: torch.Tensor) -> Any:
    """Return the metadata that the model gives its backend for a pass over ``positions``."""
    pages = Pages(model, [block_ids], int(positions[-1]) + 1)
    return model._metadata.build(positions, positions, pages.tables, [pages.at(0, positions)])[NAMES[0]]
