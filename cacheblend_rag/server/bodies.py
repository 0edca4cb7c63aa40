"""Limits a request's body: bytes, values, and the time it may take to come."""

from __future__ import annotations

import asyncio
from typing import Final

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cacheblend_rag.server.calling import calling
from cacheblend_rag.server.middleware import RequestLimits, error_response, is_open, limits_of
from cacheblend_rag.server.quotas import Admission

_SLICE: Final = 1 << 16
"""Bytes looked at in one go, so that other threads get their turns."""


class LimitBody:
    """Answers 413 to bodies that are too large, whether they say so or not, or have too many values, and 408 to slow ones.

    429 where all with such keys together are too much.
    What anybody may ask without a key has no body: whatever comes is not read.
    """

    def __init__(self, app: ASGIApp):
        """Guard ``app``."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if is_open(scope):
            await self._app(scope, _with_body(b"", receive), send)
            return
        limits = limits_of(scope)
        declared = Headers(scope=scope).get("content-length", "0")
        if declared.isdecimal() and int(declared) > limits.body:
            await _too_large(limits.body)(scope, receive, send)
            return
        body, admission = bytearray(), calling.get().admission
        try:
            try:
                async with asyncio.timeout(limits.body_deadline_s):
                    if not await _fill(body, receive, limits, admission):
                        return  # the client has gone
                refusal = await _refusal(body, limits, admission)
            except TimeoutError:
                refusal = _too_slow(limits.body_deadline_s)
            await (refusal or self._app)(scope, _with_body(bytes(body), receive), send)
        finally:
            admission.held -= len(body)


async def _refusal(body: bytearray, limits: RequestLimits, admission: Admission) -> JSONResponse | None:
    if len(body) > limits.body:
        return _too_large(limits.body)
    if why := admission.body_refusal(limits.held):
        return _too_much(why)
    # Fewer bytes than values are allowed need no counting.
    if len(body) > limits.values and await asyncio.to_thread(count_values, body) > limits.values:
        return _too_many(limits.values)
    return None


def count_values(body: bytes | bytearray) -> int:
    """Return about how many values a JSON text holds, its members' names included; at least half of the true number.

    A parser holds the interpreter until it has made all of them: tens of bytes of brackets take it as long as a page of text,
    and nothing else is served meanwhile.
    """
    found, inside, escaped = 0, False, False
    for start in range(0, len(body), _SLICE):
        part = bytes(body[start : start + _SLICE])
        if escaped:
            part = part[1:]
        escaped = (len(part) - len(part.rstrip(b"\\"))) % 2 == 1
        pieces = part.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(pieces[inside::2])
        found += sum(map(outside.count, (b",", b"[", b"{", b":")))
        inside ^= len(pieces) % 2 == 0
    return found


async def _fill(body: bytearray, receive: Receive, limits: RequestLimits, admission: Admission) -> bool:
    """Read a request's body, or its beginning where that is too much already; say whether the client is still there."""
    # Every route reads its whole body before it does anything, so holding it here costs nothing more.
    more = True
    while more and len(body) <= limits.body and admission.held <= limits.held:
        message = await receive()
        if message["type"] != "http.request":
            return False
        piece = message.get("body", b"")
        body += piece
        admission.held += len(piece)
        more = message.get("more_body", False)
    return True


def _with_body(body: bytes, receive: Receive) -> Receive:
    """Return what receives ``body`` first, and nothing that is still coming of another."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if not given:
            given = True
            return {"type": "http.request", "body": body, "more_body": False}
        while (message := await receive())["type"] == "http.request":
            pass
        return message

    return replay


def _too_slow(deadline_s: float) -> JSONResponse:
    response = error_response(f"The request's body has not come within {deadline_s:g} seconds.", 408, "RequestTimeout")
    response.headers["Connection"] = "close"
    return response


def _too_large(limit: int) -> JSONResponse:
    response = error_response(
        f"The request is larger than {limit} bytes. Send fewer or shorter texts at a time, or start the server with a "
        "larger --max-request-size.",
        413,
        "RequestTooLarge",
    )
    response.headers["Connection"] = "close"
    return response


def _too_many(values: int) -> JSONResponse:
    return error_response(
        f"The request holds more than {values} values. Send fewer at a time, and long prompts as text, not as token ids.",
        413,
        "RequestTooLarge",
    )


def _too_much(why: str) -> JSONResponse:
    response = error_response(why, 429, "RateLimitError")
    response.headers["Retry-After"] = "1"
    response.headers["Connection"] = "close"
    return response
