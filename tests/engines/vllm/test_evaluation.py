"""Tests of evaluation methods on vLLM: reordered chunks, alone and with a blend behind their exact prefix."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers as hf
from cacheblend_lab.bench import ThroughputSettings, Workbench, bench_throughput
from cacheblend_lab.evaluation.evaluate import EvalSettings, evaluate
from cacheblend_lab.evaluation.prepare import set_header
from cacheblend_lab.reorder import ReorderedPrompts
from cacheblend_lab.samples import Sample
from lab_tests.evaluation.test_reorder import SAMPLES, of, own_order
from lab_tests.evaluation.test_run import FEW, run

from cacheblend_rag.blending.settings import FULL_RECOMPUTE, BlendSettings
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.errors import InputError
from tests.conftest import tokenizer_named
from tests.engines.vllm.engines import SHAPE, clear, save_model, start

# The texts are four times as long, because vLLM's prefix cache holds whole pages of 128 tokens.
LONG = [
    Sample(one.id, one.question, one.answers, tuple(4 * text for text in one.texts), one.packing) for one in SAMPLES
]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    directory, store = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("store")
    save_model(hf.Qwen3Config(**{**SHAPE, "vocab_size": 448, "max_position_embeddings": 4096}, head_dim=32), directory)
    tokenizer_named("byte_level").save_pretrained(directory)
    with start(directory, store, skip_tokenizer_init=False, max_model_len=4096) as engine:
        yield engine


@pytest.fixture
def engine(shared: Any) -> Any:
    clear(shared)
    return shared


def test_reordered_prompts_share_a_prefix_and_have_the_answers_of_full_recompute(engine: Any) -> None:
    rows = run(engine, "full,reorder,reorder+blend", LONG, blend=BlendSettings(1.0))
    for name in ("reorder", "reorder+blend"):
        for row, sample in zip(of(rows, name), LONG, strict=True):
            want = engine.generate(own_order(engine, row, sample), SamplingParams(4), FULL_RECOMPUTE)
            assert row["text"] == want.text.strip()
            assert row["agrees_with_reordered_full"]
    header = len(engine.header_ids)
    shared = []
    for row, sample in zip(of(rows, "reorder"), LONG, strict=True):
        spans = engine.tokenize(own_order(engine, row, sample)).spans
        ends = {0: 0, header: 0, **{span.end: number for number, span in enumerate(spans, 1)}}
        shared.append(ends[row["prompt_tokens"] - row["computed_tokens"]])
    # The order is that of the transformers engine: gull refit anchor | gull refit dawn | anchor dawn | gull refit anchor dawn
    assert shared == [0, 2, 0, 3]


def test_a_blend_of_what_is_not_cached_computes_less_than_either(engine: Any) -> None:
    rows = run(engine, "full,blend,reorder,reorder+blend", LONG)
    computed = {name: of(rows, name)[3]["computed_tokens"] for name in ("full", "blend", "reorder", "reorder+blend")}
    assert computed["full"] > computed["reorder"] >= computed["reorder+blend"]
    assert computed["blend"] > computed["reorder+blend"]


def test_an_evaluation_records_its_engine(engine: Any, tmp_path: Path) -> None:
    rows = [{"question": one.question, "answers": one.answers, "chunks": one.texts} for one in SAMPLES[:2]]
    (tmp_path / "asked.json").write_text(json.dumps(rows))
    settings = EvalSettings(
        str(tmp_path / "asked.json"),
        methods=("full", "reorder", "blend"),
        blend=BlendSettings(0.3, "hkvd", (1,)),
        preparation=FEW,
    )
    result = evaluate(engine, settings)
    assert (result.settings["engine"], result.settings["device"]) == ("VLLMEngine", "cpu")
    assert result.summary["methods"]["reorder"]["agreement_with_reordered_full"] == 1


def test_the_throughput_benchmark_measures_reordering_with_vllms_prefix_cache(engine: Any) -> None:
    place = Workbench(engine, "small", None, engine.device, engine.dtype, 448, "vllm")
    settings = ThroughputSettings(3, 3, 200, 9, 1, requests=4, ratio=0.3, policy="hkvd", target_ttft_s=1e-9)
    methods = bench_throughput(place, settings)["methods"]
    assert list(methods) == ["full", "prefix", "blend", "reorder", "reorder+blend"]
    computed = {name: method["points"][0]["computed_tokens"] for name, method in methods.items()}
    # Every prompt has the same three chunks: once they are in one order, all prompts but the first find whole pages cached.
    total = len(engine.header_ids) + 3 * 200 + 9
    pages = (total - 9) // 128 * 128
    assert computed["full"] == total
    assert total - pages <= computed["reorder"] < computed["full"]
    assert computed["reorder+blend"] < computed["blend"]


def test_reordered_prompts_reuse_vllms_prefix_cache_and_have_the_answers_of_full_recompute(engine: Any) -> None:
    place = Workbench(engine, "small", None, engine.device, engine.dtype, 448, "vllm")
    a, b, c, d = place.random_chunks(4, 150, 0)
    order, answer = ReorderedPrompts(engine.prefix_cache_tokens), SamplingParams(8)
    reused = []
    for wanted in ([a, b, c], [c, d, b, a], [d, c]):
        chunks = order.order(wanted)
        order.serve(chunks)
        prompt = place.prompt(chunks, 9, 1)
        got = engine.generate(replace(prompt, spans=()), answer)
        assert got.token_ids == engine.generate(prompt, answer, FULL_RECOMPUTE).token_ids
        reused.append(got.usage.reused_tokens)
    header = len(engine.header_ids)
    # The second prompt begins with the first's three chunks and finds their whole pages cached; the third shares only the header.
    assert reused == [0, (header + 3 * 150) // 128 * 128, header // 128 * 128]


def test_vllm_refuses_a_header_that_differs_from_the_engines(engine: Any) -> None:
    with pytest.raises(InputError, match="header"):
        set_header(engine, [Sample("a", "?", ("",), ("text",), instruction="Say it in other words.")])
