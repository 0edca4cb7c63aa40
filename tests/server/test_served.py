"""Tests the requests that reach the engine, for every client and every route."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from openai.types import CompletionUsage
from prometheus_client import CollectorRegistry

pytest.importorskip("vllm", reason="vLLM is not installed; make setup installs it")

from vllm import SamplingParams
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError

from cacheblend_rag.blending.outcome import PromptOutcome, Usage
from cacheblend_rag.engines.vllm.messages import FinishReport
from cacheblend_rag.server.observing import ReuseMetrics
from cacheblend_rag.server.served_engine import ServedEngine, Ticket, reported, with_ticket
from cacheblend_rag.server.tenants import Caller, Served, ServedTenants, calling
from cacheblend_rag.store.files import DEFAULT
from cacheblend_rag.store.kv import ModelFingerprint
from tests.outcomes import filled, lacking

ATTACK = {"kv_transfer_params": {"cacheblend": {"start": 0}}, "session_id": "s"}


class Engine:
    """Answers two tokens, and records its prompt and parameters."""

    def __init__(self) -> None:
        self.prompt: Any = None
        self.params: Any = None
        self.aborted = False
        self.model_config = "the model's"

    async def generate(self, prompt: Any, params: Any, request_id: str, **options: Any) -> AsyncIterator[RequestOutput]:
        self.prompt, self.params, self.options = prompt, params, options
        try:
            for number in (1, 2):
                done = number == 2
                piece = CompletionOutput(0, "x", [number], None, None, finish_reason="stop" if done else None)
                yield RequestOutput(
                    request_id, None, [7] * 10, None, [piece], done, num_cached_tokens=9, kv_transfer_params={"a": 1}
                )
                await asyncio.sleep(0)
        except GeneratorExit:
            self.aborted = True
            raise


class Client:
    """Reports a blend if the request asks for a blend."""

    def __init__(self) -> None:
        self.done: list[PromptOutcome] = []
        self.announced: list[Any] = []
        self.fingerprint, self.namespace = ModelFingerprint("f" * 32, "x"), DEFAULT
        self.gate = SimpleNamespace(passed=True)

    async def before(self, token_ids: Any, params: Any) -> None:
        self.announced.append((token_ids, params))

    def report(self, params: Any, prompt: int, cached: int, completion: int, asked: bool) -> FinishReport:
        assert params == {"a": 1}
        if asked:
            usage = Usage(prompt, 6, 3, 4, completion)
            return FinishReport(PromptOutcome("blend", "stored KV", usage, chunks=lacking("m")))
        usage = Usage(prompt, cached, 0, prompt - cached, completion)
        return FinishReport(PromptOutcome("prefill", "no known chunk in the prompt", usage))

    def trace_headers(self, spans: Any) -> dict[str, str]:
        return {"traceparent": "ours"}

    def finished(self, report: FinishReport) -> None:
        self.done.append(report.outcome)


@pytest.fixture
def parts() -> tuple[ServedEngine, Engine, Client]:
    engine, client = Engine(), Client()
    calling.set(Caller())
    tenants: Any = ServedTenants({"default": Served(client, None)})  # type: ignore[arg-type]
    return ServedEngine(engine, tenants, ReuseMetrics(CollectorRegistry())), engine, client


async def outputs(served: ServedEngine, prompt: Any, **extra: Any) -> list[RequestOutput]:
    sampling = SamplingParams(extra_args=dict(extra) or None)
    return [output async for output in served.generate(prompt, sampling, "r")]


def tokens(**fields: Any) -> dict[str, Any]:
    return {"type": "token", "prompt_token_ids": [7] * 10, **fields}


async def test_kv_transfer_params_of_clients_are_dropped_and_other_arguments_are_kept(parts) -> None:
    served, engine, _ = parts
    await outputs(served, tokens(), **ATTACK)
    assert engine.params.extra_args == {"session_id": "s"}
    await outputs(served, with_ticket(tokens(), Ticket()), kv_transfer_params=ATTACK["kv_transfer_params"])
    assert engine.params.extra_args is None


async def test_a_ticket_sets_the_blend_and_does_not_reach_vllm(parts) -> None:
    served, engine, client = parts
    ticket = Ticket(params={"cacheblend": {"spans": []}})
    first, last = await outputs(served, with_ticket(tokens(cache_salt="cacheblend-1"), ticket), **ATTACK)
    assert engine.params.extra_args == {"session_id": "s", "kv_transfer_params": ticket.params}
    assert engine.prompt == tokens(cache_salt="cacheblend-1")
    assert (first.num_cached_tokens, last.num_cached_tokens, last.kv_transfer_params) == (None, 6, None)
    assert ticket.outcome is not None
    assert client.announced == [([7] * 10, ticket.params)]
    assert (ticket.outcome.mode, ticket.outcome.usage.reused_tokens, ticket.outcome.missing) == ("blend", 6, ("m",))
    assert [outcome.missing for outcome in client.done] == [("m",)]


@pytest.mark.parametrize(("kind", "tokens_of_it"), [("DELTA", 2), ("CUMULATIVE", 1)])
async def test_all_tokens_of_a_streamed_answer_are_reported(parts, kind: str, tokens_of_it: int) -> None:
    served, ticket = parts[0], Ticket()
    sampling = SamplingParams(output_kind=RequestOutputKind[kind])
    async for _ in served.generate(with_ticket(tokens(), ticket), sampling, "r"):
        pass
    assert ticket.outcome is not None
    assert ticket.outcome.usage.completion_tokens == tokens_of_it


def test_usage_reports_every_field_of_each_prompts_outcome() -> None:
    request = SimpleNamespace(cacheblend_tickets=[Ticket(outcome=filled()), Ticket(outcome=filled())])
    answer = SimpleNamespace(usage=CompletionUsage(prompt_tokens=9, completion_tokens=2, total_tokens=11))
    told = json.loads(reported(request, answer).usage.model_dump_json())
    assert [PromptOutcome.from_params(report) for report in told["cacheblend"]] == [filled()] * 2
    assert told["prompt_tokens_details"]["cached_tokens"] == 2 * filled().usage.reused_tokens


async def test_a_clients_salt_never_equals_the_salt_of_a_blended_prompt(parts) -> None:
    served, engine, _ = parts
    for prompt in (tokens(cache_salt="cacheblend-1"), with_ticket(tokens(cache_salt="cacheblend-1"), Ticket())):
        await outputs(served, prompt)
        assert engine.prompt["cache_salt"] == "client:cacheblend-1"
    await outputs(served, tokens())
    assert "cache_salt" not in engine.prompt


async def test_an_exact_prompt_does_not_read_the_prefix_cache(parts) -> None:
    served, engine, _ = parts
    ticket = Ticket(exact=True, reason="reuse was switched off")
    await outputs(served, with_ticket(tokens(), ticket))
    assert engine.params.skip_reading_prefix_cache
    assert ticket.outcome is not None
    assert ticket.outcome.reason == "reuse was switched off"
    await outputs(served, with_ticket(tokens(), Ticket()))
    assert not engine.params.skip_reading_prefix_cache


async def test_vllms_span_is_a_child_of_ours_despite_a_clients_trace_header(parts) -> None:
    served, engine, _ = parts
    async for _ in served.generate(tokens(), SamplingParams(), "r", trace_headers={"traceparent": "a client's"}):
        pass
    assert engine.options["trace_headers"] == {"traceparent": "ours"}


async def test_a_reader_that_stops_ends_the_request(parts) -> None:
    served, engine, client = parts
    stream = served.generate(tokens(), SamplingParams(), "r")
    await anext(stream)
    await stream.aclose()
    assert engine.aborted
    assert client.done == []


def test_a_stopped_engine_is_not_logged_as_dead(parts) -> None:
    served, engine, _ = parts
    log, told = logging.getLogger("vllm.v1.engine.async_llm"), list[logging.LogRecord]()
    handler = logging.Handler()
    handler.emit = told.append

    def shutdown(timeout: float | None = None) -> None:
        for error in (
            EngineDeadError(),
            ValueError(f"a failure within {timeout} s"),
        ):  # as the task that takes outputs does
            log.error("output_handler failed", exc_info=error)

    engine.shutdown = shutdown
    log.addHandler(handler)
    try:
        served.shutdown(timeout=7)
    finally:
        log.removeHandler(handler)
    assert [str(record.exc_info[1]) for record in told] == ["a failure within 7 s"]


def test_other_attributes_are_taken_from_vllms_engine(parts) -> None:
    assert parts[0].model_config == "the model's"
