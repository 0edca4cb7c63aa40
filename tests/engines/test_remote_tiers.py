"""Tests that KV in a remote store gives the answers of KV in RAM, and that faults leave answers right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf

from cacheblend_rag.blending.settings import BlendSettings
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.errors import StoreUnavailableError
from cacheblend_rag.store import MemoryStore, TieredStore
from cacheblend_rag.store.kv import read_whole
from cacheblend_rag.store.redis import RedisStore
from tests.blending.families import _BASE, make_model
from tests.blending.prompts import Scene, engine_for

SHORT = SamplingParams(max_tokens=8)
RATIOS = (1.0, 0.0, 0.15)
# The chunks are larger than the bytes that a look-up returns, so that layers are read by range.
SCENE = Scene(chunk_tokens=(120, 90, 150, 110))


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model(hf.Qwen3Config(**_BASE, head_dim=16))


def answer(engine: Any, settings: BlendSettings) -> tuple[torch.Tensor, Any]:
    """Return the first token's logits and the whole answer."""
    logits: list[torch.Tensor] = []
    engine.on_first_logits = lambda found: logits.append(found.clone())
    return logits, engine.generate(SCENE.prompt, SHORT, settings)


def same_answers(engine: Any, other: Any, settings: BlendSettings) -> bool:
    (mine, theirs) = answer(engine, settings), answer(other, settings)
    assert mine[1].mode == theirs[1].mode == "blend"
    return torch.equal(mine[0][0], theirs[0][0]) and mine[1].token_ids == theirs[1].token_ids


@pytest.fixture(params=["redis", pytest.param("s3", marks=pytest.mark.slow)])
def address(request: pytest.FixtureRequest) -> str:
    if request.param == "redis":
        return f"{request.getfixturevalue('redis_url')}?timeout=30s"
    return f"{request.getfixturevalue('s3_url')}?endpoint={request.getfixturevalue('s3_endpoint')}&timeout=30s"


@pytest.mark.parametrize("policy", ["hkvd", "static"])
def test_answers_from_a_remote_store_equal_those_from_ram_bit_for_bit(model, address: str, policy: str) -> None:
    with engine_for(model, SCENE, store=MemoryStore(), ranking="now") as near:
        near.precompute(SCENE.chunks)
        with engine_for(model, SCENE, store=address, ranking="now") as writer:
            assert writer.precompute(SCENE.chunks).failed == {}
        with engine_for(model, SCENE, store=address) as far:
            for ratio in RATIOS:
                assert same_answers(far, near, BlendSettings(ratio=ratio, policy=policy)), ratio
            (tier,) = far.store.stats().tiers
            assert tier.reads.nbytes > 0
            assert (tier.damaged, tier.out) == (0, "")


class Failing(RedisStore):
    """A server that fails at one read of a layer and works again for the next prompt."""

    def __init__(self, url: str):
        super().__init__(url, timeout_s=30)
        self.fails_at = -1
        self.reads = 0

    def read_range(self, *args: Any) -> Any:
        self.reads += 1
        if self.reads == self.fails_at:
            raise StoreUnavailableError("The server is gone.")
        return super().read_range(*args)


@pytest.mark.slow
def test_an_unreadable_chunk_is_computed_in_place_and_stays_stored(model, redis_url: str) -> None:
    far = Failing(redis_url)
    with engine_for(model, SCENE, store=far, write_back=False) as engine, engine_for(model, SCENE) as whole:
        engine.precompute(SCENE.chunks)
        entries = {entry.key for entry in far.entries()}
        settings = BlendSettings(ratio=0.15, policy="hkvd", check_layers=(1,))
        for fails_at in (1, 4, 7):
            far.reads, far.fails_at = 0, fails_at
            logits, found = answer(engine, settings)
            assert len(found.missing) == 1
            assert {entry.key for entry in far.entries()} == entries
            near = MemoryStore()
            (missing,) = [chunk for chunk in SCENE.chunks if chunk.id in found.missing]
            for key in entries - set(engine.entries.keys(missing.token_ids)):
                near.put(key, read_whole(far.get(key)))
            far.fails_at = -1
            with engine_for(model, SCENE, store=near, write_back=False) as reference:
                want, _ = answer(reference, settings)
            assert torch.equal(logits[0], want[0])
        far.reads, far.fails_at = 0, -1
        assert answer(engine, settings)[1].missing == ()
        assert far.stats().damaged == 0
        full = answer(whole, BlendSettings(quality="full"))[0][0]
        assert torch.allclose(answer(engine, BlendSettings(ratio=1.0))[0][0], full, atol=1e-3)


def test_a_damaged_copy_does_not_delete_the_sound_copy_of_another_tier(model, redis_url: str) -> None:
    other = RedisStore(redis_url, timeout_s=30)
    import redis

    tiers = TieredStore([other, near := MemoryStore()])
    with engine_for(model, SCENE, store=tiers, write_back=False, ranking="off") as engine:
        engine.precompute(SCENE.chunks)
        server = redis.Redis.from_url(redis_url)
        for name in server.keys("cacheblend:kv:*"):
            data = bytearray(server.get(name))
            data[-1] ^= 1
            server.set(name, bytes(data))
        entries = near.stats().entries
        settings = BlendSettings(ratio=0.0)
        first = answer(engine, settings)[1]
        assert first.missing
        assert near.stats().entries == entries
        assert other.stats().damaged > 0
        assert answer(engine, settings)[1].missing == ()
