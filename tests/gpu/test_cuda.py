"""The transformers engine on a CUDA device: `make test-gpu`. Skipped where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cacheblend_rag.blending.settings import BlendSettings
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.store import open_store
from tests.blending import reference
from tests.blending.families import BLENDED, make_model
from tests.blending.prompts import Scene
from tests.blending.test_parity import blended_logits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def cuda_engine(
    family: str, scene: Scene, dtype: torch.dtype = torch.float32, store: object = None
) -> TransformersEngine:
    model = make_model(BLENDED[family](), dtype)
    return TransformersEngine(model, device="cuda", header=scene.header, store=store)


@pytest.mark.parametrize("ratio", [0.0, 0.15, 1.0])
@pytest.mark.parametrize("family", BLENDED)
def test_blends_on_cuda_equal_the_reference_on_the_cpu(family: str, ratio: float) -> None:
    scene = Scene()
    engine = cuda_engine(family, scene)
    assert engine.gate.passed, engine.gate.reason
    engine.precompute(scene.chunks)
    got, recomputed, _ = blended_logits(engine, scene, BlendSettings(ratio=ratio))
    want = reference.blend(make_model(BLENDED[family]()), scene.header, scene.parts(), ratio)
    assert recomputed == want.recomputed
    assert (got.cpu() - want.logits).abs().max() < 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_passes_the_gate(dtype: torch.dtype) -> None:
    engine = cuda_engine("qwen3", Scene(), dtype)
    assert engine.gate.passed, engine.gate.reason


def test_kv_loaded_from_disk_over_the_copy_stream_gives_the_same_tokens(tmp_path: Path) -> None:
    scene = Scene(chunk_tokens=(300, 200, 400, 250))
    in_ram = cuda_engine("llama", scene, torch.bfloat16)
    in_ram.precompute(scene.chunks)
    want = in_ram.generate(scene.prompt, SamplingParams(max_tokens=8), BlendSettings(ratio=0.2))
    on_disk = cuda_engine("llama", scene, torch.bfloat16, open_store(tmp_path, ram_budget=1))
    on_disk.precompute(scene.chunks)
    got = on_disk.generate(scene.prompt, SamplingParams(max_tokens=8), BlendSettings(ratio=0.2))
    assert got.token_ids == want.token_ids
    assert got.usage == want.usage
