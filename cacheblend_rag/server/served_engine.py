"""Wraps vLLM's engine and handlers: runs every prompt of every route with its blend plan, and reports the outcome."""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.v1.engine.exceptions import EngineDeadError

from cacheblend_rag.blending.outcome import PromptOutcome
from cacheblend_rag.engines.spans import RequestSpans, reuse_attributes
from cacheblend_rag.errors import InputError, UnknownChunkError
from cacheblend_rag.server.keys import NO_QUOTA, Quota
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
"""Key of the ticket in an engine input. vLLM builds engine inputs field by field, so no client can add a ticket."""

MOST_SCHEMA = 1 << 13
"""Most characters of an answer's schema, for a tenant with a quota: an engine compiles one grammar at a time, to its end."""
PER_LIMITED, MOST_LIMITED, PER_FORMAT = 32, 128, 256
"""Schema characters charged for a limited character, most limited characters charged, and charge for a format."""

REQUEST_FIELD = "cacheblend_tickets"
"""Attribute of a request object that holds the tickets of its prompts."""


@dataclass
class Ticket:
    """Carries one prompt's parameters and outcome through the server.

    Attributes:
        params: The ``kv_transfer_params`` to run the prompt with; empty for an ordinary prefill.
        exact: Whether the prompt must not read vLLM's prefix cache either.
        reason: Why the prompt is not blended; empty if the engine gives the reason.
        outcome: Outcome of the prompt once the prompt is finished.
    """

    params: dict[str, Any] = field(default_factory=dict)
    exact: bool = False
    reason: str = ""
    outcome: PromptOutcome | None = None


def with_ticket(engine_input: Mapping[str, Any], ticket: Ticket) -> EngineInput:
    """Return the engine input with a ticket added."""
    return cast("EngineInput", {**engine_input, KEY: ticket})


def take_ticket(engine_input: Any) -> tuple[Any, Ticket | None]:
    """Return the engine input without its ticket, and the ticket if there is one."""
    if not isinstance(engine_input, Mapping) or not isinstance(engine_input.get(KEY), Ticket):
        return engine_input, None
    rest = {name: value for name, value in engine_input.items() if name != KEY}
    return rest, engine_input[KEY]


def clients_salt(given: str | None) -> str | None:
    """Return a client's ``cache_salt`` with a prefix, so that it cannot equal a namespace's salt."""
    return None if given is None else f"client:{given}"


class RefusedChunkError(UnknownChunkError, VLLMValidationError):
    """Reports an unknown chunk from within vLLM's handlers; ``answer_errors`` answers with the code of unknown chunks."""


@contextmanager
def refused(parameter: str | None = None) -> Iterator[None]:
    """Re-raise InputError as VLLMValidationError, which vLLM's handlers answer."""
    try:
        yield
    except UnknownChunkError as error:
        raise RefusedChunkError(str(error)) from error
    except InputError as error:
        raise VLLMValidationError(str(error), parameter=parameter) from error


class ReportingHandler:
    """Wraps vLLM's handler of chats or of completions, and adds reports to its answers."""

    def __init__(self, handler: Any):
        self._handler = handler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handler, name)

    async def create_chat_completion(self, request: Any, raw_request: Any = None) -> Any:
        """Answer a chat as vLLM's handler does, with reports in the usage."""
        return reported(request, await self._handler.create_chat_completion(request, raw_request))

    async def create_completion(self, request: Any, raw_request: Any = None) -> Any:
        """Complete prompts as vLLM's handler does, with reports in the usage."""
        return reported(request, await self._handler.create_completion(request, raw_request))


def reported(request: Any, answer: Any) -> Any:
    """Return a handler's answer with reports in its usage: one report, or a list of reports for several prompts."""
    if isinstance(answer, AsyncGenerator):
        return _reported_stream(request, answer)
    usage = getattr(answer, "usage", None)
    reports = _reports(request)
    if usage is not None and reports:
        fields = usage.model_dump(exclude_none=True)
        _add(fields, reports)
        # vLLM's usage class accepts unknown fields, as OpenAI's clients do.
        answer.usage = type(usage)(**fields)
    return answer


async def _reported_stream(request: Any, pieces: AsyncIterator[str]) -> AsyncIterator[str]:
    async for piece in pieces:
        # The piece with the usage has no choices; all other pieces pass unchanged.
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
    """Wraps an ``AsyncLLM``, and delegates all other attributes to it.

    Prompts run only with the parameters of their tickets: ``kv_transfer_params`` from a client would let the client store KV
    under names of its choice, and a client's ``cache_salt`` must not equal the salt of another namespace.
    """

    def __init__(self, llm: AsyncLLM, served: PerNamespace[Served], metrics: ReuseMetrics):
        self._llm, self._served, self._metrics = llm, served, metrics

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run a prompt with the parameters of its ticket; replaces vLLM's ``generate``."""
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
        if whole:  # tokens of an aborted answer are charged, too
            sampling_params.output_kind = RequestOutputKind.CUMULATIVE
        with RequestSpans(client.namespace.name) as spans:
            begin, options["trace_headers"] = time.perf_counter(), client.trace_headers(spans)
            outputs = self._llm.generate(prompt, sampling_params, request_id, **options)
            used = TokensUsed(prompt, sampling_params)
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
        """Return the report of a finished prompt and count the prompt; None for an unfinished prompt."""
        if not output.finished:
            if ticket.params:
                output.num_cached_tokens = None  # vLLM counts every token of a blend, recomputed tokens too
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
        """Stop vLLM's engine; the error that vLLM logs about the engine's own end is left out."""
        logging.getLogger("vllm.v1.engine.async_llm").addFilter(_tells_no_end)
        self._llm.shutdown(timeout=timeout)

    async def notify_kv_transfer_request_rejected(self, *_: Any, **__: Any) -> None:
        """Ignore a rejected KV transfer between prefill and decode servers: this server has none, and clients may not ask."""


def _check_grammar(quota: Quota, wanted: StructuredOutputsParams | None) -> None:
    """Raise VLLMValidationError if an answer's schema or grammar would delay other requests, whichever field sets it."""
    if wanted is None or quota == NO_QUOTA:
        return
    asked = [wanted.json, wanted.choice, wanted.structural_tag]
    characters = sum(len(each if isinstance(each, str) else json.dumps(each)) for each in asked if each is not None)
    free = wanted.regex is not None or wanted.grammar is not None
    # vLLM's xgrammar compiles equal limits once, and limits above ``MOST_LIMITED`` cost hardly more.
    limits: set[tuple[float, ...]] = set()
    if characters <= MOST_SCHEMA:  # else the schema is refused without a search
        for found in (*_objects_in(wanted.json), *_objects_in(wanted.structural_tag)):
            # A regular expression or a grammar, not merely a property of such a name.
            free |= "patternProperties" in found
            free |= any(isinstance(found.get(name), str) for name in ("pattern", "grammar"))
            pair = (found.get("minLength"), found.get("maxLength"))
            limits.add((0, *(limit for limit in pair if isinstance(limit, (int, float)))))
            characters += PER_FORMAT * isinstance(found.get("format"), str)
    characters += PER_LIMITED * sum(int(min(max(given), MOST_LIMITED)) for given in limits)
    if free or characters > MOST_SCHEMA:
        raise VLLMValidationError(
            "The answer is to follow a schema or choices that all who ask might wait for. This tenant may send JSON schemas "
            f"and choices of {MOST_SCHEMA} characters in all, without regular expressions (pattern), and no grammars. A "
            f"string's minLength or maxLength counts for {PER_LIMITED} by character that it limits, up to {MOST_LIMITED} of "
            f"them; a format for {PER_FORMAT}."
        )


def _objects_in(schema: Any) -> Iterator[Mapping[str, Any]]:
    """Yield all objects of a schema, and of a schema embedded as JSON text."""
    if isinstance(schema, Mapping):
        yield schema
        schema = list(schema.values())
    if isinstance(schema, str) and schema.lstrip().startswith(("{", "[")):
        with suppress(ValueError, RecursionError):  # vLLM refuses such text
            yield from _objects_in(json.loads(schema))
    elif isinstance(schema, list):
        for each in schema:
            yield from _objects_in(each)


def _tell(spans: RequestSpans, report: FinishReport, output: RequestOutput, begin: float) -> None:
    """Record the outcome of a prompt in the request's spans and in the log."""
    from cacheblend_rag.engines.vllm.client import record

    outcome, usage, metrics = report.outcome, report.outcome.usage, output.metrics
    if spans.trace is not None:
        arrived = [(time.perf_counter(), usage.completion_tokens)]
        # vLLM returns an answer in one piece, unless the answer is streamed.
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
    """Counts the tokens that a request has used so far: the tokens of its prompt and of its answers.

    A prompt with logprobs counts once more for each answer, because each answer computes the prompt again, with its logits.
    """

    def __init__(self, prompt: Any, sampling_params: SamplingParams):
        """Start counting for ``prompt``; vLLM's outputs give the length of a prompt without token ids."""
        self._adds_up = sampling_params.output_kind is RequestOutputKind.DELTA
        self._weight = 1 if sampling_params.prompt_logprobs is None else 1 + sampling_params.n
        self._prompt = len(prompt.get("prompt_token_ids") or ()) if isinstance(prompt, Mapping) else 0
        self._answers: Counter[int] = Counter()
        self._pieces: dict[int, CompletionOutput] = {}
        self._told = 0

    def see(self, output: RequestOutput) -> None:
        """Count the tokens of one output of the engine."""
        self._prompt = len(output.prompt_token_ids or ()) or self._prompt
        for piece in output.outputs:
            before = self._answers[piece.index] if self._adds_up else 0
            self._answers[piece.index] = before + len(piece.token_ids)
            self._pieces[piece.index] = piece

    @property
    def pieces(self) -> list[CompletionOutput]:
        """Return the last output of each answer."""
        return [self._pieces[index] for index in sorted(self._pieces)]

    @property
    def answered(self) -> int:
        """Return the number of tokens of all answers; the last output of a stream contains only the last piece."""
        return self._answers.total()

    def due(self) -> int:
        """Return the number of tokens that earlier calls have not returned."""
        before, self._told = self._told, self._weight * self._prompt + self.answered
        return self._told - before


def _with_own_salt(prompt: Any, namespace: Namespace) -> Any:
    """Return a prompt with a salt of its namespace, which no client can choose for another namespace."""
    salt = namespace.salt(clients_salt(prompt.get("cache_salt") if isinstance(prompt, Mapping) else None))
    if salt is None:
        return prompt
    if isinstance(prompt, Mapping) and "decoder_prompt" in prompt:
        # vLLM reads the salt from the decoder prompt.
        return {**prompt, "decoder_prompt": {**prompt["decoder_prompt"], "cache_salt": salt}}
    if not isinstance(prompt, Mapping):
        prompt = {"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": list(prompt)}
    return {**prompt, "cache_salt": salt}
