"""Tensor-parallel ranks end a blend together, whatever goes wrong on one: a rank alone in a collective waits for ever."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from cacheblend_rag.blending.fusor import OtherRankError, fuse
from cacheblend_rag.blending.loader import LayerLoader
from cacheblend_rag.blending.plan import make_plan
from cacheblend_rag.blending.policies import policy
from cacheblend_rag.blending.reads import UnusableSpanError
from cacheblend_rag.blending.settings import FuseOptions
from cacheblend_rag.engines.transformers.target import TransformersTarget
from cacheblend_rag.errors import DamagedKVError
from cacheblend_rag.store.kv import ChunkKV, LayerKV
from tests.blending.families import BLENDED, make_model
from tests.blending.prompts import Scene, engine_for

pytestmark = pytest.mark.slow

RANKS = 2


class Votes:
    """Collects the ranks' votes: every vote waits for all ranks, at most ten minutes."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(RANKS, timeout=600)
        self._said = [True] * RANKS

    def agree(self, rank: int, ok: bool) -> bool:
        self._said[rank] = ok
        self._barrier.wait()
        agreed = all(self._said)
        self._barrier.wait()
        return agreed


class RankTarget(TransformersTarget):
    """One rank of a group with a whole model; the tests watch only the ranks' waits."""

    def __init__(self, rank: int, votes: Votes, *arguments: Any):
        super().__init__(*arguments)
        self._rank, self._votes = rank, votes

    def agree(self, ok: bool) -> bool:
        return self._votes.agree(self._rank, ok)

    def all_reduce(self, deviation: torch.Tensor) -> torch.Tensor:
        assert self._votes.agree(self._rank, True)
        return deviation


class Failing(ChunkKV):
    """Stored KV whose layer 2 cannot be read."""

    def __init__(self, kv: ChunkKV, error: Exception):
        super().__init__(kv.layers, kv.start)
        self._error = error

    def layer(self, index: int) -> LayerKV:
        if index == 2:
            raise self._error
        return super().layer(index)


def blend_on_ranks(
    errors: dict[int, Exception], made: type[RankTarget] = RankTarget, chooses: str = "hkvd"
) -> list[BaseException | None]:
    """Blend on two ranks, some of whose stored KV raises; return each rank's error or None."""
    scene, votes = Scene(), Votes()
    engine = engine_for(make_model(BLENDED["llama"]()), scene)
    engine.precompute(scene.chunks)

    def run(rank: int) -> BaseException | None:
        def lookup(ids: Any) -> Any:
            kv = engine.entries.get(ids, engine.num_layers)
            if kv is None or rank not in errors or tuple(ids) != scene.chunks[2].token_ids:
                return kv
            return Failing(ChunkKV([kv.layer(i) for i in range(kv.num_layers)], kv.start), errors[rank])

        plan = make_plan(scene.prompt, engine.header_ids, lookup)
        target = made(rank, votes, engine.runner, engine.rope, scene.prompt.token_ids)
        try:
            fuse(plan, target, FuseOptions(policy(chooses), 0.3))
        except BaseException as error:
            return error
        return None

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(run, range(RANKS)))


def test_ranks_without_a_fault_complete_the_blend() -> None:
    assert blend_on_ranks({}) == [None, None]


@pytest.mark.parametrize("error", [MemoryError("no memory"), OSError(110, "timed out"), RuntimeError("anything")])
def test_an_error_on_one_rank_ends_the_blend_on_all_ranks(error: Exception) -> None:
    first, second = blend_on_ranks({0: error})
    assert first is error
    assert isinstance(second, OtherRankError)


def test_damage_on_one_rank_makes_all_ranks_plan_again() -> None:
    first, second = blend_on_ranks({1: DamagedKVError("flipped bit")})
    assert isinstance(first, UnusableSpanError)
    assert not first.entries
    assert isinstance(second, UnusableSpanError)
    assert second.entries


def test_damage_on_one_rank_and_an_error_on_another_end_the_blend_on_both() -> None:
    error = MemoryError("no memory")
    first, second = blend_on_ranks({0: DamagedKVError("flipped bit"), 1: error})
    assert isinstance(first, OtherRankError)
    assert second is error


def test_a_rank_that_cannot_place_all_layers_at_once_makes_all_ranks_place_layer_by_layer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    waited, placed = [], [0] * RANKS

    class Target(RankTarget):
        def place_layers(self, stored: Any) -> Any:
            if self._rank == 1:
                raise MemoryError("no memory for what is copied")
            return waited.append

        def place(self, *arguments: Any) -> None:
            placed[self._rank] += 1
            super().place(*arguments)

    monkeypatch.setattr(LayerLoader, "rest", lambda self, first: first)
    assert blend_on_ranks({}, Target, "sink") == [None, None]
    layers = BLENDED["llama"]().num_hidden_layers
    assert placed == [layers] * RANKS
    assert waited == [layers - 1]  # copies already begun must not come later than the new ones
    assert "no memory for what is copied" in caplog.text
