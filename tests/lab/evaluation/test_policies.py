"""Policies that look at the question's attention."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cacheblend_rag.blending.fusor import fuse
from cacheblend_rag.blending.options import FuseOptions
from cacheblend_rag.blending.plan import make_plan
from cacheblend_rag.blending.policies import policy
from cacheblend_rag.blending.policies.base import Candidates
from cacheblend_rag.blending.settings import BlendSettings
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.transformers.target import TransformersTarget
from cacheblend_rag.errors import InputError
from cacheblend_rag.lab.evaluation.prepare import Preparation, Preparer, set_header
from cacheblend_rag.prompts.chunk import make_chunk
from cacheblend_rag.prompts.prompt import rag_prompt
from cacheblend_rag.rag.inspector import PromptInspector
from tests.blending.families import BLENDED, make_model
from tests.blending.prompts import Scene, engine_for
from tests.lab.evaluation.test_run import SAMPLES, TEXTS

pytestmark = pytest.mark.slow


class Spy(type(policy("query"))):
    """The query policy; remembers what it was shown."""

    def select(self, candidates, count):
        self.seen = candidates
        return super().select(candidates, count)


def test_the_probed_attention_is_that_of_full_kv_reuse(engine):
    set_header(engine, SAMPLES)
    inspector = PromptInspector.of(engine, Preparer(engine, Preparation(max_tokens=4)).case(SAMPLES[0]).prompt)
    # Its own values are tested against the model's eager attention in test_figures.
    want = inspector.measure_attention(FuseOptions(policy("full-reuse"), 0.0)).mean((0, 1, 2))
    spy = Spy()
    inspector.measure_attention(FuseOptions(spy, 0.4))
    torch.testing.assert_close(spy.seen.attention, want[spy.seen.positions], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("name", ["query", "hybrid"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral_window", "phi3_partial"])
def test_the_ends_of_the_ratio_are_full_kv_reuse_and_the_full_prefill(name, family):
    scene = Scene()
    with engine_for(make_model(BLENDED[family]()), scene) as engine:
        engine.precompute(scene.chunks)

        def logits(settings):
            found = []
            engine.on_first_logits = found.append
            engine.generate(scene.prompt, SamplingParams(1), settings)
            return found[0]

        full, none = logits(BlendSettings(reuse="off")), logits(BlendSettings(0.0, "full-reuse"))
        torch.testing.assert_close(logits(BlendSettings(1.0, name)), full, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(logits(BlendSettings(0.0, name)), none, atol=1e-5, rtol=1e-5)
        between = logits(BlendSettings(0.3, name, (1, 2)))
        assert torch.isfinite(between).all()
        assert not torch.allclose(between, none, atol=1e-4)


def test_a_blend_by_attention_recomputes_exactly_the_tokens_it_chose(engine):
    """The same tokens chosen by a policy that needs no inspector give the same logits: the inspector leaves no trace."""
    set_header(engine, SAMPLES)
    chunks = [make_chunk(text, engine.tokenizer) for text in TEXTS]
    engine.precompute(chunks)
    from cacheblend_rag.prompts.prompt import tokenize
    from cacheblend_rag.store.kv import kv_key

    tokens = tokenize(rag_prompt(engine.tokenizer, chunks, "What is on board?"), engine.tokenizer, engine.registry)

    class Given(type(policy("full-reuse"))):
        def select(self, candidates, count):
            return torch.isin(candidates.positions, chosen)

    def plan():
        return make_plan(
            tokens,
            engine.header_ids,
            lambda ids: engine.store.get(kv_key(engine.fingerprint, engine.header_ids, ids)),
        )

    first = TransformersTarget(engine.runner, engine.rope, tokens.token_ids)
    chosen = fuse(plan(), first, FuseOptions(policy("query"), 0.3)).recomputed
    assert len(chosen) > 3
    second = TransformersTarget(engine.runner, engine.rope, tokens.token_ids)
    fuse(plan(), second, FuseOptions(Given(), 0.3))
    torch.testing.assert_close(first.logits, second.logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["query", "hybrid"])
def test_missing_chunks_do_not_disturb_the_probe(name):
    scene = Scene()
    with engine_for(make_model(BLENDED["llama"]()), scene, write_back=False) as engine:
        engine.precompute([scene.chunks[0], scene.chunks[1], scene.chunks[3]])
        found = []
        engine.on_first_logits = found.append
        done = engine.generate(scene.prompt, SamplingParams(2), BlendSettings(0.4, name))
        assert done.missing == (scene.chunks[2].id,)
        assert torch.isfinite(found[0]).all()


def test_a_target_that_shows_no_attention_is_named():
    scene = Scene()
    with engine_for(make_model(BLENDED["gemma2"]()), scene) as engine:
        engine.precompute(scene.chunks)
        with pytest.raises(InputError, match="eager attention"):
            engine.generate(scene.prompt, SamplingParams(1), BlendSettings(0.3, "query"))


@st.composite
def scored(draw):
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
def test_query_takes_the_most_read_and_hybrid_the_sinks_first(candidates, count):
    total = len(candidates.positions)
    count = min(count, total)
    query, hybrid = (policy(name).select(candidates, count) for name in ("query", "hybrid"))
    assert int(query.sum()) == int(hybrid.sum()) == count
    if 0 < count < total:
        assert candidates.attention[query].min() >= candidates.attention[~query].max()
    sinks = candidates.offset < 2
    if count >= int(sinks.sum()):
        assert hybrid[sinks].all()


def test_hybrid_prefers_what_deviates_and_is_read():
    n = 40
    attention, deviation = torch.full((n,), 0.01), torch.linspace(0.001, 0.01, n)
    attention[10], deviation[30] = 1.0, 1.0
    attention[20], deviation[20] = 1.0, 1.0
    found = Candidates(torch.arange(n), torch.zeros(n, dtype=torch.int64), torch.arange(n), deviation, attention)
    chosen = policy("hybrid").select(found, 3).nonzero().squeeze(1).tolist()
    assert chosen == [0, 1, 20]
