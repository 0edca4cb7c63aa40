"""Records metrics, spans, refusals, and log lines with tenant and trace id, for the operator of a server."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from opentelemetry import propagate
from opentelemetry.trace import INVALID_SPAN, format_trace_id, get_current_span
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cacheblend_rag import spans
from cacheblend_rag.engines.vllm.starting import log_as_vllm
from cacheblend_rag.printable import hide_values
from cacheblend_rag.server.tenants import calling

if TYPE_CHECKING:
    from cacheblend_rag.blending.outcome import PromptOutcome
    from cacheblend_rag.engines.results import PrecomputeReport
    from cacheblend_rag.server.middleware import RequestLimits

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_NUMBERS = re.compile(r"\d+")
_EXPECTED = re.compile(r" \(expected in .*")


class ReuseMetrics:
    """Counts the reports of finished prompts and of precomputation."""

    def __init__(self, registry: CollectorRegistry = REGISTRY):
        """Register the metrics; once per registry."""

        def counter(name: str, text: str, *labels: str, of: tuple[str, ...] = ("tenant",)) -> Counter:
            return Counter(f"cacheblend_{name}", text, (*of, *labels), registry=registry)

        def seconds(name: str, text: str, *labels: str) -> Histogram:
            return Histogram(f"cacheblend_{name}", text, labels, buckets=_SECONDS, registry=registry)

        self._requests = counter("requests", "Finished prompts by mode.", "mode")
        self._reused = counter("reused_tokens", "Prompt tokens whose stored KV was used as it is.")
        self._recomputed = counter("recomputed_tokens", "Prompt tokens with stored KV that were recomputed.")
        self._computed = counter("computed_tokens", "Prompt tokens that went through all layers.")
        self._loaded = counter("loaded_tokens", "Prompt tokens whose KV was loaded from the store.")
        self._bytes = counter("loaded_bytes", "Bytes of KV loaded from the store.")
        self._tier_bytes = counter("tier_loaded_bytes", "Bytes of KV loaded, by the tier that they came from.", "tier")
        self._tier_seconds = counter(
            "tier_read_seconds", "Seconds that reads of chunks took, each chunk's added up.", "tier"
        )
        self._tier_chunks = counter(
            "tier_loaded_chunks", "Chunks found stored, by the tier that they came from.", "tier"
        )
        waited = "Seconds that blends waited for reads; the rest of the time of reading hid behind computing."
        self._tier_waits = counter("tier_waited_seconds", waited, "tier", of=())
        self._tier_out = Gauge(
            "cacheblend_tier_out",
            "1 while a remote tier is not used since it failed, as of the last prompt with chunks.",
            ("tier",),
            registry=registry,
        )
        self._first_token = seconds("first_token_seconds", "Time to first token, by mode.", "mode")
        self._refused = counter("refused_requests", "Requests refused for a limit, by HTTP status.", "status")
        self._missing = counter("missing_chunks", "Chunks in prompts without stored KV.")
        self._fallbacks = counter("fallbacks", "Prompts served by ordinary prefill, by reason.", "reason")
        self._blend = seconds("blend_seconds", "Placement and both passes of a blended prompt.")
        self._load = seconds("load_wait_seconds", "Time a blended prompt waited for stored KV.")
        self._decisions = counter(
            "decisions", "Prompts that the loading controller decided, by what it decided.", "decision"
        )
        self._expected = seconds("expected_first_token_seconds", "Time to first token that the controller expected.")
        self._taken = seconds("decided_first_token_seconds", "Time to first token of the prompts that it decided.")
        self._precomputed = counter("precomputed_chunks", "Chunks given to precompute, by result.", "result")
        self._precomputed_tokens = counter("precomputed_tokens", "Tokens whose KV was computed by precompute.")

    def finished(
        self,
        outcome: PromptOutcome,
        tenant: str,
        first_token_s: float | None = None,
        out: Mapping[str, bool] = MappingProxyType({}),
    ) -> None:
        """Count a tenant's finished prompt, and record which remote tiers are out; vLLM may not measure ``first_token_s``."""
        if first_token_s is not None:
            self._first_token.labels(outcome.mode).observe(first_token_s)
        for tier, is_out in out.items():
            self._tier_out.labels(tier).set(is_out)
        self._requests.labels(tenant, outcome.mode).inc()
        self._reused.labels(tenant).inc(outcome.usage.reused_tokens)
        self._recomputed.labels(tenant).inc(outcome.usage.recomputed_tokens)
        self._computed.labels(tenant).inc(outcome.usage.computed_tokens)
        self._missing.labels(tenant).inc(len(outcome.missing))
        if outcome.expected_s is not None:
            partly = "partly_in_place" if outcome.in_place else "blended"
            self._decisions.labels(tenant, partly if outcome.mode == "blend" else "prefilled").inc()
            if first_token_s is not None:
                self._expected.observe(outcome.expected_s)
                self._taken.observe(first_token_s)
        if outcome.mode == "prefill":
            self._fallbacks.labels(tenant, reason_label(outcome.reason)).inc()
            return
        if outcome.loaded_bytes:
            self._loaded.labels(tenant).inc(outcome.usage.reused_tokens + outcome.usage.recomputed_tokens)
            self._bytes.labels(tenant).inc(outcome.loaded_bytes)
        read_s = sum(load.seconds for load in outcome.loads)
        for load in outcome.loads:
            self._tier_waits.labels(load.tier).inc(outcome.load_s * load.seconds / read_s if read_s else 0.0)
            self._tier_chunks.labels(tenant, load.tier).inc(load is not outcome.header)
            self._tier_bytes.labels(tenant, load.tier).inc(load.nbytes)
            self._tier_seconds.labels(tenant, load.tier).inc(load.seconds)
        self._blend.observe(outcome.blend_s)
        self._load.observe(outcome.load_s)

    def refused(self, tenant: str, status: int) -> None:
        """Count a request that was refused for a limit."""
        self._refused.labels(tenant, str(status)).inc()

    def precomputed(self, report: PrecomputeReport, tenant: str) -> None:
        """Count a precompute call."""
        self._precomputed.labels(tenant, "computed").inc(report.computed)
        self._precomputed.labels(tenant, "present").inc(report.present)
        self._precomputed.labels(tenant, "failed").inc(len(report.failed))
        self._precomputed_tokens.labels(tenant).inc(report.tokens)


def reason_label(reason: str) -> str:
    """Return a reason without the parts that differ between prompts: a label must take few values."""
    return _NUMBERS.sub("N", _EXPECTED.sub("", reason).partition(":")[0])[:80]


_OWN_LINES = ("cacheblend_rag", "vllm.cacheblend")
_CHUNKS, _NAMELESS = "/v1/chunks", {"", "/stats", "/flush"}
_UNSEEN = {"/health", "/metrics", "/ping"}
_REFUSALS = {408, 413, 429, 507}


class Observe:
    """Records each request with a key as a span, a child of the span in its ``traceparent``, and counts refusals."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _UNSEEN:
            await self._app(scope, receive, send)
            return
        method, status = scope["method"], 0

        async def watched(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        span = spans.begin(method, "server", propagate.extract(Headers(scope=scope)))
        with spans.current(span):
            await self._app(scope, receive, watched)
        # The route, not the path: clients choose the path.
        tenant, route = _tenant(), getattr(scope.get("route"), "path", "")
        span.update_name(f"{method} {route}".strip())
        span.set_attributes({"http.request.method": method, "http.response.status_code": status, "http.route": route})
        span.set_attribute("cacheblend.tenant", tenant)
        span.end()
        if status in _REFUSALS:
            limits: RequestLimits = scope["app"].state.limits
            limits.refused(tenant, status)


def share_logging() -> None:
    """Send this library's log lines to vLLM's handlers, in vLLM's format, with ``tenant`` and ``trace_id`` where known.

    No line of the server's log contains a chunk's id or the text of a request.
    """
    log_as_vllm()
    for handler in logging.getLogger("vllm").handlers:
        handler.addFilter(_with_context)
        handler.addFilter(_without_words)
    logging.getLogger("uvicorn.error").addFilter(_without_words)
    logging.getLogger("uvicorn.access").addFilter(_without_ids)


def _without_words(record: logging.LogRecord) -> bool:
    """Remove a user's text (names of models, schemas, prompts) from vLLM's and uvicorn's lines about failed requests."""
    # uvicorn logs an error after the tenant's request has ended.
    failed = bool(_tenant()) or str(record.msg).startswith("Exception in ASGI application")
    if failed and record.levelno >= logging.WARNING and not record.name.startswith(_OWN_LINES):
        hide_values(record)
    return True


def _without_ids(record: logging.LogRecord) -> bool:
    """Remove chunk ids and holders from a line of uvicorn's access log, whose arguments are client, method, path, and others."""
    if isinstance(record.args, tuple) and len(record.args) > 2:
        client, method, target, *rest = record.args
        before, found, after = str(target).partition(_CHUNKS)
        if found:
            after = after.partition("?")[0]
            record.args = (client, method, f"{before}{found}{after if after in _NAMELESS else '/{id}'}", *rest)
    return True


def _with_context(record: logging.LogRecord) -> bool:
    """Add tenant and trace id to a log record; JSON output shows both, text output does not."""
    span = get_current_span()
    if span is not INVALID_SPAN and span.get_span_context().is_valid:
        record.trace_id = format_trace_id(span.get_span_context().trace_id)
    if (tenant := _tenant()) and not hasattr(record, "tenant"):
        record.tenant = tenant
    return True


def _tenant() -> str:
    """Return the tenant whose request is being served; empty outside requests."""
    caller = calling.get(None)
    return "" if caller is None else caller.namespace
