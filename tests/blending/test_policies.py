"""Tests the tokens that each policy chooses, and that a blend recomputes exactly these."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cacheblend_lab.evaluation.attention import AttentionInspector
from hypothesis import given
from hypothesis import strategies as st

from cacheblend_rag.blending.fusor import fuse
from cacheblend_rag.blending.plan import make_plan
from cacheblend_rag.blending.policies import Candidates, SelectionPolicy, highest, policy
from cacheblend_rag.blending.settings import BlendSettings, FuseOptions
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.transformers.target import TransformersTarget
from cacheblend_rag.errors import InputError
from tests.blending.families import BLENDED, make_model
from tests.blending.prompts import Scene, engine_for

pytestmark = pytest.mark.usefixtures("gate_once")


class Given(SelectionPolicy):
    """Chooses given positions."""

    name = "given"

    def __init__(self, positions: torch.Tensor):
        self._positions = positions

    def score(self, candidates: Candidates) -> torch.Tensor:
        return torch.isin(candidates.positions, self._positions)

    def select(self, candidates: Candidates, count: int) -> torch.Tensor:
        return self.score(candidates)


@pytest.fixture(scope="module")
def scene() -> Scene:
    return Scene()


@pytest.fixture(scope="module")
def engine(scene: Scene) -> Iterator[Any]:
    """Make a random Llama engine with the scene's chunks."""
    with engine_for(make_model(BLENDED["llama"]()), scene, ranking="now") as made:
        made.precompute(scene.chunks)
        yield made


def test_the_probed_attention_equals_that_of_full_kv_reuse(engine: Any, scene: Scene) -> None:
    class Spy(type(policy("query"))):  # type: ignore[misc]
        def select(self, candidates: Candidates, count: int) -> Any:
            self.seen = candidates
            return super().select(candidates, count)

    inspector = AttentionInspector(engine, scene.prompt)
    # test_figures compares the inspector's values with the model's eager attention.
    want = inspector.measure_attention(FuseOptions(policy("full-reuse"), 0.0)).mean((0, 1, 2))
    spy = Spy()
    inspector.measure_attention(FuseOptions(spy, 0.4))
    torch.testing.assert_close(spy.seen.attention, want[spy.seen.positions], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("name", ["query", "hybrid"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral_window", "phi3_partial"])
def test_ratios_0_and_1_equal_full_kv_reuse_and_the_full_prefill(name: str, family: str) -> None:
    scene = Scene()
    with engine_for(make_model(BLENDED[family]()), scene) as engine:
        engine.precompute(scene.chunks)

        def logits(settings: BlendSettings) -> Any:
            found: list[Any] = []
            engine.on_first_logits = found.append
            engine.generate(scene.prompt, SamplingParams(1), settings)
            return found[0]

        full, none = logits(BlendSettings(quality="full")), logits(BlendSettings(0.0, "full-reuse"))
        torch.testing.assert_close(logits(BlendSettings(1.0, name)), full, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(logits(BlendSettings(0.0, name)), none, atol=1e-5, rtol=1e-5)
        between = logits(BlendSettings(0.3, name, (1, 2)))
        assert torch.isfinite(between).all()
        assert not torch.allclose(between, none, atol=1e-4)


def blend(engine: Any, scene: Scene, chosen: SelectionPolicy, ratio: float = 0.3) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the recomputed positions and the last logits."""
    plan = make_plan(scene.prompt, engine.header_ids, lambda ids: engine.entries.get(ids, engine.num_layers))
    target = TransformersTarget(engine.runner, engine.rope, scene.prompt.token_ids)
    done = fuse(plan, target, FuseOptions(chosen, ratio))
    return done.recomputed, target.logits


@pytest.mark.parametrize("name", ["hkvd", "static", "static-query", "query", "hybrid", "random", "sink"])
def test_a_blend_recomputes_exactly_the_tokens_it_chose(engine: Any, scene: Scene, name: str) -> None:
    """Choose the same tokens by a policy that measures nothing: equal logits show that measuring leaves no trace."""
    chosen, first = blend(engine, scene, policy(name))
    assert len(chosen) > 3
    again, second = blend(engine, scene, Given(chosen))
    assert torch.equal(chosen, again)
    torch.testing.assert_close(first, second, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["query", "hybrid"])
def test_missing_chunks_do_not_disturb_the_probe(name: str) -> None:
    scene = Scene()
    with engine_for(make_model(BLENDED["llama"]()), scene, write_back=False) as engine:
        engine.precompute([scene.chunks[0], scene.chunks[1], scene.chunks[3]])
        found: list[Any] = []
        engine.on_first_logits = found.append
        done = engine.generate(scene.prompt, SamplingParams(2), BlendSettings(0.4, name))
        assert done.missing == (scene.chunks[2].id,)
        assert torch.isfinite(found[0]).all()


@pytest.mark.parametrize(
    ("ranking", "asked", "instead"),
    [("now", "query", "static 0.54"), ("now", "static-query", "static 0.54"), ("off", "static-query", "hkvd 1")],
)
def test_a_model_that_exposes_no_attention_falls_back_to_a_policy_of_equal_quality(
    ranking: Any, asked: str, instead: str
) -> None:
    scene = Scene()
    with engine_for(make_model(BLENDED["gemma2"]()), scene) as engine:
        engine.ranking = ranking
        engine.precompute(scene.chunks)
        done = engine.generate(scene.prompt, SamplingParams(1), BlendSettings(0.3, asked))
        assert f"{asked} fell back to {instead}, since" in done.reason
        assert done.policy == instead.split(maxsplit=1)[0]


def test_unranked_chunks_fall_back_from_static_query_to_query() -> None:
    scene = Scene()
    with engine_for(make_model(BLENDED["llama"]()), scene) as engine:
        engine.ranking = "off"
        engine.precompute(scene.chunks)
        done = engine.generate(scene.prompt, SamplingParams(1), BlendSettings(0.3, "static-query"))
    assert (done.policy, done.ratio) == ("query", 0.3)
    assert "static-query fell back to query 0.3, since not all chunks are ranked" in done.reason


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_no_policy_falls_back_at_ratio_0_or_1(ratio: float) -> None:
    scene = Scene()
    with engine_for(make_model(BLENDED["llama"]()), scene) as engine:
        engine.ranking = "off"
        engine.precompute(scene.chunks)
        done = engine.generate(scene.prompt, SamplingParams(1), BlendSettings(ratio, "static-query"))
    assert (done.policy, done.ratio) == ("static-query", ratio)
    assert "fell back" not in done.reason


@st.composite
def scored(draw: Any) -> Candidates:
    sizes = draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
    total = sum(sizes)
    values = st.lists(st.floats(0, 1, width=32), min_size=total, max_size=total)
    chunk = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    offset = torch.cat([torch.arange(n) for n in sizes])
    return Candidates(
        torch.arange(5, 5 + total),
        chunk,
        offset,
        torch.tensor(draw(values), dtype=torch.float32),
        torch.tensor(draw(values), dtype=torch.float32),
    )


@given(scored(), st.integers(0, 60))
def test_query_takes_the_most_attended_tokens_and_hybrid_takes_the_sinks_first(
    candidates: Candidates, count: int
) -> None:
    total = len(candidates.positions)
    count = min(count, total)
    query, hybrid = (policy(name).select(candidates, count) for name in ("query", "hybrid"))
    assert int(query.sum()) == int(hybrid.sum()) == count
    if 0 < count < total:
        assert candidates.attention[query].min() >= candidates.attention[~query].max()
    sinks = candidates.offset < 2
    if count >= int(sinks.sum()):
        assert hybrid[sinks].all()


def test_hybrid_prefers_tokens_that_deviate_and_are_attended() -> None:
    n = 40
    attention, deviation = torch.full((n,), 0.01), torch.linspace(0.001, 0.01, n)
    attention[10], deviation[30] = 1.0, 1.0
    attention[20], deviation[20] = 1.0, 1.0
    found = Candidates(torch.arange(n), torch.zeros(n, dtype=torch.int64), torch.arange(n), deviation, attention)
    chosen = policy("hybrid").select(found, 3).nonzero().squeeze(1).tolist()
    assert chosen == [0, 1, 20]


def candidates(sizes=(5, 7, 3)):
    lengths = torch.tensor(sizes, dtype=torch.int64)
    chunk = torch.repeat_interleave(torch.arange(len(sizes)), lengths)
    offset = torch.cat([torch.arange(n) for n in (*sizes, 0)])
    return Candidates(torch.arange(10, 10 + len(chunk)), chunk, offset)


def test_random_selection_takes_the_exact_number_repeatably_and_evenly() -> None:
    found = candidates()
    for count in range(16):
        mask = policy("random").select(found, count)
        assert int(mask.sum()) == count
        assert torch.equal(mask, policy("random").select(found, count))
    often = torch.zeros(15)
    for shift in range(400):
        moved = Candidates(found.positions + shift, found.chunk, found.offset)
        often += policy("random").select(moved, 5)
    assert (often / 400).sub(1 / 3).abs().max() < 0.12
    assert len(policy("random").select(candidates(()), 3)) == 0


def test_sink_takes_equally_many_tokens_from_the_start_of_each_chunk() -> None:
    found = candidates()
    mask = policy("sink").select(found, 6)
    assert found.offset[mask].max() < found.offset[~mask].min()
    assert int(policy("sink").select(found, 1).sum()) == int(found.chunk.max()) + 1
    assert policy("sink").select(found, 15).all()
    assert not policy("sink").select(found, 0).any()


@given(scored(), st.integers(0, 60))
def test_hkvd_takes_the_highest_deviation_and_the_earlier_token_of_a_tie(candidates: Candidates, count: int) -> None:
    assert candidates.deviation is not None
    values = candidates.deviation.tolist()
    want = sorted(range(len(values)), key=lambda at: (-values[at], at))[:count]
    assert policy("hkvd").select(candidates, count).nonzero().squeeze(1).tolist() == sorted(want)


def test_nan_scores_highest_and_ties_go_to_the_earlier_token() -> None:
    scores = torch.tensor([2.0, float("inf"), float("nan"), 2.0, -float("inf"), 2.0])
    order = [2, 1, 0, 3, 5, 4]
    for count in range(9):
        assert highest(scores, count).nonzero().squeeze(1).tolist() == sorted(order[:count])
    assert highest(scores[:0], 3).tolist() == []


@pytest.mark.parametrize("wrong", [torch.ones(3, dtype=torch.bool), torch.tensor(1.0)])
def test_a_policy_that_returns_a_wrong_mask_is_named_in_the_error(
    engine: Any, scene: Scene, wrong: torch.Tensor
) -> None:
    class Wrong(Given):
        name = "wrong"

        def select(self, candidates: Candidates, count: int) -> torch.Tensor:
            return wrong

    with pytest.raises(InputError, match="'wrong' returned"):
        blend(engine, scene, Wrong(torch.zeros(0)))
