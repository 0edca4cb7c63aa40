"""What vLLM can be told to do and a blend cannot: served by ordinary prefill, with the reason."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

pytest.importorskip("vllm", reason="vLLM is not installed; make setup installs it")

from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, FullAttentionSpec, MambaSpec, SlidingWindowSpec

from cacheblend_rag.engines.entries import Entries
from cacheblend_rag.engines.vllm import worker_side
from cacheblend_rag.engines.vllm.worker_side import WorkerSide, why_not_in_vllm
from cacheblend_rag.store import MemoryStore
from cacheblend_rag.store.kv import ModelFingerprint

_PARALLEL = {
    "pipeline_parallel_size": 1,
    "decode_context_parallel_size": 1,
    "prefill_context_parallel_size": 1,
    "data_parallel_size": 1,
    "enable_expert_parallel": False,
}
_MODEL = {
    "uses_mrope": False,
    "use_mla": False,
    "is_moe": False,
    "dtype": torch.bfloat16,
    "hf_text_config": LlamaConfig(),
}


def configured(parallel: dict[str, Any] | None = None, model: dict[str, Any] | None = None, **top: Any) -> Any:
    config = {
        "model_config": SimpleNamespace(**_MODEL | (model or {})),
        "parallel_config": SimpleNamespace(**_PARALLEL | (parallel or {})),
        "lora_config": None,
        "speculative_config": None,
        "cache_config": SimpleNamespace(cache_dtype="auto", block_size=16),
    }
    return SimpleNamespace(**config | top)


_SHAPE = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}


def groups(*specs: Any) -> Any:
    given = specs or (FullAttentionSpec(block_size=16, **_SHAPE),)
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=[], kv_cache_spec=spec) for spec in given])


def test_an_ordinary_model_is_not_refused() -> None:
    assert why_not_in_vllm(configured(), groups()) is None
    assert why_not_in_vllm(configured({"data_parallel_size": 2}), groups()) is None  # replicas of a dense model


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (configured({"pipeline_parallel_size": 2}), "pipeline"),
        (configured({"decode_context_parallel_size": 2}), "context parallelism"),
        (configured({"data_parallel_size": 2}, {"is_moe": True}), "mixture of experts and data parallelism"),
        (configured(model={"use_mla": True}), "MLA"),
        (configured(model={"uses_mrope": True}), "multi-dimensional RoPE"),
        (configured(cache_config=SimpleNamespace(cache_dtype="fp8", block_size=16)), "quantised"),
        (configured(lora_config=object()), "LoRA"),
        (configured(speculative_config=object()), "speculative"),
    ],
)
def test_what_cannot_be_blended_is_named(config: Any, reason: str) -> None:
    assert reason in str(why_not_in_vllm(config, groups()))


@pytest.mark.parametrize(
    ("specs", "reason"),
    [
        (
            (FullAttentionSpec(block_size=16, **_SHAPE), SlidingWindowSpec(block_size=16, **_SHAPE, sliding_window=4)),
            None,
        ),
        ((ChunkedLocalAttentionSpec(block_size=16, **_SHAPE, attention_chunk_size=8),), None),
        ((FullAttentionSpec(block_size=16, **_SHAPE, attention_chunk_size=8),), None),
        ((MambaSpec(block_size=16, shapes=((2,),), dtypes=(torch.float32,)),), "Mamba"),
        ((SlidingWindowSpec(block_size=8, **_SHAPE, sliding_window=4),), "different sizes"),
    ],
)
def test_kinds_of_kv_cache_that_a_blend_cannot_fill_are_named(specs: Any, reason: str | None) -> None:
    found = why_not_in_vllm(configured(), groups(*specs))
    assert found is None if reason is None else reason in str(found)


def test_a_model_without_a_kv_cache_is_named() -> None:
    assert "no KV cache" in str(why_not_in_vllm(configured(), SimpleNamespace(kv_cache_groups=[])))  # type: ignore[arg-type]


def test_a_kernel_that_splits_blocks_is_named_with_the_flag_that_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    paged = SimpleNamespace(kernel_block_size=64, block_size=128)
    monkeypatch.setattr(worker_side, "PagedModel", lambda *_: paged)
    entries = Entries(MemoryStore(), ModelFingerprint("0" * 32, "m"), ())
    side = WorkerSide(entries, configured(), groups(), 100.0)
    side.bind(None, torch.device("cpu"))
    assert not side.gate.passed
    assert "--block-size 64" in side.gate.reason
