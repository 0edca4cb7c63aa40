"""Test vLLM with its default options, on a GPU (`make test-gpu`) and, as far as it can, in its CPU build.

The dtype is bfloat16, as users have it. The limit for all errors is the rounding error of a full prefill against fp32.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from vllm import SamplingParams

from cacheblend_rag.blending.gate import TOLERANCE
from cacheblend_rag.blending.settings import BlendSettings
from cacheblend_rag.calibrate.diagnose import ask_worker
from cacheblend_rag.prompts.prompt import TokenizedPrompt
from cacheblend_rag.store.kv import ChunkKV, LayerKV, read_whole
from tests.blending import reference
from tests.blending.prompts import Scene
from tests.engines.vllm.engines import (
    FULL,
    SHAPE,
    clear,
    concurrently,
    first_logprobs,
    run,
    save_model,
    start,
)
from tests.engines.vllm.test_graphs import captured, in_worker
from tests.engines.vllm.test_parity import rank

ON_GPU = torch.cuda.is_available()
DEVICES = [
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")]),
    pytest.param("cpu", marks=pytest.mark.skipif(ON_GPU, reason="this vLLM is for the GPU")),
]
SCALE = 4 if ON_GPU else 1
"""A CPU computes long prompts at a quarter of their length; prompts, steps and room keep their proportions."""
WIDE = {**SHAPE, "hidden_size": 256, "initializer_range": 0.07, "max_position_embeddings": 2048 * SCALE}
"""Heads of 64 dimensions; logits are spread, and rounding errors do not grow from layer to layer."""
BLOCK = 16 if ON_GPU else 128
BLOCKS = 3072 * SCALE // BLOCK
"""vLLM's pages of ``BLOCK`` tokens have room for two and a half long prompts."""
_MIXED = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"]
FAMILIES: dict[str, tuple[Callable[[], Any], int]] = {
    "llama": (lambda: hf.LlamaConfig(**WIDE), BLOCKS),
    # The layers make three groups, each with separate pages.
    "gemma3": (lambda: hf.Gemma3TextConfig(**WIDE, head_dim=64, sliding_window=512, layer_types=_MIXED), 3 * BLOCKS),
}
SHORT = Scene(chunk_tokens=(90, 150, 150, 61), question=9)
LONG = Scene(seed=1, chunk_tokens=[SCALE * tokens for tokens in (225, 275, 275, 250)], question=12)
LONG.header = SHORT.header
STEP = 512 * SCALE
"""Tokens of a step; a long prompt takes three steps."""
REUSE, ALL, STATIC = BlendSettings(0.0), BlendSettings(1.0), BlendSettings(0.15, "static")
ASKED = BlendSettings(0.15, "static-query")
LIMIT = 2.0
"""A result may have this many times the rounding error of a full prefill."""


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# Without a GPU one family, the harder one, is enough: compiling takes half a minute.
@pytest.fixture(scope="module", params=list(FAMILIES) if ON_GPU else ["gemma3"])
def case(request: pytest.FixtureRequest, device: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Yield an engine, and the model in fp32 with the engine's weights."""
    directory = tmp_path_factory.mktemp("model")
    config, blocks = FAMILIES[request.param]
    model = save_model(config(), directory)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.bfloat16())
    room = {"num_gpu_blocks_override": blocks}
    options = {"enforce_eager": False, "max_model_len": None, "max_num_batched_tokens": STEP, "dtype": "bfloat16"}
    options |= {"generated": True}
    store = tmp_path_factory.mktemp("store")
    # Entries do not stay in RAM, because tests here change stored entries.
    with start(directory, store, header=SHORT.header, ram_budget=0, **options, **room) as engine:
        yield engine, model


@cache
def exact(model: Any, ids: tuple[int, ...]) -> torch.Tensor:
    """Return the model's log-probabilities ``[tokens, vocab]`` in fp32."""
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)
    return found


@cache
def look(model: Any, scene: Scene) -> torch.Tensor:
    """Return how much the question attends to each token, by the independent reference in fp32."""
    return reference.question_attention(model, scene.header, scene.parts())


@cache
def blended(model: Any, scene: Scene, ratio: float, chosen: tuple[int, ...] | None) -> torch.Tensor:
    """Return the log-probabilities of the independent reference in fp32."""
    return reference.blend(model, scene.header, scene.parts(), ratio, chosen=chosen).logits.log_softmax(-1)


def off(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).square().mean().sqrt())


def rounding(engine: Any, model: Any, scene: Scene) -> float:
    """Return the mean rounding error of the engine's full prefills of a prompt and of its beginnings against fp32."""
    ids = scene.prompt.token_ids
    want, found = exact(model, ids), []
    for end in (len(ids), len(ids) - 3, len(ids) - 40, len(ids) - 61):
        got = first_logprobs(engine, TokenizedPrompt(ids[:end], ()), FULL)
        found.append(off(got, want[end - 1]))
    return sum(found) / len(found)


def expected(engine: Any, model: Any, settings: BlendSettings, scene: Scene) -> torch.Tensor:
    """Return the reference's log-probabilities in fp32, for the tokens that rank first by the stored deviations."""
    assert isinstance(settings.ratio, float)
    chosen = None
    if settings.policy is not None:
        stale = scene.prompt.spans[1:]
        ranks = torch.cat([stored(engine, span.chunk.token_ids).static_deviation() for span in stale])
        positions = torch.cat([torch.arange(span.start, span.end) for span in stale])
        if settings is ASKED:
            ranks = ranks.double().sqrt() * look(model, scene)[positions]
        first = ranks.argsort(descending=True)[: round(settings.ratio * len(positions))]
        chosen = tuple(positions[first].sort().values.tolist())
    return blended(model, scene, settings.ratio, chosen)


def stored(engine: Any, ids: tuple[int, ...]) -> ChunkKV:
    found = engine.entries.get(ids, SHAPE["num_hidden_layers"])
    whole = read_whole(found)
    assert whole is not None
    return whole


def asked(engine: Any, scene: Scene, settings: BlendSettings) -> torch.Tensor:
    engine.reset_prefix_cache()
    return first_logprobs(engine, scene.prompt, settings)


def test_vllm_runs_with_its_default_features(engine, device: str) -> None:
    config, found = engine.llm.vllm_config, ask_worker(engine, "cacheblend_backend")
    assert not config.model_config.enforce_eager
    assert config.cache_config.enable_prefix_caching
    assert config.scheduler_config.enable_chunked_prefill
    if device == "cuda":
        assert (found["runner"], found["attention"]) == ("V2", "FLASH_ATTN")
        assert config.scheduler_config.async_scheduling
        assert config.parallel_config.distributed_executor_backend == "uni"
        assert config.compilation_config.mode.name == "VLLM_COMPILE"
        assert config.compilation_config.cudagraph_mode.name == "FULL_AND_PIECEWISE"


def test_the_gate_passes(engine) -> None:
    assert engine.gate.passed, engine.gate.reason
    if not ON_GPU:  # a GPU need only pass; here the errors are far below the limit
        assert 0 < max(engine.gate.errors.values()) < TOLERANCE[torch.bfloat16] / 2


@pytest.mark.parametrize("scene", [SHORT, LONG], ids=["short", "long"])
def test_the_error_of_a_blend_is_within_the_rounding_limit(engine, model, scene: Scene) -> None:
    limit = LIMIT * rounding(engine, model, scene)
    rank(engine, scene)
    full = asked(engine, scene, FULL)
    for settings in (ALL, REUSE, STATIC):
        got = asked(engine, scene, settings)
        assert off(got, expected(engine, model, settings, scene)) < limit, settings
        if settings is ALL:
            assert off(got, full) < limit
    assert off(asked(engine, scene, REUSE), full) > 3 * limit, (
        "the scene is too easy to tell a blend from a full prefill"
    )


# The test uses the short scene, because the reference's attention weights would be too large for a long prompt.
def test_the_questions_attention_selects_the_references_tokens(engine, model) -> None:
    limit = LIMIT * rounding(engine, model, SHORT)
    rank(engine, SHORT)
    error = off(asked(engine, SHORT, ASKED), expected(engine, model, ASKED, SHORT))
    assert error < limit, error / limit


def another_chunks(kv: ChunkKV, other: ChunkKV) -> ChunkKV:
    return ChunkKV(other.layers, kv.start, static=kv.static_deviation())


def one_position_off(kv: ChunkKV, other: ChunkKV) -> ChunkKV:
    """Return KV whose keys are off by one position."""
    return ChunkKV(kv.layers, kv.start - 1, static=kv.static_deviation())


def one_layer_missing(kv: ChunkKV, other: ChunkKV) -> ChunkKV:
    layers = [LayerKV(*(torch.zeros_like(t) for t in layer)) if i == 2 else layer for i, layer in enumerate(kv.layers)]
    return ChunkKV(layers, kv.start, static=kv.static_deviation())


def test_stored_ranks_equal_the_references_static_deviations(engine, model) -> None:
    rank(engine, SHORT)
    for chunk in SHORT.chunks:
        ids = list(chunk.token_ids)
        want = reference.static_deviation(model, SHORT.header, list(engine.probe), ids)
        got = stored(engine, chunk.token_ids).static_deviation()
        torch.testing.assert_close(got.double(), want, rtol=0.1, atol=0.05 * float(want.mean()))


@pytest.mark.parametrize("fault", [another_chunks, one_position_off, one_layer_missing])
def test_the_rounding_limit_detects_one_wrong_chunk(
    engine, model, fault: Callable[[ChunkKV, ChunkKV], ChunkKV]
) -> None:
    limit = LIMIT * rounding(engine, model, SHORT)
    rank(engine, SHORT)
    ids, other = SHORT.chunks[1].token_ids, SHORT.chunks[2].token_ids
    wrong = fault(*(stored(engine, each) for each in (ids, other)))
    engine.entries.put(ids, wrong, replace=True)
    for settings in (REUSE, STATIC):
        error = off(asked(engine, SHORT, settings), expected(engine, model, settings, SHORT))
        assert error > limit, (settings, error / limit)


def test_answers_from_the_prefix_cache_are_right(engine, model) -> None:
    prompt = plain(3, 750 * SCALE)
    limit = LIMIT * rounding(engine, model, SHORT)
    engine.reset_prefix_cache()
    for cached in (0, 700 * SCALE // BLOCK * BLOCK):
        spoken = run(engine, speak(engine, prompt, FULL, 4))
        assert spoken.num_cached_tokens >= cached
        said_right(model, prompt, spoken, limit)


class Spoken:
    """An engine's answer: the tokens and their log-probabilities."""

    def __init__(self, output: Any):
        self.tokens = tuple(output.outputs[0].token_ids)
        self.logprobs = [
            found[token].logprob for found, token in zip(output.outputs[0].logprobs, self.tokens, strict=True)
        ]
        self.num_cached_tokens = output.num_cached_tokens


async def speak(
    engine: Any, prompt: TokenizedPrompt, settings: BlendSettings, count: int, begun: asyncio.Event | None = None
) -> Spoken:
    """Generate ``count`` tokens; set ``begun`` at the first token."""
    tokens, params = engine.tokens_prompt(prompt, engine.resolve(settings))
    extra = {"kv_transfer_params": params} if params else None
    sampling = SamplingParams(max_tokens=count, temperature=0, logprobs=0, detokenize=False, extra_args=extra)
    async for output in engine.llm.generate(tokens, sampling, f"spoken-{id(prompt)}-{id(params)}-{id(sampling)}"):
        last = output
        if begun is not None:
            begun.set()
    return Spoken(last)


def said_right(model: Any, prompt: TokenizedPrompt, spoken: Spoken, limit: float) -> None:
    """Assert that each token has the model's probability for it, and that no other token is much likelier."""
    ids = prompt.token_ids + spoken.tokens
    want = exact(model, ids)[len(prompt.token_ids) - 1 : -1]
    its = want.gather(1, torch.tensor(spoken.tokens)[:, None])[:, 0]
    assert off(torch.tensor(spoken.logprobs), its) < limit
    assert float((want.max(-1).values - its).max()) < 4 * limit


def plain(seed: int, tokens: int) -> TokenizedPrompt:
    """Return a prompt without chunks."""
    scene = Scene(seed=seed, chunk_tokens=(tokens - 12,), question=7)
    return TokenizedPrompt(scene.prompt.token_ids, ())


def test_concurrent_streams_and_blends_do_not_change_each_others_kv(engine, model) -> None:
    rank(engine, SHORT)
    rank(engine, LONG)
    limits = {scene: LIMIT * rounding(engine, model, scene) for scene in (SHORT, LONG)}
    engine.reset_prefix_cache()
    streams = [plain(seed, SCALE * tokens) for seed, tokens in enumerate((10, 83, 175, 322), start=10)]
    blends = [(SHORT, STATIC), (LONG, STATIC), (SHORT, REUSE), (LONG, ALL), (SHORT, ALL)]

    async def all_of_them() -> tuple[list[Spoken], list[Spoken]]:
        begun = [asyncio.Event() for _ in streams]
        running = [
            asyncio.ensure_future(speak(engine, prompt, FULL, 96, event))
            for prompt, event in zip(streams, begun, strict=True)
        ]
        for event in begun:
            await event.wait()
        asked = [speak(engine, scene.prompt, settings, 8) for scene, settings in blends]
        return await asyncio.gather(*running), await asyncio.gather(*asked)

    of_streams, of_blends = run(engine, all_of_them())
    for prompt, spoken in zip(streams, of_streams, strict=True):
        said_right(model, prompt, spoken, max(limits.values()))
    for (scene, settings), spoken in zip(blends, of_blends, strict=True):
        if settings is ALL:
            said_right(model, scene.prompt, spoken, limits[scene])
        want = expected(engine, model, settings, scene)[spoken.tokens[0]]
        assert abs(spoken.logprobs[0] - float(want)) < 2 * limits[scene], settings


def test_a_preempted_request_is_computed_again_and_answers_right(engine, model) -> None:
    limit = LIMIT * rounding(engine, model, SHORT)
    blocks = engine.llm.vllm_config.cache_config.num_gpu_blocks or BLOCKS
    prompts = [plain(seed, (BLOCKS // 4 - 1) * BLOCK - 8) for seed in range(20, 24)]
    engine.reset_prefix_cache()
    before = preemptions()
    jobs = [lambda prompt=prompt: speak(engine, prompt, FULL, 64) for prompt in prompts]
    for prompt, spoken in zip(prompts, concurrently(engine, jobs), strict=True):
        said_right(model, prompt, spoken, limit)
    if blocks == BLOCKS:  # the blocks hold all prompts, but not their answers too
        assert preemptions() > before


def preemptions() -> float:
    from prometheus_client import REGISTRY

    return sum(s.value for m in REGISTRY.collect() for s in m.samples if s.name == "vllm:num_preemptions_total")


def test_every_blended_answer_reports_the_mode_blend(engine) -> None:
    from cacheblend_rag.engines.sampling import SamplingParams as Sampling

    clear(engine)
    rank(engine, LONG)
    for settings in (REUSE, STATIC, ALL):
        engine.reset_prefix_cache()
        answer = engine.generate(LONG.prompt, Sampling(max_tokens=4), settings)
        assert (answer.mode, answer.policy, answer.missing) == ("blend", settings.policy or "static-query", ()), (
            answer.reason
        )


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
def test_the_error_of_replayed_passes_on_a_gpu_is_within_the_rounding_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # the test sends functions to the worker
    model = save_model(FAMILIES["llama"][0](), tmp_path / "model")
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.bfloat16())
    scenes = [Scene(seed, chunk_tokens=(90, 150, 150, 61), question=9) for seed in range(30, 34)]
    options = {"enforce_eager": False, "max_model_len": None, "dtype": "bfloat16", "generated": True}
    # Passes are replayed only if stored KV is placed at once, from page-locked RAM.
    room = {"ram_budget": 1 << 28, "num_gpu_blocks_override": BLOCKS}
    with start(tmp_path / "model", tmp_path / "store", header=scenes[0].header, **options, **room) as engine:
        for scene in scenes:
            scene.header = scenes[0].header
            rank(engine, scene)
        for settings in (STATIC, ASKED, REUSE):
            for scene in scenes:
                limit = LIMIT * rounding(engine, model, scene)
                error = off(asked(engine, scene, settings), expected(engine, model, settings, scene))
                assert error < limit, (settings, scene, error / limit)
        kinds = in_worker(engine, captured)
        assert any(looked for _, looked in kinds), "no question was captured"
        assert any(not looked for _, looked in kinds), "no blend was captured"
