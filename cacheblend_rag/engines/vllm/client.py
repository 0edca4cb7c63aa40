"""Requests to a running vLLM whose connector is ours: used by `VLLMEngine` and by the server alike."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
import warnings
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import xxhash
from vllm import SamplingParams as VLLMSampling
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from cacheblend_rag.blending.gate import GateReport
from cacheblend_rag.blending.policies import policy
from cacheblend_rag.blending.profile import ModelProfile, load_profile
from cacheblend_rag.blending.settings import BlendSettings
from cacheblend_rag.engines.base import check_length
from cacheblend_rag.engines.entries import Entries
from cacheblend_rag.engines.results import (
    Generation,
    Mode,
    PrecomputeReport,
    StreamEvent,
    Timings,
    TokenLogprob,
    Usage,
    likeliest,
)
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.vllm.messages import PARAMS
from cacheblend_rag.errors import CacheBlendError, InputError
from cacheblend_rag.prompts.chunk import Chunk
from cacheblend_rag.prompts.prompt import TokenizedPrompt
from cacheblend_rag.prompts.registry import ChunkRegistry
from cacheblend_rag.store import KVStore

if TYPE_CHECKING:
    from vllm.engine.protocol import EngineClient
    from vllm.outputs import CompletionOutput, RequestOutput

    from cacheblend_rag.engines.vllm.arguments import Launch

# Precompute requests in flight: enough for vLLM's scheduler to fill its batches.
_IN_FLIGHT = 64
_POLL_S = 0.005


@dataclass(frozen=True)
class Outcome:
    """What became of a prompt, read from a finished request's ``kv_transfer_params``."""

    mode: Mode
    reason: str
    usage: Usage
    load_s: float = 0.0
    blend_s: float = 0.0
    loaded_bytes: int = 0
    missing: tuple[str, ...] = ()


class BlendClient:
    """A vLLM engine client and what must be known to blend with it. Lives in the event loop of that client.

    Attributes:
        llm: vLLM's engine client.
        tokenizer: The model's.
        registry: Chunks that references and plain text are resolved against.
        fingerprint: The model's identity in store keys.
        header_ids: Tokens that chunks are precomputed behind.
        store: The store that the workers read and write, as this process sees it.
        entries: The model's entries in it.
        gate: What the parity gate found in the workers.
        profile: Check layers and ratio of the model.
        context_window: Most tokens of prompt and completion together.
    """

    def __init__(
        self,
        llm: EngineClient,
        launch: Launch,
        store: KVStore,
        gate: GateReport,
        *,
        ratio: float | None = None,
        write_back: bool = True,
    ):
        """Use :meth:`connect`."""
        self.llm, self.store, self.gate = llm, store, gate
        self.tokenizer, self.fingerprint, self.header_ids = launch.tokenizer, launch.fingerprint, launch.header_ids
        self.registry = ChunkRegistry()
        self.profile: ModelProfile = load_profile(launch.fingerprint.digest, launch.directory)
        self.context_window = int(llm.model_config.max_model_len)
        self._ratio = self.profile.ratio if ratio is None else ratio
        self._write_back = write_back
        ranks = llm.vllm_config.parallel_config.tensor_parallel_size
        self.entries = Entries(store, launch.fingerprint, launch.header_ids, 0, ranks)
        self._end_tokens = _end_tokens(llm)
        self._written: dict[str, str] = {}
        self._computing: dict[tuple[int, ...], asyncio.Future[str]] = {}
        self._background: set[asyncio.Task[Any]] = set()
        self._names = (f"cacheblend-{uuid4().hex[:8]}-{n}" for n in itertools.count())

    @classmethod
    async def connect(
        cls,
        llm: EngineClient,
        launch: Launch,
        store: KVStore,
        *,
        ratio: float | None = None,
        write_back: bool = True,
    ) -> BlendClient:
        """Ask the workers for the gate's findings; warn once if the model is not blended."""
        found = (await llm.collective_rpc("cacheblend_gate"))[0]
        gate = GateReport(**found)
        if not gate.passed:
            warnings.warn(
                f"{launch.fingerprint.name} is served by ordinary prefill, without blending: {gate.reason}.",
                stacklevel=2,
            )
        return cls(llm, launch, store, gate, ratio=ratio, write_back=write_back)

    def tokens_prompt(
        self, prompt: TokenizedPrompt, settings: BlendSettings | None = None, salt: str | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return vLLM's prompt and the ``kv_transfer_params`` for it (empty: nothing to blend).

        Blended KV is approximate: the prompt gets a cache salt of everything that shapes it, so that vLLM's prefix cache
        serves it to equal blends alone and never to an exact request.

        Args:
            prompt: Token ids and chunks.
            settings: How to treat stored KV.
            salt: A salt of the caller's own, kept apart as it would be without blending.

        Raises:
            InputError: There is no such policy.
        """
        settings = settings or BlendSettings()
        tokens: dict[str, Any] = {"prompt_token_ids": list(prompt.token_ids)}
        if salt is not None:
            tokens["cache_salt"] = salt
        if not prompt.spans or settings.reuse == "nothing" or not self.gate.passed:
            return tokens, {}
        schedule = self.profile.schedule(settings.check_layers)
        job = {
            "spans": [[span.start, span.end, span.chunk.id] for span in prompt.spans],
            "ratio": self._ratio if settings.ratio is None else settings.ratio,
            "policy": settings.policy,
            "check_layers": list(schedule.check_layers),
            "widths": list(schedule.widths),
            "reuse": settings.reuse,
        }
        tokens["cache_salt"] = _salt(job, salt)
        return tokens, {PARAMS: job}

    def outcome(
        self, params: dict[str, Any] | None, prompt_tokens: int, cached_tokens: int, completion_tokens: int, asked: bool
    ) -> Outcome:
        """Say what became of a prompt.

        Args:
            params: ``kv_transfer_params`` of vLLM's finished output.
            prompt_tokens: Tokens in the prompt.
            cached_tokens: vLLM's ``num_cached_tokens``: from its prefix cache and from blending.
            completion_tokens: Tokens generated.
            asked: Whether blending was asked for.
        """
        ours = (params or {}).get(PARAMS) or {}
        recomputed = int(ours.get("recomputed", 0))
        reused = cached_tokens
        if "computed" in ours:
            reused = cached_tokens - int(ours["computed"])
        blended = bool(ours.get("end"))
        if not self.gate.passed:
            reason = f"this model is not blended: {self.gate.reason}"
        elif asked:
            reason = str(ours.get("reason", "the request ended before its prompt was planned"))
        else:
            reason = "no known chunk in the prompt"
        usage = Usage(prompt_tokens, reused, recomputed, prompt_tokens - reused, completion_tokens)
        return Outcome(
            "blend" if blended else "prefill",
            reason,
            usage,
            float(ours.get("load_s", 0.0)),
            float(ours.get("blend_s", 0.0)),
            int(ours.get("loaded_bytes", 0)),
            tuple(ours.get("missing", ())),
        )

    async def precompute(
        self, chunks: Sequence[Chunk], progress: Callable[[int], None] | None = None
    ) -> PrecomputeReport:
        """See :meth:`BlendEngine.precompute`; ordinary requests, batched by vLLM's scheduler."""
        begin = time.perf_counter()
        self.registry.add(chunks)
        if not self.gate.passed:
            return PrecomputeReport(failed={c.id: f"not blended: {self.gate.reason}" for c in chunks})
        failed = {c.id: "it has no tokens" for c in chunks if not c.token_ids}
        wanted: dict[tuple[int, ...], str] = {}
        present = 0
        for chunk in chunks:
            if not chunk.token_ids or chunk.token_ids in wanted:
                continue
            if self.entries.contains(chunk.token_ids):
                present += 1
            elif len(self.header_ids) + len(chunk.token_ids) >= self.context_window:
                failed[chunk.id] = "it does not fit the model's context window"
            else:
                wanted[chunk.token_ids] = chunk.id
        if progress is not None and len(chunks) > len(wanted):
            progress(len(chunks) - len(wanted))
        jobs = list(wanted)
        if self.header_ids and chunks and not self.entries.contains(()):
            jobs.insert(0, ())
        slots = asyncio.Semaphore(_IN_FLIGHT)

        async def one(token_ids: tuple[int, ...]) -> None:
            async with slots:
                why = await self._precompute_one(token_ids)
            if not token_ids:
                return
            if why:
                failed[wanted[token_ids]] = why
            if progress is not None:
                progress(1)

        async with asyncio.TaskGroup() as group:
            for token_ids in jobs:
                group.create_task(one(token_ids))
        computed = sum(name not in failed for name in wanted.values())
        return PrecomputeReport(computed, present, sum(map(len, jobs)), time.perf_counter() - begin, failed)

    async def _precompute_one(self, token_ids: tuple[int, ...]) -> str:
        """Compute one entry, once however many ask for it; return why it is not in the store, or an empty string."""
        running = self._computing.get(token_ids)
        if running is None:
            running = self._computing[token_ids] = asyncio.ensure_future(self._compute(token_ids))
            running.add_done_callback(lambda _: self._computing.pop(token_ids, None))
        return await asyncio.shield(running)  # one caller that goes away does not end it for the others

    async def _compute(self, token_ids: tuple[int, ...]) -> str:
        header = self.header_ids
        prompt = {"prompt_token_ids": [*header, *token_ids]}
        save = {PARAMS: {"save": len(header) if token_ids else 0}}
        sampling = VLLMSampling(max_tokens=1, temperature=0, detokenize=False, extra_args={"kv_transfer_params": save})
        last: RequestOutput | None = None
        async for output in self.llm.generate(prompt, sampling, next(self._names)):  # type: ignore[arg-type]
            last = output
        if last is None or last.outputs[0].finish_reason not in {"length", "stop"}:
            return "vLLM ended its request before its KV was complete"
        keys = [str(key) for key in self.entries.written_keys(token_ids)]
        pause = 0.0
        while not all(key in self._written for key in keys):
            await asyncio.sleep(pause)
            for rank in await self.llm.collective_rpc("cacheblend_written"):
                self._written.update(rank)
            pause = _POLL_S
        return next(filter(None, [self._written.pop(key) for key in keys]), "")

    async def stream(
        self, prompt: TokenizedPrompt, sampling: SamplingParams | None = None, settings: BlendSettings | None = None
    ) -> AsyncIterator[StreamEvent]:
        """See :meth:`BlendEngine.astream`; closing the iterator aborts the request.

        Raises:
            PromptTooLongError: Prompt and ``max_tokens`` exceed the context window.
        """
        begin = time.perf_counter()
        sampling, settings = sampling or SamplingParams(), settings or BlendSettings()
        self.check(prompt, sampling, settings)
        tokens, params = self.tokens_prompt(prompt, settings)
        wanted = self._sampling(sampling, settings, params)
        text, ttft = "", 0.0
        ids: list[int] = []
        logprobs: list[TokenLogprob] = []
        last: RequestOutput | None = None
        async for output in self.llm.generate(tokens, wanted, next(self._names)):  # type: ignore[arg-type]
            ttft = ttft or time.perf_counter() - begin
            last = output
            piece = output.outputs[0]
            ids.extend(piece.token_ids)
            logprobs.extend(_logprobs(piece, sampling.logprobs))
            if not text and piece.text.startswith(" ") and not self._begins_with_space(ids):
                piece.text = piece.text[1:]
            text += piece.text
            if output.finished:
                break
            if piece.text or self.tokenizer is None:
                yield StreamEvent(piece.text)
        assert last is not None
        final = last.outputs[0]
        if final.finish_reason == "error":
            raise CacheBlendError("vLLM ended the request with an error; its log says why.")
        while ids and ids[-1] in self._end_tokens:
            ids.pop()
        outcome = self.outcome(
            last.kv_transfer_params, len(prompt.token_ids), last.num_cached_tokens or 0, len(ids), asked=bool(params)
        )
        reason = "reuse was switched off" if settings.reuse == "nothing" and self.gate.passed else outcome.reason
        self.finished(outcome, prompt)
        yield StreamEvent(
            final.text,
            Generation(
                text=text,
                token_ids=tuple(ids),
                finish_reason="length" if final.finish_reason == "length" else "stop",
                mode=outcome.mode,
                reason=reason,
                usage=outcome.usage,
                timings=Timings(outcome.load_s, ttft, time.perf_counter() - begin),
                missing=outcome.missing,
                logprobs=tuple(logprobs[: len(ids)]),
            ),
        )

    def _begins_with_space(self, ids: Sequence[int]) -> bool:
        """Say whether an answer of these tokens begins with a space by itself, as every engine decodes it.

        vLLM decodes it behind the prompt's last token, where some tokenizers turn their word boundary into a space.
        """
        return bool(self.tokenizer.decode(list(ids), skip_special_tokens=True).startswith(" "))

    def finished(self, outcome: Outcome, prompt: TokenizedPrompt | None = None) -> None:
        """After an answer: chunks that had no stored KV are precomputed in the background, for the next one.

        Chunks that are not registered are known from ``prompt`` alone.
        """
        known = {span.chunk.id: span.chunk for span in prompt.spans} if prompt is not None else {}
        found = (known.get(name) or self.registry.get(name) for name in outcome.missing)
        missing = [chunk for chunk in found if chunk is not None]
        if self._write_back and missing:
            task = asyncio.ensure_future(self.precompute(missing))
            self._background.add(task)
            task.add_done_callback(self._background.discard)

    async def drain(self) -> None:
        """Wait for what :meth:`finished` started."""
        await asyncio.gather(*self._background, return_exceptions=True)

    def check(self, prompt: TokenizedPrompt, sampling: SamplingParams, settings: BlendSettings) -> None:
        """Refuse what cannot be served, before anything is sent.

        Raises:
            PromptTooLongError: Prompt and ``max_tokens`` exceed the context window, or there is no prompt.
            InputError: There is no such policy.
        """
        policy(settings.policy)
        check_length(len(prompt.token_ids), sampling.max_tokens, self.context_window)

    def _sampling(self, sampling: SamplingParams, settings: BlendSettings, params: dict[str, Any]) -> VLLMSampling:
        schema = getattr(sampling, "json_schema", None)
        if isinstance(schema, str):
            try:
                json.loads(schema)
            except ValueError as error:
                raise InputError(f"json_schema is not JSON: {error}") from error
        return VLLMSampling(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            seed=sampling.seed,
            stop=list(sampling.stop),
            detokenize=self.tokenizer is not None,
            structured_outputs=None if schema is None else StructuredOutputsParams(json=schema),
            # The full prefill is the reference: it must not be served from the prefix cache.
            skip_reading_prefix_cache=True if settings.reuse == "nothing" else None,
            output_kind=RequestOutputKind.DELTA,
            logprobs=sampling.logprobs,
            extra_args={"kv_transfer_params": params} if params else None,
        )


def _salt(job: dict[str, Any], salt: str | None) -> str:
    kept = {**job, "spans": [[a, b] for a, b, _ in job["spans"]]}
    text = json.dumps([kept, salt], sort_keys=True)
    return f"cacheblend-{xxhash.xxh3_128_hexdigest(text.encode())}"


def _logprobs(piece: CompletionOutput, count: int | None) -> list[TokenLogprob]:
    if count is None:
        return []
    found = []
    for token, ranked in zip(piece.token_ids, piece.logprobs or (), strict=False):
        assert ranked is not None  # as it is for a prompt's first token alone
        # vLLM adds the token itself where it is not among the likeliest.
        top = likeliest(((i, p.logprob) for i, p in ranked.items()), count)
        found.append(TokenLogprob(token, ranked[token].logprob, top))
    return found


def _end_tokens(llm: EngineClient) -> frozenset[int]:
    config = llm.model_config
    found: set[int] = set()
    for value in (
        config.try_get_generation_config().get("eos_token_id"),
        getattr(config.hf_text_config, "eos_token_id", None),
    ):
        found.update(value if isinstance(value, (list, tuple)) else [] if value is None else [value])
    return frozenset(found)
