"""Diagnoses a model inside vLLM for `cacheblend doctor --engine vllm`: whether it is blended, and how long a blend takes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from cacheblend_rag.blending.settings import BlendSettings
from cacheblend_rag.calibrate.spelling import joins_are_plain
from cacheblend_rag.calibrate.workbench import Workbench
from cacheblend_rag.engines.results import Generation
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.prompts.prompt import TokenizedPrompt

if TYPE_CHECKING:
    from cacheblend_rag.engines.vllm import VLLMEngine

_CHUNKS, _CHUNK_TOKENS, _QUESTION_TOKENS = 6, 512, 32
_RUNS = 3


@dataclass(frozen=True)
class BlendCost:
    """Holds the times of a prompt of chunks of random tokens.

    Attributes:
        prompt_tokens: Length of the prompt.
        full_s: Time to first token of the full recompute; the median of a few runs.
        blend_s: Time to first token of a blend by the profile, with stored KV precomputed; the median of a few runs.
        load_s: Seconds that the last of the measured blends waited for stored KV.
        passes: Tokens (times the share of layers they went through) and seconds of each kind of pass, as means per
            blend.
    """

    prompt_tokens: int
    full_s: float
    blend_s: float
    load_s: float
    passes: dict[str, tuple[float, float]]


@dataclass(frozen=True)
class VLLMDiagnosis:
    """Holds all that `doctor --engine vllm` prints.

    Attributes:
        vllm: Version of vLLM.
        runner: Name of vLLM's model runner.
        attention: vLLM's attention backends.
        plain_joins: Whether chunks' edges are tokenised as in the whole prompt.
        step_tokens: Maximum number of tokens in an engine step.
        step_sequences: Maximum number of sequences in an engine step, and of runs of neighbouring tokens in a blend's
            pass.
        cost: Times of a blend; None for a model that is not blended.
    """

    model: str
    fingerprint: str
    vllm: str
    runner: str
    attention: str
    device: str
    dtype: str
    context_window: int
    layers: int
    step_tokens: int
    step_sequences: int
    blended: bool
    reason: str
    plain_joins: bool | None
    gate_errors: dict[str, float]
    gate_limit: float | None
    cost: BlendCost | None


def diagnose_vllm(engine: VLLMEngine, progress: Callable[[str], None] | None = None) -> VLLMDiagnosis:
    """Examine a running vLLM; ``progress`` is called with a line of text before each step."""
    say = progress or (lambda line: None)
    backend = ask_worker(engine, "cacheblend_backend")
    config = engine.llm.vllm_config.scheduler_config
    say("a blend")
    return VLLMDiagnosis(
        model=engine.fingerprint.name,
        fingerprint=engine.fingerprint.digest,
        vllm=backend["vllm"],
        runner=backend["runner"],
        attention=backend["attention"],
        device=str(engine.device),
        dtype=str(engine.dtype).removeprefix("torch."),
        context_window=engine.context_window,
        layers=engine.num_layers,
        step_tokens=int(config.max_num_batched_tokens),
        step_sequences=int(config.max_num_seqs),
        blended=engine.gate.passed,
        reason=engine.gate.reason,
        plain_joins=None if engine.tokenizer is None else joins_are_plain(engine.tokenizer),
        gate_errors=engine.gate.errors,
        gate_limit=engine.gate.limit,
        cost=measure_blend(engine) if engine.gate.passed else None,
    )


def measure_blend(engine: VLLMEngine) -> BlendCost:
    """Time full recompute and blend of a prompt of six chunks; a short context window makes the chunks shorter."""
    place = Workbench.of(engine)
    room = engine.context_window - len(engine.header_ids) - _QUESTION_TOKENS - 1
    chunks = place.random_chunks(_CHUNKS, min(_CHUNK_TOKENS, room // _CHUNKS), seed=0)
    prompt = place.prompt(chunks, _QUESTION_TOKENS, seed=0)
    engine.precompute(chunks)
    full = [_answer(engine, prompt, BlendSettings(quality="full")) for _ in range(_RUNS)]
    _answer(engine, prompt, BlendSettings(quality="high"))  # the first blend loads code and warms caches
    before = ask_worker(engine, "cacheblend_passes")
    blends = [_answer(engine, prompt, BlendSettings(quality="high")) for _ in range(_RUNS)]
    passes = {}
    for kind, (tokens, seconds) in ask_worker(engine, "cacheblend_passes").items():
        done, took = before.get(kind, (0.0, 0.0))
        if tokens > done:
            passes[kind] = ((tokens - done) / _RUNS, (seconds - took) / _RUNS)
    times = [median([each.timings.ttft_s for each in runs]) for runs in (full, blends)]
    return BlendCost(len(prompt.token_ids), times[0], times[1], blends[-1].load_s, passes)


def _answer(engine: VLLMEngine, prompt: TokenizedPrompt, settings: BlendSettings) -> Generation:
    engine.reset_prefix_cache()
    return engine.generate(prompt, SamplingParams(max_tokens=1), settings)


def ask_worker(engine: VLLMEngine, method: str) -> Any:
    """Return the result of a method of :class:`~cacheblend_rag.engines.vllm.worker.BlendWorker` on the first rank."""
    from cacheblend_rag.engines.vllm.asking import ask_workers

    return asyncio.run_coroutine_threadsafe(ask_workers(engine.llm, method), engine.loop).result()[0]
