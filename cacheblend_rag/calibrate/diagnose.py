"""Diagnoses a model for `cacheblend doctor`: whether and how the model is blended, and how long a blend takes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from cacheblend_rag.blending.costs import Costs
from cacheblend_rag.blending.gate import CODEC_LIMIT, check_codecs
from cacheblend_rag.blending.settings import BlendSettings
from cacheblend_rag.calibrate.costs import (
    CHUNK_TOKENS,
    CHUNKS,
    QUESTION_TOKENS,
    estimate,
    measure_compute,
    measure_disk,
    measure_ram,
    typical_load,
)
from cacheblend_rag.calibrate.measure import describe_machine, prompt_of, random_chunks, random_ids, vocab_size
from cacheblend_rag.engines.results import Generation
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.prompts.chunk import make_chunk
from cacheblend_rag.prompts.placing import text_of
from cacheblend_rag.prompts.prompt import BlendPrompt, ChunkRef, TokenizedPrompt, rag_prompt, tokenize
from cacheblend_rag.prompts.registry import ChunkRegistry
from cacheblend_rag.store.codec import LOSSY
from cacheblend_rag.store.identity import dtype_name

if TYPE_CHECKING:
    from cacheblend_rag.engines.vllm import VLLMEngine

_RUNS = 3


def diagnose(
    engine: TransformersEngine, store: Path | None = None, progress: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Examine a loaded model, and return what `doctor --json` prints.

    ``codecs`` has, for each KV codec that changes numbers, the KL in nats by which it moves the model's predictions;
    ``codec_limit`` nats are allowed. Tiers and estimates are those of RAM and of the store's disk, if there is one.

    Args:
        engine: The model; its parity gate has run.
        store: Directory of a store whose disk is measured.
        progress: Called with a line of text before each step.
    """
    say = progress or (lambda line: None)
    say("bandwidths")
    tiers = {"ram": measure_ram(engine.device)}
    if store is not None and store.is_dir() and (disk := measure_disk(store)) is not None:
        tiers["disk"] = disk
    say("computing")
    costs = Costs(engine.num_layers, measure_compute(engine), tiers)
    load, profile = typical_load(engine), engine.profile
    codecs: dict[str, float] = {}
    if engine.gate.passed and engine.rope is not None:
        codecs = check_codecs(engine.subject(), engine.rope, [LOSSY])
    return {
        **_model_facts(engine),
        "codecs": codecs,
        "codec_limit": CODEC_LIMIT,
        "policy": profile.policy,
        "ratio": profile.ratio,
        "reuse": profile.reuse,
        "check_layers": profile.check_layers,
        "widths": profile.widths,
        "profile_origin": f"{profile.origin or 'defaults'}{'' if profile.is_calibrated else ', not calibrated'}",
        "writer": None if engine.writer is None else engine.writer.directory,
        "calibrated": profile.calibrated,
        "kv_bytes_per_token": None if load is None else load.spans[0].nbytes // CHUNK_TOKENS,
        "compute": asdict(costs.compute),
        "tiers": {tier: asdict(cost) for tier, cost in costs.tiers.items()},
        "estimates": {} if load is None else {tier: asdict(each) for tier, each in estimate(load, costs).items()},
        "machine": describe_machine(engine.device),
    }


def diagnose_vllm(engine: VLLMEngine, progress: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Examine a running vLLM, and return what `doctor --engine vllm --json` prints.

    ``step_sequences`` is the maximum number of sequences in an engine step, and of runs of neighbouring tokens in a
    blend's pass. ``cost`` is that of :func:`measure_blend`.
    """
    say = progress or (lambda line: None)
    config = engine.llm.vllm_config.scheduler_config
    backend = ask_worker(engine, "cacheblend_backend")
    say("a blend")
    return {
        **_model_facts(engine),
        **{name: backend[name] for name in ("vllm", "runner", "attention")},
        "step_tokens": int(config.max_num_batched_tokens),
        "step_sequences": int(config.max_num_seqs),
        "cost": measure_blend(engine) if engine.gate.passed else None,
    }


def _model_facts(engine: TransformersEngine | VLLMEngine) -> dict[str, Any]:
    return {
        "model": engine.fingerprint.name,
        "fingerprint": engine.fingerprint.digest,
        "device": str(engine.device),
        "dtype": dtype_name(engine.dtype),
        "context_window": engine.context_window,
        "layers": engine.num_layers,
        "blended": engine.gate.passed,
        "reason": engine.gate.reason,
        "plain_joins": None if engine.tokenizer is None else joins_are_plain(engine.tokenizer),
        "gate_errors": engine.gate.errors,
        "gate_limit": engine.gate.limit,
    }


def joins_are_plain(tokenizer: Any) -> bool:
    """Return whether a RAG prompt has the tokens of its text in one piece, for chunks with various edges."""
    texts = (
        "Letters at the end",
        "A full stop.",
        "42 is in 1999",
        "- one\n- (two)",
        "# Title\n\n“Quoted?”",
        "x = {1: 'y'}",
    )
    chunks = [make_chunk(text, tokenizer) for text in texts]
    prompt = rag_prompt(tokenizer, chunks, "Is it so?")
    whole = "".join(text_of(piece) for piece in prompt.segments if not isinstance(piece, ChunkRef))
    apart, together = (tokenize(each, tokenizer, ChunkRegistry()) for each in (prompt, BlendPrompt((whole,))))
    return apart.token_ids == together.token_ids


def measure_blend(engine: VLLMEngine) -> dict[str, Any]:
    """Time full recompute and blend of a prompt of six chunks of random tokens; a short context window makes the chunks shorter.

    Returns:
        ``prompt_tokens``; medians of the time to first token of full recompute (``full_s``) and of a blend by the
        profile with stored KV (``blend_s``); ``load_s``, the seconds that the last of the blends waited for stored KV;
        and ``passes``: tokens (times the share of layers they went through) and seconds of each kind of pass, as means
        per blend.
    """
    vocabulary = vocab_size(engine)
    room = engine.context_window - len(engine.header_ids) - QUESTION_TOKENS - 1
    chunks = random_chunks(vocabulary, CHUNKS, min(CHUNK_TOKENS, room // CHUNKS), seed=0)
    prompt = prompt_of(engine.header_ids, chunks, random_ids(vocabulary, QUESTION_TOKENS, seed=1))
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
    full_s, blend_s = (median([each.timings.ttft_s for each in runs]) for runs in (full, blends))
    times = {"full_s": full_s, "blend_s": blend_s, "load_s": blends[-1].load_s}
    return {"prompt_tokens": len(prompt.token_ids), **times, "passes": passes}


def _answer(engine: VLLMEngine, prompt: TokenizedPrompt, settings: BlendSettings) -> Generation:
    engine.reset_prefix_cache()
    return engine.generate(prompt, SamplingParams(max_tokens=1), settings)


def ask_worker(engine: VLLMEngine, method: str) -> Any:
    """Return the result of a method of :class:`~cacheblend_rag.engines.vllm.worker.BlendWorker` on the first rank."""
    from cacheblend_rag.engines.vllm.asking import ask_workers

    return asyncio.run_coroutine_threadsafe(ask_workers(engine.llm, method), engine.loop).result()[0]
