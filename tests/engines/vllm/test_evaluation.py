"""Methods of the evaluation on vLLM: the rival that reorders chunks, alone and with a blend behind its exact prefix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import transformers as hf

from cacheblend_rag.blending.settings import FULL_RECOMPUTE, BlendSettings
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.errors import InputError
from cacheblend_rag.evaluation.evaluate import EvalSettings, evaluate
from cacheblend_rag.evaluation.prepare import set_header
from cacheblend_rag.evaluation.samples import Sample
from tests.conftest import tokenizer_named
from tests.engines.vllm.engines import SHAPE, clear, save_model, start
from tests.evaluation.test_reorder import SAMPLES, of, own_order
from tests.evaluation.test_run import run

# More than the words of one chunk: vLLM's prefix cache holds whole pages of 128 tokens.
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


def test_reordered_prompts_share_a_prefix_and_answer_as_their_full_recompute(engine: Any) -> None:
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
    # As on the transformers engine: gull refit anchor | gull refit dawn | anchor dawn | gull refit anchor dawn
    assert shared == [0, 2, 0, 3]


def test_a_blend_of_what_is_not_cached_computes_less_than_either(engine: Any) -> None:
    rows = run(engine, "full,blend,reorder,reorder+blend", LONG)
    computed = {name: of(rows, name)[3]["computed_tokens"] for name in ("full", "blend", "reorder", "reorder+blend")}
    assert computed["full"] > computed["reorder"] >= computed["reorder+blend"]
    assert computed["blend"] > computed["reorder+blend"]


def test_a_run_says_which_engine_it_was(engine: Any) -> None:
    settings = EvalSettings(methods=("full", "reorder", "blend"), limit=2, blend=BlendSettings(0.3, "hkvd", (1,)))
    result = evaluate(engine, settings)
    assert (result.settings["engine"], result.settings["device"]) == ("VLLMEngine", "cpu")
    assert result.summary["methods"]["reorder"]["agreement_with_reordered_full"] == 1


def test_another_header_than_its_own_is_refused(engine: Any) -> None:
    with pytest.raises(InputError, match="header"):
        set_header(engine, [Sample("a", "?", ("",), ("text",), instruction="Say it in other words.")])
