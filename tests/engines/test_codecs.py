"""Blend KV of tiers with codecs in the transformers engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from cacheblend_rag.blending.settings import BlendSettings
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.prompts.chunk import make_chunk
from cacheblend_rag.prompts.prompt import DEFAULT_INSTRUCTION, chat_prompt
from cacheblend_rag.store import DiskStore, MemoryStore, TieredStore
from cacheblend_rag.store.codec import through
from cacheblend_rag.store.kv import ChunkKV
from cacheblend_rag.store.kvfile import EntryFormat
from tests.blending import reference
from tests.blending.families import _BASE, make_model
from tests.blending.prompts import Scene, engine_for, entries_of
from tests.conftest import tokenizer_named
from tests.engines.contract_conversation import NOTES

SCENE = Scene()
ONE = SamplingParams(max_tokens=1)


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model(hf.Qwen3Config(**_BASE, head_dim=16))


def first_logits(engine: Any, settings: BlendSettings) -> torch.Tensor:
    logits: list[torch.Tensor] = []
    engine.on_first_logits = lambda found: logits.append(found.clone())
    assert engine.generate(SCENE.prompt, ONE, settings).mode == "blend"
    return logits[0]


def test_a_blend_from_an_int8_tier_equals_the_reference_that_rounds_in_plain_torch(model: Any, tmp_path: Path) -> None:
    exact = MemoryStore()
    with engine_for(
        model, SCENE, store=TieredStore([exact, DiskStore(tmp_path, format=EntryFormat("int8"))])
    ) as engine:
        engine.precompute(SCENE.chunks)
        given = entries_of(engine, exact, SCENE)
        want = reference.reuse_int8(model, SCENE.parts(), given)
    with engine_for(model, SCENE, store=DiskStore(tmp_path)) as engine:
        got = first_logits(engine, BlendSettings(ratio=0.0))
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)
    unrounded = reference.blend(model, SCENE.header, SCENE.parts(), 0.0).logits
    assert (got - unrounded).abs().max() > 1e-3, "the scene is too easy to tell int8 from exact KV"


def test_a_blend_of_coded_kv_equals_that_of_decoded_kv_in_ram_bit_for_bit(model: Any, tmp_path: Path) -> None:
    ram, decoded = MemoryStore(), MemoryStore()
    with engine_for(
        model, SCENE, store=TieredStore([ram, DiskStore(tmp_path, format=EntryFormat("int8"))]), ranking="now"
    ) as engine:
        engine.precompute(SCENE.chunks)
        for entry in ram.entries():
            kv = ram.get(entry.key)
            layers = [through("int8", layer) for layer in kv.layers]
            decoded.put(entry.key, ChunkKV(layers, kv.start, static=kv.static_deviation()))
        rows = MemoryStore(format=EntryFormat("int8"))
        for entry in ram.entries():
            rows.put(entry.key, ram.get(entry.key))
        assert (
            rows.stats().nbytes < 0.4 * ram.stats().nbytes
        )  # one byte instead of four, and a scale for each head's sixteen numbers
    with engine_for(model, SCENE, store=decoded) as near:
        for store in (DiskStore(tmp_path), rows):
            with engine_for(model, SCENE, store=store) as far:
                for policy in ("hkvd", "static"):
                    for ratio in (0.0, 0.15):
                        settings = BlendSettings(ratio=ratio, policy=policy)
                        assert torch.equal(first_logits(far, settings), first_logits(near, settings)), settings


@pytest.mark.parametrize("tier", ["ram", "disk"])
def test_exact_reuse_uses_no_kv_that_a_tier_stores_in_int8(model: Any, tmp_path: Path, tier: str) -> None:
    int8 = EntryFormat("int8")
    disk = DiskStore(tmp_path, format=int8)
    with engine_for(model, SCENE, store=disk) as engine:
        engine.precompute(SCENE.chunks)
    store = MemoryStore(format=int8) if tier == "ram" else TieredStore([MemoryStore(), disk])
    with engine_for(model, SCENE, store=store) as engine:
        engine.precompute(SCENE.chunks)
        logits: list[torch.Tensor] = []
        engine.on_first_logits = lambda found: logits.append(found.clone())
        for quality in ("high", "exact", "full"):  # after the first prompt all KV is in RAM
            found = engine.generate(SCENE.prompt, ONE, BlendSettings(quality=quality))
            assert bool(found.usage.reused_tokens) == (quality == "high")
            assert found.missing == ()
            assert ("int8, which is not exact" in found.reason) == (quality == "exact")
        assert torch.equal(logits[1], logits[2])


def test_a_blend_of_int8_kv_leaves_exact_kv_in_front_of_the_first_chunk(tmp_path: Path) -> None:
    config = {**_BASE, "vocab_size": 448, "eos_token_id": None, "max_position_embeddings": 1024}
    tokenizer = tokenizer_named("byte_level")
    store = DiskStore(tmp_path, format=EntryFormat("int8"))
    with TransformersEngine(
        make_model(hf.LlamaConfig(**config)), tokenizer=tokenizer, device="cpu", store=store
    ) as engine:
        engine.precompute([make_chunk(note, tokenizer) for note in NOTES])
        logits: list[torch.Tensor] = []
        engine.on_first_logits = lambda found: logits.append(found.clone())
        said = [DEFAULT_INSTRUCTION, "Who are you?", "Nobody.", f"{NOTES[0]}\n\nQuestion: who runs it?"]
        roles = ("system", "user", "assistant", "user")
        messages = [{"role": role, "content": content} for role, content in zip(roles, said, strict=True)]
        blended = engine.generate(chat_prompt(tokenizer, messages, engine.registry), ONE)
        assert (blended.mode, len(blended.loads) > 0) == ("blend", True)
        messages[3]["content"] = "And who am I?"
        for quality, kept in (("high", True), ("full", False)):
            prompt = chat_prompt(tokenizer, messages, engine.registry)
            found = engine.generate(prompt, ONE, BlendSettings(quality=quality))
            assert bool(found.usage.kept_tokens) == kept
        torch.testing.assert_close(logits[1], logits[2], atol=1e-5, rtol=0)


def test_ratio_1_is_the_full_prefill_and_ratio_0_the_reference_with_codec_none(model: Any, tmp_path: Path) -> None:
    with engine_for(model, SCENE, store=f"file://{tmp_path}?codec=none") as engine:
        engine.precompute(SCENE.chunks)
        for ratio in (1.0, 0.0):
            want = reference.blend(model, SCENE.header, SCENE.parts(), ratio).logits
            torch.testing.assert_close(first_logits(engine, BlendSettings(ratio=ratio)), want, atol=1e-4, rtol=0)


def test_an_answer_reports_the_stored_bytes_of_its_loads(model: Any, tmp_path: Path) -> None:
    loaded = {}
    for codec in ("none", "int8"):
        with engine_for(model, SCENE, store=f"file://{tmp_path}/{codec}?codec={codec}") as engine:
            engine.precompute(SCENE.chunks)
            loads = engine.generate(SCENE.prompt, ONE, BlendSettings(ratio=0.0)).loads
            stored = engine.store.stats().nbytes
            loaded[codec] = sum(load.nbytes for load in loads)
            assert 0.9 * stored <= loaded[codec] <= stored
    assert loaded["int8"] < loaded["none"]
