"""Tests that vLLM serves models and options that a blend does not support by ordinary prefill, with the reason."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

pytest.importorskip("vllm", reason="vLLM is not installed; make setup installs it")

from vllm.model_executor.offloader import base
from vllm.model_executor.offloader.prefetch import PrefetchOffloader
from vllm.model_executor.offloader.uva import UVAOffloader
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, FullAttentionSpec, MambaSpec, SlidingWindowSpec

from cacheblend_rag.blending.gate import GateReport
from cacheblend_rag.engines.entries import Entries
from cacheblend_rag.engines.vllm import worker_side
from cacheblend_rag.engines.vllm.messages import StepMeta
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
    assert (
        why_not_in_vllm(configured({"data_parallel_size": 2}), groups()) is None
    )  # data parallelism replicates a dense model


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
def test_the_reason_names_the_unsupported_option(config: Any, reason: str) -> None:
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
def test_the_reason_names_an_unsupported_kind_of_kv_cache(specs: Any, reason: str | None) -> None:
    found = why_not_in_vllm(configured(), groups(*specs))
    assert found is None if reason is None else reason in str(found)


def test_weights_that_a_forward_copies_are_refused_and_weights_in_host_memory_are_accepted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    in_host_memory = UVAOffloader(1 << 30)
    in_host_memory.cpu_offload_bytes = 1 << 20
    copied = UVAOffloader(1 << 30)
    copied.cpu_offload_bytes = 1 << 20
    in_host_memory.uva_offloading, copied.uva_offloading = True, False
    on_a_cpu = UVAOffloader(1 << 30)
    prefetched = PrefetchOffloader.__new__(PrefetchOffloader)  # the constructor needs a GPU
    for offloader, refused in ((in_host_memory, False), (copied, True), (on_a_cpu, False), (prefetched, True)):
        monkeypatch.setattr(base, "_instance", offloader)
        reason = why_not_in_vllm(configured(), groups())
        assert ("layer by layer" in str(reason)) == refused, offloader


def test_the_reason_names_a_missing_kv_cache() -> None:
    assert "no KV cache" in str(why_not_in_vllm(configured(), SimpleNamespace(kv_cache_groups=[])))  # type: ignore[arg-type]


def test_the_reason_names_a_kernel_that_splits_blocks_and_the_flag_that_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    paged = SimpleNamespace(kernel_block_size=64, block_size=128)
    monkeypatch.setattr(worker_side, "PagedModel", lambda *_: paged)
    assert "--block-size 64" in bound().gate.reason


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_side, "all_ranks", lambda ok: ok)


def bound(**kv_caches: torch.Tensor) -> WorkerSide:
    """Bind a model to a worker's half without an error; assert that it does not blend."""
    side = WorkerSide(Entries(MemoryStore(), ModelFingerprint("0" * 32, "m"), ()), configured(), groups(), 100.0)
    side.kv_caches = kv_caches
    side.bind(None, torch.device("cpu"))
    assert not side.gate.passed
    side.take(StepMeta(loads=[SimpleNamespace(request_id="7")]))  # type: ignore[list-item]
    side.blend()
    assert side.take_finished(set()) == ({"7"}, {"7"})  # vLLM prefills the request
    return side


class Sound:
    """A model that can be wrapped."""

    kernel_block_size = block_size = 16
    num_layers, vocab_size, dtype = 2, 9, torch.float32

    def __init__(self, *_: Any):
        pass

    def layout_is_known(self) -> bool:
        return True

    def find_kernels(self) -> None:
        raise RuntimeError("no kernel image is available for execution on the device")

    def find_graphs(self, agree: Any) -> None:
        pass


def test_the_reason_names_layers_that_use_the_kv_of_others() -> None:
    assert "use the KV of others" in bound(**{"layers.0": torch.empty(0), "layers.1": torch.empty(0)}).gate.reason


@pytest.mark.parametrize("error", [StopIteration(), KeyError("layers.3"), torch.OutOfMemoryError("CUDA out of memory")])
def test_an_error_while_a_model_is_wrapped_does_not_end_the_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    def wrap(*_: Any) -> None:
        raise error

    monkeypatch.setattr(worker_side, "PagedModel", wrap)
    assert type(error).__name__ in bound().gate.reason
    assert [record.getMessage().startswith("This model is not blended") for record in caplog.records] == [True]


def test_an_error_behind_the_gate_does_not_end_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("CUDA driver version is insufficient")

    monkeypatch.setattr(worker_side, "PagedModel", Sound)
    monkeypatch.setattr(worker_side, "run_gate", lambda *_: (GateReport(True), SimpleNamespace()))
    monkeypatch.setattr(worker_side, "StepClock", fails)
    assert "driver version is insufficient" in bound().gate.reason


def test_memory_is_page_locked_at_the_first_step_after_vllm_has_captured_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    locked: list[torch.device] = []
    monkeypatch.setattr(worker_side, "PagedModel", Sound)
    monkeypatch.setattr(worker_side, "run_gate", lambda *_: (GateReport(True), SimpleNamespace()))
    monkeypatch.setattr(MemoryStore, "page_lock_for", lambda _, device: locked.append(device))
    side = WorkerSide(Entries(MemoryStore(), ModelFingerprint("0" * 32, "m"), ()), configured(), groups(), 100.0)
    side.bind(None, torch.device("cpu"))
    assert side.gate.passed
    assert locked == []
    side.take(StepMeta())
    side.take(StepMeta())
    assert locked == [torch.device("cpu")]


def test_a_model_is_blended_without_kernels_if_their_search_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker_side, "run_gate", lambda *_: (GateReport(True), SimpleNamespace()))
    report, _ = worker_side._gate(Sound(), ())  # type: ignore[arg-type]
    assert report.passed
    assert "no kernel image" in caplog.text


def test_no_rank_blends_if_another_rank_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_side, "PagedModel", Sound)
    monkeypatch.setattr(worker_side, "run_gate", lambda *_: pytest.fail("the other rank does not run it"))
    monkeypatch.setattr(worker_side, "all_ranks", lambda ok: False)
    assert "another rank" in bound().gate.reason
