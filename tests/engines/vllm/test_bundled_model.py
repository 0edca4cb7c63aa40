"""Tests that the bundled model in vLLM has the answers of the transformers engine, from one store, also after faults."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cacheblend_rag.blending.settings import BlendSettings
from cacheblend_rag.calibrate.costs import measure_compute, token_bytes
from cacheblend_rag.engines.results import StreamEvent
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.prompts.chunk import Chunk
from cacheblend_rag.prompts.prompt import BlendPrompt, rag_prompt
from cacheblend_rag.retrieval.chunking import split_text
from cacheblend_rag.store.files import DEFAULT
from tests.engines.vllm.engines import FULL, clear, concurrently, run, start

DEMO = Path(__file__).parents[3] / "cacheblend_rag" / "demo"
ANSWER = SamplingParams(max_tokens=12)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def shared(directory: Path) -> Iterator[Any]:
    options = {"max_model_len": 2048, "skip_tokenizer_init": False, "ram_budget": 0, "num_gpu_blocks_override": 26}
    with start(None, directory, **options) as engine:
        yield engine


@pytest.fixture
def engine(shared: Any) -> Any:
    clear(shared)
    return shared


@pytest.fixture(scope="module")
def transformers_engine(directory: Path) -> Iterator[TransformersEngine]:
    with TransformersEngine(store=directory, device="cpu") as engine:
        yield engine


@pytest.fixture(scope="module")
def corpus(transformers_engine: TransformersEngine) -> list[Chunk]:
    texts = [file.read_text(encoding="utf-8") for file in sorted((DEMO / "corpus").iterdir())]
    return [c for text in texts for c in split_text(text, transformers_engine.tokenizer, max_tokens=256)][:40]


@pytest.fixture(scope="module")
def questions() -> list[str]:
    return [item["question"] for item in json.loads((DEMO / "questions.json").read_text(encoding="utf-8"))]


def prompts(engine: Any, corpus: list[Chunk], questions: list[str], count: int, chunks: int = 6) -> list[BlendPrompt]:
    rng = random.Random(0)
    return [
        rag_prompt(engine.tokenizer, rng.sample(corpus, chunks), questions[i % len(questions)]) for i in range(count)
    ]


def test_answers_equal_those_of_the_transformers_engine(engine, transformers_engine, corpus, questions) -> None:
    engine.precompute(corpus[:9])
    for prompt in prompts(engine, corpus[:9], questions, 2):
        for settings in (FULL, BlendSettings(ratio=1.0), BlendSettings(), BlendSettings(0.05, "static-query")):
            ours, theirs = (e.generate(prompt, ANSWER, settings) for e in (engine, transformers_engine))
            assert (ours.text, ours.token_ids, ours.mode) == (theirs.text, theirs.token_ids, theirs.mode)
            assert ours.policy == theirs.policy
            assert ours.usage == theirs.usage


@pytest.mark.parametrize("writer", ["vllm", "transformers"])
def test_entries_of_one_engine_are_used_by_the_other_engine(
    engine, transformers_engine, corpus, questions, writer: str
) -> None:
    first, second = (engine, transformers_engine) if writer == "vllm" else (transformers_engine, engine)
    assert first.precompute(corpus[:6]).computed == 6
    assert second.precompute(corpus[:6]).present == 6
    prompt = rag_prompt(engine.tokenizer, corpus[:6], questions[0])
    answer = second.generate(prompt, ANSWER, BlendSettings(ratio=0.15))
    assert (answer.mode, answer.missing) == ("blend", ())
    assert answer.token_ids == first.generate(prompt, ANSWER, BlendSettings(ratio=0.15)).token_ids
    transformers_engine.store.evict(0)


def test_compute_costs_of_vllm_are_measured_as_those_of_any_engine(engine, transformers_engine) -> None:
    cost = measure_compute(engine)
    assert cost.seconds(1000, 1000) > cost.seconds(50, 1000) > 0
    assert cost.per_placed_s >= 0
    assert token_bytes(engine) == token_bytes(transformers_engine)


def test_twenty_mixed_requests_side_by_side_do_not_mix(engine, corpus, questions) -> None:
    engine.precompute(corpus[:8])  # four of the twelve chunks are missing
    kinds = [
        FULL,
        BlendSettings(ratio=1.0),
        BlendSettings(ratio=0.15),
        BlendSettings(0.0, "full-reuse"),
        BlendSettings(0.1, "sink"),
    ]
    asked = prompts(engine, corpus[:12], questions, 4, chunks=3)
    jobs = [(asked[i % 4], kinds[i % 5]) for i in range(20)]  # each prompt in each kind
    engine._write_back = False
    try:
        alone = [engine.generate(prompt, ANSWER, settings).token_ids for prompt, settings in jobs]
        engine.reset_prefix_cache()

        async def ask(prompt: BlendPrompt, settings: BlendSettings) -> tuple[int, ...]:
            async for event in engine.events(engine.request(prompt, ANSWER, settings)):
                last = event.generation
            return last.token_ids

        # 26 blocks of 128 tokens hold three of these prompts: other prompts wait, and running ones are preempted.
        got = concurrently(engine, [lambda p=p, s=s: ask(p, s) for p, s in jobs])
    finally:
        engine._write_back = True
    assert alone == got


async def test_async_requests_reach_vllm_all_at_once(engine, questions, monkeypatch) -> None:
    running: list[int] = []
    seen: list[int] = []
    stream = engine.events

    async def counted(*args: Any) -> AsyncIterator[StreamEvent]:
        running.append(1)
        seen.append(len(running))
        async for event in stream(*args):
            yield event
        running.pop()

    monkeypatch.setattr(engine, "events", counted)
    long = SamplingParams(max_tokens=60)
    answers = await asyncio.gather(*(engine.agenerate(f"Request {i}. {questions[i % 8]}", long) for i in range(60)))
    assert len(answers) == 60
    # A pool of waiting threads would hold back some requests: it has 32 threads at most.
    assert max(seen) > 40


def test_a_disconnected_client_leaves_no_block_in_use(engine, corpus, questions) -> None:
    engine.precompute(corpus[:6])
    whole = run(engine, _stats(engine))
    long = SamplingParams(max_tokens=400, stop=("never appears",))

    async def leave(prompt: BlendPrompt, after: int) -> None:
        stream = engine.events(engine.request(prompt, long, BlendSettings(ratio=0.3)))
        if after == 0:
            task = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        else:
            await anext(stream)
        await stream.aclose()

    asked = prompts(engine, corpus[:6], questions, 20, chunks=4)
    concurrently(engine, [lambda p=p, i=i: leave(p, i % 2) for i, p in enumerate(asked)])
    want = engine.generate(asked[0], ANSWER, FULL).token_ids
    assert engine.generate(asked[0], ANSWER, BlendSettings(ratio=1.0)).token_ids == want
    engine.reset_prefix_cache()
    assert run(engine, _stats(engine)) == whole


async def test_vllm_aborts_the_requests_of_cancelled_calls(engine, questions, monkeypatch) -> None:
    aborted: set[str] = set()
    core, long = engine.llm.engine_core, SamplingParams(max_tokens=2000, stop=("never appears",))
    abort = core.abort_requests_async

    async def noted(request_ids: list[str]) -> None:
        aborted.update(request_ids)
        await abort(request_ids)

    async def streamed(prompt: str) -> None:
        async for _ in engine.astream(prompt, long):
            pass

    async def all_begun() -> None:
        while engine.llm.output_processor.get_num_unfinished_requests() < 20:
            await asyncio.sleep(0.01)

    monkeypatch.setattr(core, "abort_requests_async", noted)
    asked = [f"Request {number}. {questions[number % 8]}" for number in range(20)]
    calls = [engine.agenerate(each, long) if at % 2 else streamed(each) for at, each in enumerate(asked)]
    tasks = [asyncio.ensure_future(call) for call in calls]
    await asyncio.wait_for(asyncio.to_thread(run, engine, all_begun()), 120)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert await asyncio.to_thread(run, engine, _stats(engine)) == (0, True)
    assert len(aborted) == len(tasks)


async def _stats(engine: Any) -> tuple[int, bool]:
    """Return the unfinished requests, and whether the prefix cache was emptied; vLLM refuses while any block is in use."""
    llm = engine.llm
    while llm.output_processor.has_unfinished_requests():
        await asyncio.sleep(0.01)
    return llm.output_processor.get_num_unfinished_requests(), await llm.reset_prefix_cache()


def test_a_prompt_is_prefilled_if_its_store_was_deleted_under_the_engine(
    engine, corpus, questions, directory: Path
) -> None:
    engine.precompute(corpus[:6])
    prompt = rag_prompt(engine.tokenizer, corpus[:6], questions[1])
    want = engine.generate(prompt, ANSWER, FULL).token_ids
    shutil.rmtree(directory / "kv")
    got = engine.generate(prompt, ANSWER, BlendSettings(ratio=1.0))
    assert got.token_ids == want
    engine.flush()
    assert engine.precompute(corpus[:6]).failed == {}


GOOD: dict[str, Any] = {
    "spans": [[5, 9, "x"]],
    "turn_ends": [4, 20],
    "unasked": 2,
    "options": {
        "reuse": "chunks",
        "policy": "hkvd",
        "ratio": 0.1,
        "auto": False,
        "check_layers": [1],
        "widths": [1],
        "quality": None,
    },
    "trace": True,
    "namespace": {"name": "acme", "reads": ["public"]},
}


def wrong_options(**changes: Any) -> dict[str, Any]:
    return {**GOOD, "options": {**GOOD["options"], **changes}}


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({**GOOD, "spans": "no"}, ""),
        ({**GOOD, "spans": [[0, 10**9, "x"]]}, "outside the prompt"),
        ({**GOOD, "spans": [[9, 5, "x"]]}, "not ascending"),
        (wrong_options(widths=[1, 1]), "widths"),
        ({**GOOD, "turn_ends": [9, 5]}, "not ascending"),
        ({**GOOD, "unasked": -1}, "answer"),
        ({**GOOD, "options": {"policy": "hkvd"}}, "ratio"),
        ({**GOOD, "costs": "none"}, ""),
        (wrong_options(ratio=7), "ratio is 7"),
        (wrong_options(policy="none such"), "none such"),
        (wrong_options(check_layers=[3, 1]), "check_layers"),
        (wrong_options(reuse="nothing"), "reuse"),
        ({"start": -3}, "saved"),
        ("text", ""),
        (7, ""),
    ],
)
def test_a_request_with_malformed_options_is_prefilled(engine, questions, params: Any, named: str) -> None:
    from vllm import SamplingParams as VLLMSampling

    tokens = engine.tokenize(BlendPrompt((questions[0],)))

    async def ask() -> Any:
        sampling = VLLMSampling(max_tokens=3, temperature=0, extra_args={"kv_transfer_params": {"cacheblend": params}})
        async for output in engine.llm.generate(
            {"prompt_token_ids": list(tokens.token_ids)}, sampling, f"malformed-{params!r:.40}"
        ):
            last = output
        return last

    output = run(engine, ask())
    assert output.finished
    assert len(output.outputs[0].token_ids) >= 1
    reason = output.kv_transfer_params["cacheblend"]["outcome"]["reason"]
    assert "malformed" in reason
    assert named in reason


def test_well_formed_options_are_read() -> None:
    from cacheblend_rag.engines.vllm.messages import BlendJob, read_params, to_params

    job = read_params({"cacheblend": GOOD}, 20)
    assert isinstance(job, BlendJob)
    assert to_params(job) == {"cacheblend": GOOD}
    plain = replace(job, turn_ends=(), unasked=0, trace=False, namespace=DEFAULT)
    assert set(to_params(plain)["cacheblend"]) == {"spans", "options"}, "what is the default does not travel"
    assert read_params(to_params(plain), 20) == plain
