"""What stands before every route: the API key, and the limit on a request's size."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

DEFAULT_BODY_LIMIT = 32 << 20
_OPEN_PATHS = {"/health"}


def error_response(message: str, status: int, kind: str, param: str | None = None) -> JSONResponse:
    """Return an error in the shape that OpenAI clients read."""
    return JSONResponse({"error": {"message": message, "type": kind, "param": param, "code": status}}, status)


class RequireKey:
    """Answers 401 to every request but a health check and a CORS preflight that does not carry one of the keys.

    vLLM's own check leaves ``/metrics``, ``/tokenize`` and others open.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]):
        """Guard ``app`` with ``keys``; each is as good as the others."""
        self._app = app
        self._keys = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] not in ("http", "websocket") or scope.get("method") == "OPTIONS" or self._may(scope):
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
        if scope["path"].removeprefix(scope.get("root_path", "")) in _OPEN_PATHS:
            return True
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        digest = hashlib.sha256(key.encode()).digest()
        # Every key is compared, so that the time taken says nothing about which one nearly fits.
        matches = [secrets.compare_digest(digest, known) for known in self._keys]
        return scheme.lower() == "bearer" and any(matches)


class LimitBody:
    """Answers 413 to requests whose body is larger than ``limit`` bytes, whether they say so or not."""

    def __init__(self, app: ASGIApp, limit: int):
        """Guard ``app``."""
        self._app, self._limit = app, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "0")
        if declared.isdecimal() and int(declared) > self._limit:
            await self._refuse()(scope, receive, send)
            return
        # Every route reads its whole body before it does anything, so holding it here costs nothing more.
        held: list[Message] = []
        size, more = 0, True
        while more:
            message = await receive()
            held.append(message)
            more = message["type"] == "http.request" and message.get("more_body", False)
            size += len(message.get("body", b""))
            if size > self._limit:
                await self._refuse()(scope, receive, send)
                return
        held.reverse()

        async def replay() -> Message:
            return held.pop() if held else await receive()

        await self._app(scope, replay, send)

    def _refuse(self) -> JSONResponse:
        response = error_response(
            f"The request is larger than {self._limit} bytes. Send fewer or shorter texts at a time, or start the server with a "
            "larger --max-request-size.",
            413,
            "RequestTooLarge",
        )
        response.headers["Connection"] = "close"
        return response
