"""Tests a running server's traces, which continue the client's trace, its JSON logs and its counts of refusals."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest

from cacheblend_rag import spans as told
from cacheblend_rag.engines.remote import RemoteEngine
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.server.observing import share_logging
from cacheblend_rag.server.tenants import Caller, calling
from tests.engines.contract import TEXTS
from tests.outcomes import loads_in
from tests.recorded_spans import exporter
from tests.server.running import KEY, RunningServer
from tests.server.test_middleware import App
from tests.server.test_server import PLAIN, body, register

WORDS = {word for text in (*TEXTS, "Who runs the observatory?") for word in text.split() if len(word) > 5}


def attributes(span: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


def asked(server: RunningServer, **fields: Any) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Ask about registered chunks; return the answer, its spans by name, and the trace's id."""
    trace_id, parent = uuid4().hex, uuid4().hex[:16]
    answer = server.request(
        "POST",
        "/v1/chat/completions",
        json=body(PLAIN, **fields),
        headers={"traceparent": f"00-{trace_id}-{parent}-01"},
    )
    assert answer.status_code == 200, answer.text
    assert server.collector is not None
    found = server.collector.of_trace(trace_id, lambda spans: any(s.parent_span_id.hex() == parent for s in spans))
    return answer.json(), {span.name: span for span in found}, trace_id


@pytest.mark.slow
def test_a_request_is_one_trace_from_the_clients_span_to_vllms(server: RunningServer) -> None:
    register(server)
    answer, spans, _ = asked(server, cacheblend={"ratio": 0.3, "policy": "hkvd"})
    report = answer["usage"]["cacheblend"]
    assert report["mode"] == "blend"
    names = {span.span_id: span.name for span in spans.values()}
    parents = {name: names.get(span.parent_span_id, "") for name, span in spans.items()}
    request = "cacheblend.generate"
    assert parents == {
        "POST /v1/chat/completions": "",
        "cacheblend.find": "POST /v1/chat/completions",
        request: "POST /v1/chat/completions",
        "llm_request": request,
        "cacheblend.plan": request,
        "cacheblend.load": request,
        "cacheblend.fuse": request,
        "cacheblend.front_pass": "cacheblend.fuse",
        "cacheblend.dense_pass": "cacheblend.fuse",
        "cacheblend.sparse_pass": "cacheblend.fuse",
        "cacheblend.prefill": request,
        "cacheblend.decode": request,
    }
    said = attributes(spans[request])
    assert said["cacheblend.tokens.reused"] == report["reused_tokens"]
    assert said["cacheblend.tokens.recomputed"] == report["recomputed_tokens"]
    assert said["cacheblend.tier.disk.bytes"] == sum(load["nbytes"] for load in loads_in(report))
    assert attributes(spans["POST /v1/chat/completions"])["http.response.status_code"] == 200


@pytest.mark.slow
def test_spans_and_log_lines_contain_no_prompt_text_and_lines_name_their_trace(server: RunningServer) -> None:
    register(server)
    before = len(server.log())
    _, spans, trace_id = asked(server, cacheblend={"ratio": 0.3, "policy": "hkvd"})
    log = ""
    for _ in range(200):  # the line may come after the answer
        log = server.log()[before:]
        if trace_id in log and log.endswith("\n"):
            break
        server.get("/health")
    told = "\n".join(map(str, spans.values()))
    assert not {word for word in WORDS if word in told or word in log}
    # Other processes write to the same log: their output may precede the JSON on its line.
    (line,) = (line for line in log.splitlines() if trace_id in line)
    answered = json.loads(line[line.index("{") :])
    assert (answered["tenant"], answered["cacheblend.mode"]) == ("default", "blend")
    assert answered["cacheblend.tokens.reused"] > 0


@pytest.mark.slow
def test_a_remote_engines_span_and_the_servers_are_one_trace(server: RunningServer) -> None:
    register(server)
    kept = exporter()
    kept.clear()
    with RemoteEngine(f"{server.url}/v1", api_key=KEY) as engine, told.span("mine"):
        engine.generate(PLAIN, SamplingParams(max_tokens=2))
    mine = next(span for span in kept.get_finished_spans() if span.name == "cacheblend.generate")
    assert server.collector is not None and mine.context is not None
    client = mine.context.span_id.to_bytes(8, "big")
    found = server.collector.of_trace(
        f"{mine.context.trace_id:032x}", lambda spans: any(span.parent_span_id == client for span in spans)
    )
    assert "cacheblend.generate" in {span.name for span in found}


async def test_refusals_are_counted_by_tenant_and_status_and_their_span_names_no_path() -> None:
    refused: list[tuple[str, int]] = []
    app = App(["right"], limit=10, refused=lambda tenant, status: refused.append((tenant, status)))
    kept = exporter()
    kept.clear()
    async with app.client() as client:
        for content in (b"x" * 11, b"x"):
            await client.post("/v1/chunks?id=secret", headers={"Authorization": "Bearer right"}, content=content)
        await client.post("/v1/chunks", content=b"x" * 11)  # a request without the key is not counted
        await client.get("/secret/path", headers={"Authorization": "Bearer right"})
    assert refused == [("default", 413)]
    said = [(span.name, (span.attributes or {})["http.response.status_code"]) for span in kept.get_finished_spans()]
    assert said == [("POST", 413), ("POST /v1/chunks", 200), ("GET", 404)]
    assert all("secret" not in span.to_json() for span in kept.get_finished_spans())


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """The text that the server writes to its log."""
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    monkeypatch.setattr(logging.getLogger("vllm"), "handlers", [handler])
    for name in ("uvicorn.access", "uvicorn.error"):
        monkeypatch.setattr(logging.getLogger(name), "handlers", [handler])
        monkeypatch.setattr(logging.getLogger(name), "filters", [])
        monkeypatch.setattr(logging.getLogger(name), "level", logging.INFO)
    for name in ("handlers", "propagate", "level"):
        monkeypatch.setattr(
            logging.getLogger("cacheblend_rag"), name, getattr(logging.getLogger("cacheblend_rag"), name)
        )
    share_logging()
    yield written


def failing(logger: str, said: str = "Unsupported type 'secret'") -> None:
    try:
        raise ValueError(said)
    except ValueError as error:
        logging.getLogger(logger).exception("Error in create_messages: %s", error)
        logging.getLogger(logger).exception(f"Error, {error}")
    logging.getLogger(logger).error("Error with model %s, %d", "secret", 404)
    logging.getLogger(logger).error("Error with model %(name)s", {"name": "secret"})


def test_log_lines_of_a_request_contain_none_of_its_text(log: io.StringIO) -> None:
    token = calling.set(Caller("acme"))
    try:
        failing("vllm.entrypoints.openai")
    finally:
        calling.reset(token)
    said = log.getvalue()
    assert "secret" not in said
    assert "Error with model <not logged>, 404\n" in said
    assert said.count("in failing\n") == 2
    assert said.count("\nValueError\n") == 2


def test_the_log_of_a_server_error_contains_no_exception_message(log: io.StringIO) -> None:
    said = "secret"
    try:
        raise ValueError(said)
    except ValueError:
        logging.getLogger("uvicorn.error").exception("Exception in ASGI application\n")
    assert "secret" not in log.getvalue() and "ValueError" in log.getvalue()


def test_log_lines_outside_requests_are_complete_except_for_schemas(log: io.StringIO) -> None:
    failing("vllm.v1.engine")
    logging.getLogger("vllm.v1.structured_output").warning("LLMatcher error: %s", "a schema")
    assert log.getvalue().count("secret") == 6
    assert "a schema" not in log.getvalue()


@pytest.mark.parametrize(
    ("target", "logged"),
    [
        ("/v1/chunks/docs/secret.md", "/v1/chunks/{id}"),
        ("/v1/chunks/stats/secret", "/v1/chunks/{id}"),
        ("/v1/chunks?id=secret&id=secret", "/v1/chunks"),
        ("/v1/chunks/secret?holder=secret", "/v1/chunks/{id}"),
        ("/proxied/v1/chunks/secret", "/proxied/v1/chunks/{id}"),
        ("/v1/chunks/stats", "/v1/chunks/stats"),
        ("/v1/models?a=b", "/v1/models?a=b"),
    ],
)
def test_the_access_log_contains_no_chunk_ids(log: io.StringIO, target: str, logged: str) -> None:
    line = '%s - "%s %s HTTP/%s" %d'
    logging.getLogger("uvicorn.access").info(line, "127.0.0.1:5", "GET", target, "1.1", 200)
    assert log.getvalue() == f'127.0.0.1:5 - "GET {logged} HTTP/1.1" 200\n'
