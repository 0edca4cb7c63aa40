"""What stands before every route: the API key, and the limit on a request's size.

vLLM adds middleware by name and without arguments, so these read theirs from the application's ``state.limits``.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from functools import cached_property

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

DEFAULT_BODY_LIMIT = 32 << 20
NAMES = tuple(f"{__name__}.{name}" for name in ("LimitBody", "RequireKey"))
"""For vLLM's ``--middleware``. The last one is asked first: no byte of a body is read without the key."""

_OPEN_PATHS = {"/health"}


@dataclass(frozen=True)
class Limits:
    """Who may send how much.

    Attributes:
        keys: API keys, each as good as the others; none: everybody may.
        body: Largest request body in bytes.
    """

    keys: tuple[str, ...] = ()
    body: int = DEFAULT_BODY_LIMIT

    @cached_property
    def digests(self) -> list[bytes]:
        """Hashes of the keys."""
        return [_digest(key) for key in self.keys]


def error_response(message: str, status: int, kind: str, param: str | None = None) -> JSONResponse:
    """Return an error in the shape that OpenAI clients read."""
    return JSONResponse({"error": {"message": message, "type": kind, "param": param, "code": status}}, status)


class RequireKey:
    """Answers 401 to every request but a health check and a CORS preflight that does not carry one of the keys.

    vLLM's own check leaves ``/metrics``, ``/tokenize`` and others open.
    """

    def __init__(self, app: ASGIApp):
        """Guard ``app``."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] not in ("http", "websocket") or _is_preflight(scope) or self._may(scope):
            await self._app(scope, receive, send)
            return
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "Unauthorized"})
            return
        response = error_response(
            "This server asks for an API key: send the header 'Authorization: Bearer KEY'.", 401, "Unauthorized"
        )
        response.headers["WWW-Authenticate"] = "Bearer"
        await response(scope, receive, send)

    def _may(self, scope: Scope) -> bool:
        known = _limits(scope).digests
        if not known or scope["path"].removeprefix(scope.get("root_path", "")) in _OPEN_PATHS:
            return True
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        # Every key is compared, so that the time taken says nothing about which one nearly fits.
        matches = [secrets.compare_digest(_digest(key), digest) for digest in known]
        return scheme.lower() == "bearer" and any(matches)


class LimitBody:
    """Answers 413 to requests whose body is larger than the limit, whether they say so or not."""

    def __init__(self, app: ASGIApp):
        """Guard ``app``."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limit = _limits(scope).body
        declared = Headers(scope=scope).get("content-length", "0")
        if declared.isdecimal() and int(declared) > limit:
            await _too_large(limit)(scope, receive, send)
            return
        # Every route reads its whole body before it does anything, so holding it here costs nothing more.
        held: list[Message] = []
        size, more = 0, True
        while more:
            message = await receive()
            held.append(message)
            more = message["type"] == "http.request" and message.get("more_body", False)
            size += len(message.get("body", b""))
            if size > limit:
                await _too_large(limit)(scope, receive, send)
                return
        held.reverse()

        async def replay() -> Message:
            return held.pop() if held else await receive()

        await self._app(scope, replay, send)


def _too_large(limit: int) -> JSONResponse:
    response = error_response(
        f"The request is larger than {limit} bytes. Send fewer or shorter texts at a time, or start the server with a "
        "larger --max-request-size.",
        413,
        "RequestTooLarge",
    )
    response.headers["Connection"] = "close"
    return response


def _is_preflight(scope: Scope) -> bool:
    """Say whether a browser asks what it may send; vLLM's CORS middleware answers that, and no route sees it."""
    headers = Headers(scope=scope)
    return scope.get("method") == "OPTIONS" and "origin" in headers and "access-control-request-method" in headers


def _limits(scope: Scope) -> Limits:
    found = scope["app"].state.limits
    assert isinstance(found, Limits)
    return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
