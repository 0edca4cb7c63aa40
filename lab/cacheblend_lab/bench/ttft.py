"""Measures time to first token of one RAG prompt by full recompute, prefix caching, full KV reuse and blend."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from cacheblend_lab.bench.workbench import blend_by, name_methods
from cacheblend_lab.measure import PeakMemory, check_positive, count_rounds, take_turns
from cacheblend_lab.policies import rank_for
from cacheblend_lab.workbench import Workbench
from cacheblend_rag.blending.settings import BlendSettings
from cacheblend_rag.calibrate.measure import drop_page_cache
from cacheblend_rag.calibrate.rounding import own_attention
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.errors import InputError
from cacheblend_rag.prompts.prompt import TokenizedPrompt

_PLAIN, _READ = "plain transformers", "plain read"


@dataclass(frozen=True)
class TTFTSettings:
    """Holds the settings of the prompt, the blend and the measurement."""

    chunks: int = 6
    chunk_tokens: int = 512
    question_tokens: int = 32
    ratio: float | None = None
    policy: str | None = None
    check_layers: tuple[int, ...] | None = None
    repeat: int = 3
    cold: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise InputError for a size below 1."""
        check_positive(self, "chunks", "chunk_tokens", "question_tokens", "repeat")


@dataclass
class _Method:
    settings: BlendSettings
    ttft_s: list[float] = field(default_factory=list)
    load_s: list[float] = field(default_factory=list)
    computed_tokens: int = 0
    reused_tokens: int = 0
    peak_memory_bytes: int | None = None

    def result(self) -> dict[str, Any]:
        found = asdict(self)
        del found["settings"]
        return found


def bench_ttft(
    place: Workbench, settings: TTFTSettings, progress: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Measure, and return plain data for JSON.

    ``methods`` has for each of full, prefix, reuse and blend the ``ttft_s`` and ``load_s`` (seconds waited for stored
    KV) of every timed round, ``computed_tokens``, ``reused_tokens`` and ``peak_memory_bytes`` (of the process, weights
    and stored KV included; on CUDA of torch's allocator). ``cold_read``, with a cold page cache, is a plain read of the
    same files.

    One warm-up round, which also measures peak memory, comes before ``repeat`` timed rounds. A round runs every method
    once, and each round starts with another method, so that a busy or throttling machine slows all methods alike. On
    the transformers engine a plain ``model(ids)`` is measured as well, to check that the full prefill is no slow
    baseline. On vLLM full recompute is vLLM's own prefill.

    Raises:
        InputError: A cold page cache is requested, but the KV is in RAM.
    """
    if settings.cold and place.kv != "disk":
        raise InputError("A cold page cache needs the KV on disk; give --kv disk with --cold.")
    say = progress or (lambda line: None)
    engine = place.engine
    chunks = place.random_chunks(settings.chunks, settings.chunk_tokens, settings.seed)
    prompt = place.prompt(chunks, settings.question_tokens, settings.seed)
    blend = blend_by(settings.ratio, settings.policy, settings.check_layers)
    methods = {name: _Method(how) for name, how in name_methods(blend).items()}
    say("computing the chunks' KV")
    rank_for(engine, blend)
    engine.precompute(chunks)
    bench = _Bench(place, prompt, methods, settings.cold)
    for number, name in count_rounds(settings.repeat):
        say(name)
        bench.run_round(number)
    options = engine.profile.resolve(blend, engine.num_layers, engine.controlled)
    head = place.head(
        settings,
        check_layers=options.check_layers,
        widths=options.widths,
        warmup_rounds=1,
        prompt_tokens=len(prompt.token_ids),
    )
    return {**head, **bench.sum_up()}


class _Bench:
    def __init__(self, place: Workbench, prompt: TokenizedPrompt, methods: dict[str, _Method], cold: bool):
        self._place, self._prompt, self._methods = place, prompt, methods
        self._memory = PeakMemory(place.device)
        self._cold = cold
        self._files = place.files() if cold else []
        self._plain_s: list[float] = []
        self._plain_peak: int | None = None
        self._read_s: list[float] = []

    def run_round(self, number: int) -> None:
        """Run every method once; round 0 measures peak memory, later rounds measure time."""
        timed = number > 0
        plain = [_PLAIN] if self._place.model is not None else []
        for name in take_turns([*self._methods, *plain, *([_READ] if self._files else [])], number):
            drop_page_cache(self._files)
            self._place.forget()
            if not timed:
                self._memory.restart()
            if name == _PLAIN:
                seconds = self._plain_prefill()
                if timed:
                    self._plain_s.append(seconds)
                else:
                    self._plain_peak = self._memory.nbytes()
            elif name == _READ:
                if timed:
                    self._read_s.append(_plain_read(self._files))
            else:
                self._run(self._methods[name], timed)

    def sum_up(self) -> dict[str, Any]:
        """Return the results of all rounds, as plain data for JSON."""
        full, store = median(self._methods["full"].ttft_s), self._place.engine.store
        result: dict[str, Any] = {
            "methods": {name: method.result() for name, method in self._methods.items()},
            "speedup_blend_vs_full": full / median(self._methods["blend"].ttft_s),
            "chunk_kv_bytes": sum(entry.nbytes for entry in store.entries()),
        }
        if self._place.model is not None:
            result["plain_transformers"] = {"ttft_s": self._plain_s, "peak_memory_bytes": self._plain_peak}
            result["full_vs_plain_transformers"] = full / median(self._plain_s)
        if self._cold:
            result["cold_read"] = self._sum_up_reads(full)
        return result

    def _sum_up_reads(self, full_s: float) -> dict[str, Any]:
        nbytes = sum(file.stat().st_size for file in self._files)
        read = median(self._read_s)
        return {
            "bytes": nbytes,
            "read_s": self._read_s,
            "bytes_per_s": nbytes / read,
            "speedup_if_reading_were_all": full_s / read,
        }

    def _run(self, method: _Method, timed: bool) -> None:
        *_, last = self._place.engine.stream(self._prompt, SamplingParams(max_tokens=1), method.settings)
        generation = last.generation
        assert generation is not None
        method.computed_tokens = generation.usage.computed_tokens
        method.reused_tokens = generation.usage.reused_tokens
        if timed:
            method.ttft_s.append(generation.timings.ttft_s)
            method.load_s.append(generation.load_s)
        elif self._place.model is not None:  # other engines compute in processes of their own
            method.peak_memory_bytes = self._memory.nbytes()

    @torch.inference_mode()
    def _plain_prefill(self) -> float:
        model = self._place.model
        with own_attention(model):
            begin = time.perf_counter()
            ids = torch.tensor([self._prompt.token_ids], device=self._place.device)
            int(model(input_ids=ids, use_cache=True, logits_to_keep=1).logits[0, -1].argmax())
            return time.perf_counter() - begin


def _plain_read(files: list[Path]) -> float:
    begin = time.perf_counter()
    for file in files:
        with file.open("rb", buffering=0) as handle:
            handle.read()
    return time.perf_counter() - begin
