"""Shows vLLM's handlers an engine that blends: every prompt of every route passes here."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.sampling_params import RequestOutputKind, SamplingParams

from cacheblend_rag.engines.spans import RequestSpans, reuse_attributes
from cacheblend_rag.server.reporting import Ticket, clients_salt, take_ticket
from cacheblend_rag.server.tenants import PerNamespace, Served, calling
from cacheblend_rag.store.namespace import Namespace

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

    from cacheblend_rag.engines.vllm.client import BlendClient
    from cacheblend_rag.engines.vllm.messages import FinishReport
    from cacheblend_rag.server.observing import ReuseMetrics


_log = logging.getLogger("vllm.cacheblend.requests")


class ServedEngine:
    """Stands in for an ``AsyncLLM``; what it does not know itself, that one does.

    It runs a prompt with what its ticket says, and with nothing else: ``kv_transfer_params`` that came from a client would let
    it store KV under names of its choice, and its ``cache_salt`` must not meet that of another namespace.
    """

    def __init__(self, llm: AsyncLLM, served: PerNamespace[Served], metrics: ReuseMetrics):
        self._llm, self._served, self._metrics = llm, served, metrics

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run a prompt; see vLLM's method of that name."""
        client = self._served.current.client
        prompt, ticket = take_ticket(prompt)
        extra = {k: v for k, v in (sampling_params.extra_args or {}).items() if k != "kv_transfer_params"}
        ticket = ticket or Ticket(reason="this route is served by ordinary prefill")
        if ticket.params:
            extra["kv_transfer_params"] = ticket.params
            await client.before(prompt["prompt_token_ids"], ticket.params)
        else:
            prompt = _with_own_salt(prompt, client.namespace)
        sampling_params.extra_args = extra or None
        if ticket.exact:
            sampling_params.skip_reading_prefix_cache = True
        caller = calling.get()
        whole = caller.admission.counts and sampling_params.output_kind is RequestOutputKind.FINAL_ONLY
        if whole:  # what is given up before its end is charged, too
            sampling_params.output_kind = RequestOutputKind.CUMULATIVE
        with RequestSpans(None, client.namespace.name) as spans:
            begin, options["trace_headers"] = time.perf_counter(), client.trace_headers(spans)
            outputs, used = (
                self._llm.generate(prompt, sampling_params, request_id, **options),
                TokensUsed(prompt, sampling_params),
            )
            caller.charge_prompt(used.due())
            try:
                async for output in outputs:
                    used.see(output)
                    caller.admission.charge(used.due())
                    report = self._account(output, ticket, client, used.answered)
                    if report is not None:
                        _tell(spans, report, output, begin)
                    if output.finished and whole:
                        output.outputs = used.pieces
                    if output.finished or not whole:
                        yield output
            finally:
                await outputs.aclose()

    def _account(
        self, output: RequestOutput, ticket: Ticket, client: BlendClient, completion_tokens: int
    ) -> FinishReport | None:
        """Report what became of a prompt that is finished, and count it; None of another."""
        if not output.finished:
            if ticket.params:
                output.num_cached_tokens = None  # vLLM counts every token of a blend, the recomputed ones too
            return None
        prompt_tokens = len(output.prompt_token_ids or ())
        report = client.report(
            output.kv_transfer_params,
            prompt_tokens,
            output.num_cached_tokens or 0,
            completion_tokens,
            asked=bool(ticket.params),
        )
        if ticket.reason and client.gate.passed:
            report = replace(report, outcome=replace(report.outcome, reason=ticket.reason))
        ticket.outcome = report.outcome
        output.kv_transfer_params, output.num_cached_tokens = None, report.outcome.usage.reused_tokens
        first_token_s = output.metrics.first_token_latency if output.metrics else None
        self._metrics.finished(report.outcome, client.namespace.name, first_token_s, report.out)
        client.finished(report)
        return report

    async def notify_kv_transfer_request_rejected(self, *_: Any, **__: Any) -> None:
        """Ignore vLLM's hand-over between prefill and decode servers: this connector has none, and clients may not ask."""


def _tell(spans: RequestSpans, report: FinishReport, output: RequestOutput, begin: float) -> None:
    """Tell a request's spans and the log what became of its prompt."""
    from cacheblend_rag.engines.vllm.client import record

    outcome, usage, metrics = report.outcome, report.outcome.usage, output.metrics
    if spans.trace is not None:
        arrived = [(time.perf_counter(), usage.completion_tokens)]
        # vLLM tells an answer as a whole, unless it is streamed.
        if metrics is not None and metrics.first_token_latency:
            first = begin + metrics.first_token_latency
            last = first + metrics.last_token_ts - metrics.first_token_ts
            arrived = [(first, 1), (last, usage.completion_tokens - 1)]
        record(spans.trace, report, begin, arrived)
    spans.answered(outcome)
    said = (outcome.mode, usage.reused_tokens, usage.prompt_tokens, outcome.reason)
    _log.info("%s: %d of %d prompt tokens reused; %s", *said, extra=reuse_attributes(outcome))


class TokensUsed:
    """Counts the tokens of a request, however far it comes: its prompt's and those of its answers.

    A prompt whose logprobs are asked for counts once more for each answer: each computes it anew, with its logits.
    """

    def __init__(self, prompt: Any, sampling_params: SamplingParams):
        """Begin to count for ``prompt``, whose length vLLM tells where it is not given as token ids."""
        self._adds_up = sampling_params.output_kind is RequestOutputKind.DELTA
        self._weight = 1 if sampling_params.prompt_logprobs is None else 1 + sampling_params.n
        self._prompt = len(prompt.get("prompt_token_ids") or ()) if isinstance(prompt, Mapping) else 0
        self._answers: Counter[int] = Counter()
        self._pieces: dict[int, CompletionOutput] = {}
        self._told = 0

    def see(self, output: RequestOutput) -> None:
        """Take note of what the engine puts out."""
        self._prompt = len(output.prompt_token_ids or ()) or self._prompt
        for piece in output.outputs:
            before = self._answers[piece.index] if self._adds_up else 0
            self._answers[piece.index] = before + len(piece.token_ids)
            self._pieces[piece.index] = piece

    @property
    def pieces(self) -> list[CompletionOutput]:
        """Return the last that came of each answer."""
        return [self._pieces[index] for index in sorted(self._pieces)]

    @property
    def answered(self) -> int:
        """Return how many its answers have, of which a stream's last output has the last piece alone."""
        return self._answers.total()

    def due(self) -> int:
        """Return how many there are that this has not returned before."""
        before, self._told = self._told, self._weight * self._prompt + self.answered
        return self._told - before


def _with_own_salt(prompt: Any, namespace: Namespace) -> Any:
    """Return a prompt whose salt is its namespace's, and can never be another one's, whatever a client gave."""
    salt = namespace.salt(clients_salt(prompt.get("cache_salt") if isinstance(prompt, Mapping) else None))
    if salt is None:
        return prompt
    if isinstance(prompt, Mapping) and "decoder_prompt" in prompt:
        # vLLM looks for the salt there.
        return {**prompt, "decoder_prompt": {**prompt["decoder_prompt"], "cache_salt": salt}}
    return {**_tokens_of(prompt), "cache_salt": salt}


def _tokens_of(prompt: Any) -> Mapping[str, Any]:
    """Return a prompt as a mapping, which can take a salt."""
    if isinstance(prompt, Mapping):
        return prompt
    if isinstance(prompt, str):
        return {"prompt": prompt}
    return {"prompt_token_ids": list(prompt)}
