"""Tests methods that order chunks for prefix cache hits: their answers, computation and stored KV."""

from __future__ import annotations

import json

import pytest

from cacheblend_lab.evaluation.answers import AnswersFile, answer_all
from cacheblend_lab.evaluation.methods import make_methods
from cacheblend_lab.evaluation.prepare import Preparer, set_header
from cacheblend_lab.evaluation.summary import summarize
from cacheblend_lab.samples import Sample
from cacheblend_rag.blending.profile import ModelProfile
from cacheblend_rag.blending.settings import FULL_RECOMPUTE, BlendSettings
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.prompts.prompt import rag_prompt
from lab_tests.evaluation.test_run import FEW, run

pytestmark = pytest.mark.slow


WORDS = {
    "gull": "The Proud Gull was launched in 1889. Her cargo is grain.",
    "refit": "She was refitted in 1901 and sails at dawn.",
    "anchor": "The Ivory Anchor keeps a canary. Nobody on board plays the cello.",
    "dawn": "At dawn the harbour is calm, and the lighthouse is dark.",
}
ASKED = [
    ("gull", "refit", "anchor"),
    ("dawn", "refit", "gull"),
    ("anchor", "dawn"),
    ("refit", "gull", "dawn", "anchor"),
]
SAMPLES = [
    Sample(f"s{i}", f"What is on board of ship {i}?", ("grain",), tuple(WORDS[word] for word in words), "ready")
    for i, words in enumerate(ASKED)
]


def own_order(engine, row, sample):
    found = [engine.registry.get(name) for name in row["chunks"]]
    return rag_prompt(engine.tokenizer, found, sample.question, sample.instruction)


def of(rows, method):
    return [row for row in rows if row["method"] == method]


def test_reordering_methods_answer_as_full_recompute_of_the_reordered_prompt(engine):
    rows = run(engine, "full,reorder,reorder+blend", SAMPLES, blend=BlendSettings(1.0))
    for name in ("reorder", "reorder+blend"):
        for row, sample in zip(of(rows, name), SAMPLES, strict=True):
            want = engine.generate(own_order(engine, row, sample), SamplingParams(4), FULL_RECOMPUTE)
            assert row["text"] == want.text.strip()
            assert row["agrees_with_reordered_full"]
    # The first prompt is not reordered; the second one is, so its agreement with full recompute is lower.
    first, second, *_ = of(rows, "reorder")
    assert first["agrees_with_full"]
    assert first["first_token_kl"] == pytest.approx(0, abs=1e-6)
    assert second["first_token_kl"] > 1e-6
    found = summarize(rows)["methods"]
    assert found["reorder"]["agreement_with_reordered_full"] == 1
    assert found["full"]["agreement_with_reordered_full"] is None


def test_reordering_computes_only_tokens_outside_the_cached_prefix(engine):
    rows = of(run(engine, "full,reorder", SAMPLES), "reorder")
    header = len(engine.header_ids)
    shared = []
    for row, sample in zip(rows, SAMPLES, strict=True):
        spans = engine.tokenize(own_order(engine, row, sample)).spans
        ends = {header + 0: 0, **{span.end: number for number, span in enumerate(spans, 1)}}
        reused = row["prompt_tokens"] - row["computed_tokens"]
        assert row["reused_tokens"] == reused
        shared.append(ends[reused] if reused else 0)
    # The served orders are: gull refit anchor | gull refit dawn | anchor dawn | gull refit anchor dawn; of equal
    # prefixes the first retrieved wins.
    assert shared == [0, 2, 0, 3]


def test_a_blend_of_what_is_not_cached_computes_less_than_either(engine):
    rows = run(engine, "full,blend,reorder,reorder+blend", SAMPLES)
    computed = {name: of(rows, name)[3]["computed_tokens"] for name in ("full", "blend", "reorder", "reorder+blend")}
    assert computed["full"] > computed["reorder"] >= computed["reorder+blend"]
    assert computed["blend"] > computed["reorder+blend"]
    # A blended prompt's KV is not exact: the prefix is computed once more behind the answer.
    assert of(rows, "reorder")[1]["background_tokens"] == 0
    assert of(rows, "reorder+blend")[0]["background_tokens"] > of(rows, "reorder+blend")[1]["background_tokens"] > 0


def test_reordering_leaves_the_store_and_the_registry_unchanged(engine):
    run(engine, "full", SAMPLES)
    known = {one.id for one in engine.registry}
    run(engine, "reorder,reorder+blend", SAMPLES)
    assert {one.id for one in engine.registry} == known
    assert all(engine.entries.contains(one.token_ids) for one in engine.registry if one.text in WORDS.values())


def test_an_interruption_does_not_change_the_order_of_chunks_but_an_earlier_run_does(engine, tmp_path):
    def once(samples, path):
        methods = make_methods(["full", "reorder"], BlendSettings(0.3), ModelProfile(), 8)
        set_header(engine, samples)
        with AnswersFile(path, {}) as answers:
            return answer_all(engine, Preparer(engine, FEW), samples, methods, answers).rows

    path, other = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    want = once(SAMPLES, path)
    lines = path.read_text().splitlines()
    kept = [line for line in lines if json.loads(line).get("id") in (None, "s0", "s1")]
    other.write_text("\n".join(kept) + "\n")
    got = once(SAMPLES, other)
    assert [row["chunks"] for row in got] == [row["chunks"] for row in want]
    assert [row["computed_tokens"] for row in got] == [row["computed_tokens"] for row in want]
    # Different questions precede this one: a row of the file must not be taken for this run's.
    (alone,) = of(once(SAMPLES[1:2], path), "reorder")
    assert alone["computed_tokens"] == alone["prompt_tokens"]


def test_an_interruption_changes_nothing_for_chunks_of_a_kv_writer(engine):
    first, second = (
        Sample(" ".join(words), "Q?", ("x",), tuple(WORDS[word] for word in words), "ready")
        for words in (("gull", "refit"), ("dawn", "gull"))  # the second also starts with the gull, which is cached
    )
    computed = []
    for answered in ((first, second), (second,)):
        with TransformersEngine(
            engine.runner.model, tokenizer=engine.tokenizer, device="cpu", writer="probe"
        ) as written:
            set_header(written, [first])
            preparer = Preparer(written, FEW)
            cases = {sample.id: preparer.case(sample) for sample in (first, second)}
            (method,) = make_methods(["reorder+blend"], BlendSettings(0.3), ModelProfile(), 5)
            method.begin(list(cases.values()))
            for sample in answered:
                case = cases[sample.id]
                written.precompute(case.chunks)
                written.precompute_first(case.chunks[:1])
                reply = method.reply(written, case)
            computed.append(reply.computed_tokens)
    assert computed[0] == computed[1]
