"""Shows an operator requests besides the counters: spans, refusals, and log lines with tenant and trace."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from opentelemetry import propagate
from opentelemetry.trace import INVALID_SPAN, SpanKind, format_trace_id, get_current_span
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cacheblend_rag import spans
from cacheblend_rag.engines.vllm.starting import log_as_vllm
from cacheblend_rag.server.calling import calling

if TYPE_CHECKING:
    from cacheblend_rag.server.middleware import RequestLimits

_UNSEEN = {"/health", "/metrics", "/ping"}
_REFUSALS = {408, 413, 429, 507}


class Observe:
    """Makes each request with a key a span, a part of the one that its ``traceparent`` names, and counts what is refused."""

    def __init__(self, app: ASGIApp):
        """Observe ``app``."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http" or scope["path"] in _UNSEEN:
            await self._app(scope, receive, send)
            return
        method, status = scope["method"], 0

        async def watched(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        span = spans.begin(method, SpanKind.SERVER, propagate.extract(Headers(scope=scope)))
        with spans.current(span):
            await self._app(scope, receive, watched)
        # Not the path: a client chooses what it says.
        tenant, route = _tenant(), getattr(scope.get("route"), "path", "")
        span.update_name(f"{method} {route}".strip())
        span.set_attributes({"http.request.method": method, "http.response.status_code": status, "http.route": route})
        span.set_attribute("cacheblend.tenant", tenant)
        span.end()
        if status in _REFUSALS:
            limits: RequestLimits = scope["app"].state.limits
            limits.refused(tenant, status)


def share_logging() -> None:
    """Have this library's lines go where vLLM's go, in their format; each with ``tenant`` and ``trace_id`` where it has them."""
    log_as_vllm()
    for handler in logging.getLogger("vllm").handlers:
        handler.addFilter(_with_context)


def _with_context(record: logging.LogRecord) -> bool:
    """Add to a record whose request it is about; JSON shows that, text does not."""
    span = get_current_span()
    if span is not INVALID_SPAN and span.get_span_context().is_valid:
        record.trace_id = format_trace_id(span.get_span_context().trace_id)
    if (tenant := _tenant()) and not hasattr(record, "tenant"):
        record.tenant = tenant
    return True


def _tenant() -> str:
    """Return whose request is being served; empty where there is none."""
    caller = calling.get(None)
    return "" if caller is None else caller.namespace
