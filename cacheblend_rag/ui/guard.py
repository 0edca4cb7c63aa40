"""Keeps other sites away from the page: checks who sends a request, and sets the page's content security policy."""

from __future__ import annotations

import secrets
from http.cookies import CookieError, SimpleCookie

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cacheblend_rag.server.loopback import names_this_machine

# Gradio's page has scripts in its HTML and turns texts into functions, which 'unsafe-inline' and 'unsafe-eval' allow.
# The page loads and requests nothing from other origins: an image that a model's answer names on another machine is not
# fetched.
_POLICY = "; ".join(
    (
        "default-src 'self'",
        "script-src 'self' 'unsafe-inline' 'unsafe-eval'",
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data: blob:",
        "font-src 'self' data:",
        "object-src 'none'",
        "base-uri 'self'",
        "form-action 'self'",
        "frame-ancestors 'none'",
    )
)
_READING = ("GET", "HEAD")
_ROUTES = "/gradio_api/"
_STARTED = "/gradio_api/startup-events"
"""Path that Gradio requests from itself while it starts; the response reports whether Gradio has started."""


class Guard:
    """Answers requests of this page only: ASGI middleware around Gradio's application.

    A request must name this machine as its host (else 421, because of DNS rebinding), and must not come from another
    site's page. A request that reads, uploads or asks about documents also needs the token that the browser received
    with the page (else 403).
    """

    def __init__(self, app: ASGIApp):
        self._app, self._token = app, secrets.token_urlsafe(32)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] != "http":  # the page has no websocket
            return
        elif (refusal := self._refusal(scope)) is not None:
            await refusal(scope, receive, send)
        else:
            await self._app(scope, receive, self._telling(scope, send))

    def _refusal(self, scope: Scope) -> PlainTextResponse | None:
        headers, path, reading = Headers(scope=scope), scope["path"], scope["method"] in _READING
        if not names_this_machine(headers.get("host", "")):
            why = "This page answers to the names 'localhost' and '127.0.0.1' alone. Open it by one of them."
            return PlainTextResponse(why, 421)
        # A link on another site may open the page: that site cannot read the page's content.
        followed = path == "/" and reading and headers.get("sec-fetch-mode") == "navigate"
        if _from_elsewhere(headers) and not followed:
            return PlainTextResponse("The page of another site asked for that.", 403)
        if (reading and not path.startswith(_ROUTES)) or path == _STARTED or self._has_token(scope, headers):
            return None
        return PlainTextResponse("The page was started anew, or not opened in this browser. Load it again.", 403)

    def _has_token(self, scope: Scope, headers: Headers) -> bool:
        try:
            found = SimpleCookie(headers.get("cookie", "")).get(_cookie(scope))
        except CookieError:
            return False
        return found is not None and secrets.compare_digest(found.value.encode(), self._token.encode())

    def _telling(self, scope: Scope, send: Send) -> Send:
        """Return a ``send`` that adds the policy to all responses, and the token cookie to the page's response."""

        async def told(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["Content-Security-Policy"] = _POLICY
                if scope["path"] == "/":
                    how = "Path=/; HttpOnly; SameSite=Strict"
                    headers.append("Set-Cookie", f"{_cookie(scope)}={self._token}; {how}")
            await send(message)

        return told


def _cookie(scope: Scope) -> str:
    """Return the cookie's name, with the port: browsers share cookies among all ports of a machine."""
    return f"cacheblend-{scope['server'][1]}"


def _from_elsewhere(headers: Headers) -> bool:
    """Return whether the headers tell that the page of another site, or of another port, has made the request."""
    origin = headers.get("origin")
    if origin is not None and origin != f"http://{headers.get('host')}":
        return True
    return headers.get("sec-fetch-site", "none") not in ("none", "same-origin")
