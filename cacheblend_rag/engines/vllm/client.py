"""Provides the client by which the server and `VLLMEngine` send requests to a vLLM with this package's connector."""

from __future__ import annotations

import asyncio
import copy
import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal
from uuid import uuid4

import torch

from cacheblend_rag.blending.controller import controlled
from cacheblend_rag.blending.costs import Costs
from cacheblend_rag.blending.gate import GateReport
from cacheblend_rag.blending.plan import BlendPlan
from cacheblend_rag.blending.profile import load_costs, log_uncalibrated
from cacheblend_rag.blending.settings import BlendSettings, FuseOptions
from cacheblend_rag.blending.static import probe_ids
from cacheblend_rag.blending.trace import DECODE, PREFILL, REST, Trace, TraceEvent
from cacheblend_rag.engines.base import Request
from cacheblend_rag.engines.entries import Entries, Ranking, chosen_ranking
from cacheblend_rag.engines.models import end_tokens
from cacheblend_rag.engines.precompute import drop_forgotten
from cacheblend_rag.engines.results import Generation, PrecomputeReport, StreamEvent, Timings, TokenLogprob, likeliest
from cacheblend_rag.engines.spans import RequestSpans
from cacheblend_rag.engines.vllm.asking import Precompute, ask_gate, vllm_sampling
from cacheblend_rag.engines.vllm.messages import BlendJob, FinishReport, read_params, read_report, to_params
from cacheblend_rag.engines.writer import WriterNotice
from cacheblend_rag.errors import CacheBlendError
from cacheblend_rag.prompts.chunk import Chunk, begins_with_space
from cacheblend_rag.prompts.prompt import TokenizedPrompt
from cacheblend_rag.prompts.registry import ChunkRegistry
from cacheblend_rag.prompts.templates import turn_ends, turn_lead
from cacheblend_rag.store import KVStore
from cacheblend_rag.store.files import DEFAULT, Namespace

if TYPE_CHECKING:
    from vllm.engine.protocol import EngineClient
    from vllm.outputs import CompletionOutput, RequestOutput

    from cacheblend_rag.engines.vllm.arguments import Launch


class BlendClient:
    """Sends prompts to a running vLLM, which blends stored KV. Runs in the event loop of vLLM's engine client.

    :class:`BlendEngine` describes the attributes and methods that both classes have.

    Attributes:
        llm: vLLM's engine client.
        store: Store that the workers read and write, opened in this process.
        costs: Costs of loading and computing, for the loading controller; the measurements of each answer correct the
            costs.
        probe: Tokens that chunks are ranked behind (:mod:`cacheblend_rag.blending.static`).
    """

    def __init__(
        self,
        llm: EngineClient,
        launch: Launch,
        store: KVStore,
        gate: GateReport,
        *,
        write_back: bool = True,
        ranking: Ranking | None = None,
    ):
        """Call :func:`connect` instead, except in an engine that subclasses this client."""
        self.llm, self.store, self.gate = llm, store, gate
        self.tokenizer, self.fingerprint, self.header_ids = launch.tokenizer, launch.fingerprint, launch.header_ids
        self.registry, self.namespace = ChunkRegistry(), DEFAULT
        self.writer, self._notice = launch.writer, WriterNotice()
        self._lead = turn_lead(launch.tokenizer) if launch.lead is None else launch.lead
        self.profile = launch.profile
        if gate.passed and not self.profile.is_calibrated:
            log_uncalibrated()
        config, model = llm.vllm_config, llm.model_config
        assert isinstance(model.dtype, torch.dtype)
        self.device, self.dtype = torch.device(config.device_config.device_type), model.dtype
        self.context_window = int(model.max_model_len)
        self.num_layers = int(model.hf_text_config.num_hidden_layers)
        self.costs = load_costs(launch.fingerprint.digest, self.device.type, "vllm")
        if gate.passed and self.costs is None:
            self.costs = Costs.of_model(gate.pass_s, gate.token_s, model.hf_text_config)
        block_size = int(config.cache_config.block_size or 0)
        cached = config.cache_config.num_gpu_blocks if config.cache_config.enable_prefix_caching else 0
        self.prefix_cache_tokens = int(cached or 0) * block_size
        self._write_back = write_back
        ranks = config.parallel_config.tensor_parallel_size
        self._entries = Entries(store, launch.fingerprint, launch.header_ids, 0, ranks, writer=launch.writer)
        self._end_tokens = end_tokens(model.hf_text_config, model.try_get_generation_config(), launch.tokenizer)
        self._background: set[asyncio.Task[Any]] = set()
        self._names = (f"cacheblend-{uuid4().hex[:8]}-{n}" for n in itertools.count())
        probe = probe_ids(self.tokenizer, int(model.get_vocab_size()), self.context_window)
        # Header and probe together fill whole blocks: vLLM's prefix cache holds only whole blocks.
        over = (len(self.header_ids) + len(probe)) % (block_size or 1)
        self.probe = probe[:-over] if 0 < over < len(probe) else probe
        behind: tuple[int, ...] = ()
        if launch.writer is not None and launch.writer.behind_probe:  # ranked against KV without the probe
            window = int(getattr(model.hf_text_config, "max_position_embeddings", None) or 1 << 20)
            behind, self.probe = probe_ids(self.tokenizer, int(model.get_vocab_size()), window), ()
        self._precompute = Precompute(llm, self.context_window, self._names, self.probe, block_size or 16, behind)
        self.ranking = chosen_ranking(ranking, self.profile.policy)

    @property
    def entries(self) -> Entries:
        """Return the model's entries in the namespace; with tensor parallelism, the shards of every rank."""
        return self._entries.within(self.namespace)

    def of(self, namespace: Namespace) -> BlendClient:
        """Return a client of the same engine in another namespace, with a separate registry and background tasks.

        Raises:
            InputError: The store is encrypted, and the namespace has no key.
        """
        self.store.key_name(namespace.name)
        other = copy.copy(self)
        other.registry, other.namespace, other._background = ChunkRegistry(), namespace, set()
        return other

    def resolve(self, settings: BlendSettings) -> FuseOptions:
        """Return the decisions about a blend; raises InputError as :meth:`ModelProfile.resolve` does."""
        return self.profile.resolve(settings, self.num_layers, self.controlled)

    @property
    def controlled(self) -> bool:
        """See :attr:`BlendEngine.controlled`."""
        return self.costs is not None and self.costs.calibrated

    def tokens_prompt(
        self,
        prompt: TokenizedPrompt,
        options: FuseOptions,
        salt: str | None = None,
        traced: bool = False,
        unasked: int = 0,
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return vLLM's prompt and the ``kv_transfer_params``, which are empty if there is nothing to blend.

        ``salt`` is the caller's own cache salt. ``traced`` requests a trace in the outcome. The last ``unasked`` tokens
        are an answer to be scored.

        Raises:
            InputError: The policy is an object that vLLM's processes cannot find by its name.
        """
        tokens: dict[str, Any] = {"prompt_token_ids": list(prompt.token_ids)}
        if (kept_apart := self.namespace.salt(salt)) is not None:
            tokens["cache_salt"] = kept_apart
        if not prompt.spans or options.reuse == "off" or not self.gate.passed:
            return tokens, {}
        spans = tuple((span.start, span.end, span.chunk.id) for span in prompt.spans)
        costs = controlled(self.costs, options)
        ends = turn_ends(prompt.token_ids, self._lead)
        job = BlendJob(spans, options, costs, traced, self.namespace, ends, unasked)
        return tokens, to_params(job)

    async def before(
        self, token_ids: Sequence[int], params: dict[str, Any], prompt: TokenizedPrompt | None = None
    ) -> None:
        """Store a prompt's missing chunks in advance if the model is ``blockwise`` (reads chunks in no other way).

        Without ``prompt``, the chunks are the registered chunks that ``params`` names.
        """
        job = read_params(params, len(token_ids)) if self.profile.blockwise and self._write_back else None
        if isinstance(job, BlendJob) and job.options.reuse == "chunks":
            await self.store_kv(self._chunks((name for _, _, name in job.spans), prompt))

    def _chunks(self, names: Iterable[str], prompt: TokenizedPrompt | None) -> list[Chunk]:
        """Return the chunks with the ids ``names`` that ``prompt`` or the registry contains."""
        known = {span.chunk.id: span.chunk for span in prompt.spans} if prompt is not None else {}
        found = (known.get(name) or self.registry.get(name) for name in names)
        return [chunk for chunk in found if chunk is not None]

    def report(
        self, params: dict[str, Any] | None, prompt_tokens: int, cached_tokens: int, completion_tokens: int, asked: bool
    ) -> FinishReport:
        """Return the report of a finished prompt, from the ``kv_transfer_params`` of vLLM's output.

        ``cached_tokens`` is vLLM's count of the tokens from its prefix cache and from blending. ``asked`` says whether
        a blend was requested.
        """
        report = read_report(params)
        if report is None:
            why = "the request ended before its prompt was planned"
            report = FinishReport(BlendPlan(prompt_tokens, (), (), why, start=cached_tokens).outcome())
        outcome, usage = report.outcome, report.outcome.usage
        reason = outcome.reason if asked else "no known chunk in the prompt"
        if not self.gate.passed:
            reason = f"this model is not blended: {self.gate.reason}"
        reused, kept = cached_tokens - usage.computed_tokens, min(cached_tokens, usage.kept_tokens)
        outcome = replace(
            outcome,
            reason=reason,
            usage=replace(
                usage,
                prompt_tokens=prompt_tokens,
                reused_tokens=reused,
                computed_tokens=prompt_tokens - reused,
                completion_tokens=completion_tokens,
                kept_tokens=kept,
                exact_tokens=min(reused, usage.exact_tokens),
            ),
            prefill_s=None
            if self.costs is None
            else self.costs.prefill_s(prompt_tokens - kept, prompt_tokens, report.cost.computed),
            fingerprint=self.fingerprint.digest,
            calibrated=self.profile.is_calibrated,
        )
        return replace(report, outcome=outcome)

    async def register(
        self, chunks: Sequence[Chunk], progress: Callable[[int], None] | None = None
    ) -> PrecomputeReport:
        """Register ``chunks``, and compute and store their KV; see :meth:`BlendEngine.precompute`."""
        self.registry.add(chunks)
        report = await self.store_kv(chunks, progress)
        await asyncio.to_thread(drop_forgotten, chunks, self.registry, self.entries)
        return report

    async def store_kv(
        self, chunks: Sequence[Chunk], progress: Callable[[int], None] | None = None
    ) -> PrecomputeReport:
        """Compute and store the KV of ``chunks`` without registering the chunks."""
        if not self.gate.passed:
            return PrecomputeReport(failed={c.id: f"not blended: {self.gate.reason}" for c in chunks})
        return await self._precompute.run(self.entries, chunks, progress, self.ranking == "now")

    async def store_own(self, chunks: Sequence[Chunk]) -> PrecomputeReport:
        """Compute and store the model's own KV of ``chunks``; see :meth:`BlendEngine.precompute_first`."""
        if self.writer is None or not self.gate.passed:
            return PrecomputeReport()
        return await self._precompute.run(self.entries.by(None), chunks, None, ranking=False)

    async def events(self, request: Request) -> AsyncIterator[StreamEvent]:
        """Yield the answer piece by piece; closing the iterator aborts the request."""
        with RequestSpans(self.namespace.name) as spans:
            async with aclosing(self._answer(request, spans)) as events:
                async for event in events:
                    yield event

    async def _answer(self, request: Request, spans: RequestSpans) -> AsyncGenerator[StreamEvent, None]:
        begin = time.perf_counter()
        prompt, sampling, options = request.prompt, request.sampling, request.options
        names = {span.chunk.id for span in prompt.spans}
        known = names - self.registry.unknown(names)
        tokens, params = self.tokens_prompt(prompt, options, traced=spans.trace is not None)
        await self.before(prompt.token_ids, params, prompt)
        wanted = vllm_sampling(sampling, params, self._end_tokens, self.tokenizer is not None, options.reuse == "off")
        text, ttft = "", 0.0
        arrived: list[tuple[float, int]] = []
        ids: list[int] = []
        logprobs: list[TokenLogprob] = []
        last: RequestOutput | None = None
        headers = self.trace_headers(spans)
        async for output in self.llm.generate(tokens, wanted, next(self._names), trace_headers=headers):  # type: ignore[arg-type]
            last = output
            piece = output.outputs[0]
            arrived.append((time.perf_counter(), len(piece.token_ids)))
            ttft = ttft or arrived[0][0] - begin
            ids.extend(piece.token_ids)
            logprobs.extend(_logprobs(piece, sampling.logprobs))
            if not text and piece.text.startswith(" ") and not begins_with_space(self.tokenizer, ids):
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
        report = self.report(
            last.kv_transfer_params, len(prompt.token_ids), last.num_cached_tokens or 0, len(ids), asked=bool(params)
        )
        if options.reuse == "off" and self.gate.passed:
            report = replace(report, outcome=replace(report.outcome, reason="reuse was switched off"))
        if spans.trace is not None:
            record(spans.trace, report, begin, arrived)
        spans.answered(report.outcome)
        gone = self.registry.unknown(known)  # chunks forgotten meanwhile must not be stored again
        self.finished(report, replace(prompt, spans=tuple(s for s in prompt.spans if s.chunk.id not in gone)))
        timings = Timings(ttft, time.perf_counter() - begin)
        finish: Literal["stop", "length"] = "length" if final.finish_reason == "length" else "stop"
        yield StreamEvent(final.text, Generation.of(report.outcome, text, ids, finish, timings, logprobs))

    def trace_headers(self, spans: RequestSpans) -> dict[str, str] | None:
        """Return headers that put vLLM's span into the request's trace; None if vLLM has no --otlp-traces-endpoint."""
        own = self.llm.vllm_config.observability_config.otlp_traces_endpoint
        return None if own is None else spans.headers

    def finished(self, report: FinishReport, prompt: TokenizedPrompt | None = None) -> None:
        """Start to precompute, in the background, the prompt's chunks that had no stored KV or no ranking.

        The report's measurements correct the loading controller's costs. Unregistered chunks are found in ``prompt``
        alone. Without ``prompt``, no chunk is registered.
        """
        if self.costs is not None:
            self.costs = self.costs.after(report.cost)
        missing, own = (
            self._chunks(each, prompt) for each in (report.outcome.missing, report.outcome.lacking("own_kv"))
        )
        if missing and self.writer is not None:
            self._in_background(asyncio.to_thread(self._notice.look, self.entries, missing))
        for store, chunks in ((self.store_kv if prompt is None else self.register, missing), (self.store_own, own)):
            if self._write_back and chunks:
                self._in_background(self._write_back_known(store, chunks) if prompt is None else store(chunks))
        if (
            self._write_back
            and self.ranking != "off"
            and (unranked := self._chunks(report.outcome.lacking("static"), prompt))
        ):
            self._in_background(self._precompute.run(self.entries, unranked, None, ranking=True))

    async def _write_back_known(
        self, store: Callable[[Sequence[Chunk]], Coroutine[Any, Any, PrecomputeReport]], chunks: Sequence[Chunk]
    ) -> None:
        """Store the KV of ``chunks``, then delete the KV of chunks that were forgotten meanwhile."""
        await store(chunks)
        await asyncio.to_thread(drop_forgotten, chunks, self.registry, self.entries)

    def _in_background(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def drain(self) -> None:
        """Wait for the tasks that :meth:`finished` started."""
        await asyncio.gather(*self._background, return_exceptions=True)


async def connect(llm: EngineClient, launch: Launch, store: KVStore, *, write_back: bool = True) -> BlendClient:
    """Return a client of the vLLM that runs in this event loop; raises as :func:`ask_gate` does."""
    return BlendClient(llm, launch, store, await ask_gate(llm, launch), write_back=write_back)


def record(trace: Trace, report: FinishReport, begin: float, arrived: Sequence[tuple[float, int]]) -> None:
    """Add to ``trace`` the events of scheduler and worker, and vLLM's own computation of each piece of the answer.

    ``arrived`` holds each piece's time of arrival, by ``time.perf_counter``, and its number of tokens.
    """
    since, name = arrived[0][0], REST if report.outcome.mode == "blend" else PREFILL
    begin = max((event.end for event in report.trace if event.kind == "computing"), default=begin)
    details = {} if report.outcome.mode == "blend" else {"tokens": report.outcome.usage.prompt_tokens}
    events = [*report.trace, TraceEvent("computing", name, begin, since, details)]
    if arrived[0][1] > 1:  # tokens that arrive as one piece have no times of their own
        events.append(TraceEvent("computing", DECODE, since, since, {"tokens": arrived[0][1] - 1}))
    for until, tokens in arrived[1:]:
        events.append(TraceEvent("computing", DECODE, since, until, {"tokens": tokens}))
        since = until
    trace.merge(events)


def _logprobs(piece: CompletionOutput, count: int | None) -> list[TokenLogprob]:
    if count is None:
        return []
    found = []
    for token, ranked in zip(piece.token_ids, piece.logprobs or (), strict=False):
        assert ranked is not None  # only a prompt's first token has None
        # vLLM adds the sampled token if that token is not among the likeliest.
        top = likeliest(((i, p.logprob) for i, p in ranked.items()), count)
        found.append(TokenLogprob(token, ranked[token].logprob, top))
    return found
