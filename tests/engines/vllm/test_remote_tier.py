"""Tests of vLLM with its KV in a remote store, by the addresses that the transformers engine takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

pytest.importorskip("vllm", reason="vLLM is not installed; make setup installs it")

from cacheblend_rag.blending.settings import BlendSettings
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.errors import InputError
from cacheblend_rag.store import make_key, open_store
from tests.blending.prompts import Scene
from tests.engines.vllm.engines import FULL, SHAPE, first_logprobs, save_model, start

SCENE = Scene(chunk_tokens=(120, 90, 150, 110))


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_model(hf.Qwen3Config(**SHAPE, head_dim=32), directory)
    return directory


@pytest.mark.vllm
def test_encrypted_kv_in_redis_is_blended_by_vllm_and_read_by_the_other_engine(
    model_directory: Path, redis_url: str, tmp_path: Path
) -> None:
    short = SamplingParams(max_tokens=4)
    make_key(tmp_path / "keys")
    address = f"{redis_url}?timeout=30s&encrypt={tmp_path}/keys"
    with start(model_directory, address, header=SCENE.header) as engine:
        assert engine.precompute(SCENE.chunks).failed == {}
        with open_store(address) as store:
            # The store has an entry of each chunk and of the header.
            assert [entry.tier for entry in store.entries()] == ["redis"] * (len(SCENE.chunks) + 1)
            named = store.key_name("default")
            assert named is not None
            assert all(entry.key.endswith(named.id) for entry in store.entries())
        with pytest.raises(InputError, match="no key of the tenant 'acme'"):
            engine.within("acme")
        for ratio in (1.0, 0.15, 0.0):
            got = engine.generate(SCENE.prompt, short, BlendSettings(ratio=ratio))
            assert (got.mode, got.missing) == ("blend", ())
        full = first_logprobs(engine, SCENE.prompt, FULL)
        engine.reset_prefix_cache()
        blended = first_logprobs(engine, SCENE.prompt, BlendSettings(ratio=1.0))
        assert torch.allclose(blended, full, atol=1e-3)
        engine.reset_prefix_cache()
        reused: Any = first_logprobs(engine, SCENE.prompt, BlendSettings(ratio=0.0))
    with TransformersEngine(model_directory, store=address, header=SCENE.header, device="cpu") as other:
        logits: list[torch.Tensor] = []
        other.on_first_logits = lambda found: logits.append(found.log_softmax(-1))
        assert other.generate(SCENE.prompt, short, BlendSettings(ratio=0.0)).mode == "blend"
    assert torch.allclose(reused, logits[0], atol=1e-3)


def test_a_store_in_ram_only_is_refused_before_vllm_starts(model_directory: Path) -> None:
    with pytest.raises(InputError, match="RAM alone"):
        start(model_directory, "ram://1GiB")


def test_an_unknown_ranking_is_refused_before_vllm_starts(
    model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cacheblend_rag.engines.vllm.engine._start", lambda launch: pytest.fail("vLLM was started"))
    with pytest.raises(InputError, match="ranking is 'soon'"):
        start(model_directory, tmp_path / "store", ranking="soon")
