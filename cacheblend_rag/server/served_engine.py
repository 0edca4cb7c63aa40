"""Stands in for vLLM's engine and its handlers: every prompt of every route passes here, with its plan, and is reported."""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.v1.engine.exceptions import EngineDeadError

from cacheblend_rag.blending.outcome import PromptOutcome
from cacheblend_rag.engines.spans import RequestSpans, reuse_attributes
from cacheblend_rag.errors import InputError
from cacheblend_rag.server.keys import MOST_LIMITED, PER_FORMAT, PER_LIMITED, Quota
from cacheblend_rag.server.tenants import PerNamespace, Served, calling
from cacheblend_rag.store.files import Namespace

if TYPE_CHECKING:
    from vllm.inputs import EngineInput
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

    from cacheblend_rag.engines.vllm.client import BlendClient
    from cacheblend_rag.engines.vllm.messages import FinishReport
    from cacheblend_rag.server.observing import ReuseMetrics


KEY = "cacheblend_ticket"
"""Where an engine input holds its ticket. vLLM builds engine inputs field by field, so no client can put one there."""

REQUEST_FIELD = "cacheblend_tickets"
"""Where a request object holds the tickets of its prompts."""


@dataclass
class Ticket:
    """One prompt's way through the server.

    Attributes:
        params: The ``kv_transfer_params`` to run it with; empty for an ordinary prefill.
        exact: Whether not even vLLM's prefix cache is to be read.
        reason: Why nothing is to be blended, if so; empty leaves it to the engine to say.
        outcome: What became of it, once it is finished.
    """

    params: dict[str, Any] = field(default_factory=dict)
    exact: bool = False
    reason: str = ""
    outcome: PromptOutcome | None = None


def with_ticket(engine_input: Mapping[str, Any], ticket: Ticket) -> EngineInput:
    """Return the engine input with a ticket."""
    return cast("EngineInput", {**engine_input, KEY: ticket})


def take_ticket(engine_input: Any) -> tuple[Any, Ticket | None]:
    """Return the engine input as vLLM knows it, and its ticket."""
    if not isinstance(engine_input, Mapping) or not isinstance(engine_input.get(KEY), Ticket):
        return engine_input, None
    rest = {name: value for name, value in engine_input.items() if name != KEY}
    return rest, engine_input[KEY]


def clients_salt(given: str | None) -> str | None:
    """Return a client's ``cache_salt`` as one that can be no namespace's own."""
    return None if given is None else f"client:{given}"


@contextmanager
def refused(parameter: str | None = None) -> Iterator[None]:
    """Raise our errors about what a request asks for as vLLM's, which its handlers answer."""
    try:
        yield
    except InputError as error:
        raise VLLMValidationError(str(error), parameter=parameter) from error


class ReportingHandler:
    """Stands in for vLLM's handler of chats, or of completions."""

    def __init__(self, handler: Any):
        self._handler = handler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handler, name)

    async def create_chat_completion(self, request: Any, raw_request: Any = None) -> Any:
        """Answer a chat; see vLLM's method of that name."""
        return reported(request, await self._handler.create_chat_completion(request, raw_request))

    async def create_completion(self, request: Any, raw_request: Any = None) -> Any:
        """Complete prompts; see vLLM's method of that name."""
        return reported(request, await self._handler.create_completion(request, raw_request))


def reported(request: Any, answer: Any) -> Any:
    """Return a handler's answer with reports in its usage: one report, or a list of them for several prompts."""
    if isinstance(answer, AsyncGenerator):
        return _reported_stream(request, answer)
    usage = getattr(answer, "usage", None)
    reports = _reports(request)
    if usage is not None and reports:
        fields = usage.model_dump(exclude_none=True)
        _add(fields, reports)
        # A class of vLLM's that takes fields it does not know, as OpenAI's clients do.
        answer.usage = type(usage)(**fields)
    return answer


async def _reported_stream(request: Any, pieces: AsyncIterator[str]) -> AsyncIterator[str]:
    async for piece in pieces:
        # The piece with the usage has no choices; all others pass unread.
        if '"usage"' in piece and piece.startswith("data: {") and (reports := _reports(request)):
            data = json.loads(piece.removeprefix("data: "))
            if not data.get("choices") and data.get("usage"):
                _add(data["usage"], reports)
                yield f"data: {json.dumps(data, ensure_ascii=False)}\n\n"
                continue
        yield piece


def _reports(request: Any) -> list[PromptOutcome]:
    tickets = getattr(request, REQUEST_FIELD, None) or []
    return [ticket.outcome for ticket in tickets if ticket.outcome is not None]


def _add(usage: dict[str, Any], reports: list[PromptOutcome]) -> None:
    details = dict(usage.get("prompt_tokens_details") or {})
    details["cached_tokens"] = sum(report.usage.reused_tokens for report in reports)
    usage["prompt_tokens_details"] = details
    shown = [report.to_params() for report in reports]
    usage["cacheblend"] = shown[0] if len(shown) == 1 else shown


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
        _check_grammar(caller.admission.quota, sampling_params.structured_outputs)
        whole = caller.admission.counts and sampling_params.output_kind is RequestOutputKind.FINAL_ONLY
        if whole:  # what is given up before its end is charged, too
            sampling_params.output_kind = RequestOutputKind.CUMULATIVE
        with RequestSpans(client.namespace.name) as spans:
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

    def shutdown(self, timeout: float | None = None) -> None:
        """Stop vLLM's engine as its method of that name does; that it tells itself of its end, as of a failure, is not logged."""
        logging.getLogger("vllm.v1.engine.async_llm").addFilter(_tells_no_end)
        self._llm.shutdown(timeout=timeout)

    async def notify_kv_transfer_request_rejected(self, *_: Any, **__: Any) -> None:
        """Ignore vLLM's hand-over between prefill and decode servers: this connector has none, and clients may not ask."""


def _check_grammar(quota: Quota, wanted: StructuredOutputsParams | None) -> None:
    """Refuse an answer whose form would keep others waiting, however a request has asked for it; raises VLLMValidationError."""
    if wanted is None:
        return
    asked = [wanted.json, wanted.choice, wanted.structural_tag]
    characters = sum(len(each if isinstance(each, str) else json.dumps(each)) for each in asked if each is not None)
    free = wanted.regex is not None or wanted.grammar is not None
    with refused():
        quota.check_grammar(characters, free)  # before it is searched
        found = [*_objects_in(wanted.json), *_objects_in(wanted.structural_tag)]
        quota.check_grammar(characters + _beyond_its_length(found), any(map(_is_free, found)))


def _objects_in(schema: Any) -> Iterator[Mapping[str, Any]]:
    """Yield all objects of a schema, and of one that is written into it as text."""
    if isinstance(schema, Mapping):
        yield schema
        schema = list(schema.values())
    if isinstance(schema, str) and schema.lstrip().startswith(("{", "[")):
        with suppress(ValueError, RecursionError):  # vLLM refuses it
            yield from _objects_in(json.loads(schema))
    elif isinstance(schema, list):
        for each in schema:
            yield from _objects_in(each)


def _is_free(found: Mapping[str, Any]) -> bool:
    """Say whether an object of a schema has a regular expression or a grammar, and is not one of properties by these names."""
    return "patternProperties" in found or any(isinstance(found.get(name), str) for name in ("pattern", "grammar"))


def _beyond_its_length(found: Iterable[Mapping[str, Any]]) -> int:
    """Return how many characters of a schema are as dear to make a grammar of as its formats and its strings of limited length.

    vLLM's xgrammar is paid once for equal limits, and hardly more beyond so many characters.
    """
    limits: set[tuple[float, ...]] = set()
    formats = 0
    for each in found:
        pair = (each.get("minLength"), each.get("maxLength"))
        limits.add((0, *(limit for limit in pair if isinstance(limit, (int, float)))))
        formats += isinstance(each.get("format"), str)
    limited = sum(int(min(max(given), MOST_LIMITED)) for given in limits)
    return PER_LIMITED * limited + PER_FORMAT * formats


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


def _tells_no_end(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], EngineDeadError))


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
    return {"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": list(prompt)}
