"""Stands before every route: checks API key, tenant's quota, and (``bodies.py``) the limits on a request's body.

vLLM adds middleware by name and without arguments, so these read theirs from the application's ``state.limits``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from cacheblend_rag.server.calling import Caller, calling
from cacheblend_rag.server.keys import Key, key_of, may
from cacheblend_rag.server.options import DEFAULT_BODY_LIMIT
from cacheblend_rag.server.quotas import Admission, Quota
from cacheblend_rag.store.namespace import DEFAULT, Namespace

DEFAULT_BODY_DEADLINE_S = 60.0
DEFAULT_VALUES_LIMIT = 500_000
DEFAULT_HELD_LIMIT = 4 * DEFAULT_BODY_LIMIT
NAMES = (
    "cacheblend_rag.server.bodies.LimitBody",
    f"{__name__}.Admit",
    "cacheblend_rag.server.observing.Observe",
    f"{__name__}.RequireKey",
)
"""For vLLM's ``--middleware``. The last one is asked first: no byte of a body is read without the key."""

_OPEN_PATHS = {"/health"}
_ANYBODY = Key(b"")
_NO_LIMIT = Admission()


@dataclass(frozen=True)
class RequestLimits:
    """Says who may send how much.

    Attributes:
        keys: API keys; none: everybody may do everything.
        body: Largest request body in bytes.
        body_deadline_s: Seconds until all of it must have come.
        values: Most JSON values in it.
        held: Most bytes of the bodies of one tenant's requests at a time.
        local: Whether requests must call the server by a name of this machine: another name may be that of a page in a browser
            here, whose owner has it resolved to this machine.
        tenants: Whose the keys are.
        quotas: What tenants may use, by their names; of others there is no limit.
        admissions: The requests of those tenants, by their names.
        refused: Told of the tenant and the status of what is refused for a limit.
    """

    keys: tuple[Key, ...] = ()
    body: int = DEFAULT_BODY_LIMIT
    body_deadline_s: float = DEFAULT_BODY_DEADLINE_S
    values: int = DEFAULT_VALUES_LIMIT
    held: int = DEFAULT_HELD_LIMIT
    local: bool = False
    tenants: tuple[Namespace, ...] = (DEFAULT,)
    quotas: Mapping[str, Quota] = field(default_factory=dict)
    admissions: Mapping[str, Admission] = field(default_factory=dict)
    refused: Callable[[str, int], None] = lambda tenant, status: None


def error_response(message: str, status: int, kind: str, param: str | None = None) -> JSONResponse:
    """Return an error in the shape that OpenAI clients read."""
    return JSONResponse({"error": {"message": message, "type": kind, "param": param, "code": status}}, status)


class RequireKey:
    """Answers 401 to every request but a health check and a CORS preflight that does not carry one of the keys.

    From here on the request is its key's tenant's (:data:`~cacheblend_rag.server.calling.calling`). A key whose role is too small
    gets 403. vLLM's own check leaves ``/metrics``, ``/tokenize`` and others open.
    """

    def __init__(self, app: ASGIApp):
        """Guard ``app``."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        if limits_of(scope).local and not _called_locally(scope):
            await _misdirected()(scope, receive, send)
            return
        keys = limits_of(scope).keys
        key = key_of(_bearer(scope), keys) if keys else _ANYBODY
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if is_open(scope):
            await self._app(scope, receive, send)
            return
        if key is not None and may(key, scope.get("method", ""), path, scope["query_string"]):
            admission = limits_of(scope).admissions.get(key.tenant, _NO_LIMIT)
            token = calling.set(Caller(key.tenant, key.operator, admission))
            try:
                await self._app(scope, receive, send)
            finally:
                calling.reset(token)
            return
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "Unauthorized"})
            return
        if key is not None:
            message = (
                f"A key of the role {key.role!r} of the tenant {key.tenant!r} may not do that; ask whoever runs the server for "
                "another."
            )
            await error_response(message, 403, "PermissionDeniedError")(scope, receive, send)
            return
        response = error_response(
            "This server asks for an API key: send the header 'Authorization: Bearer KEY'.", 401, "Unauthorized"
        )
        response.headers["WWW-Authenticate"] = "Bearer"
        await response(scope, receive, send)


class Admit:
    """Answers 429 to what would compute something while its tenant has too many requests served, or has used its tokens."""

    def __init__(self, app: ASGIApp):
        """Guard ``app``."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http" or scope["method"] != "POST" or is_open(scope):
            await self._app(scope, receive, send)
            return
        admission = calling.get().admission
        refusal = admission.refusal()
        if refusal is not None:
            message, after_s = refusal
            response = error_response(message, 429, "RateLimitError")
            response.headers["Retry-After"] = str(after_s)
            await response(scope, receive, send)
            return
        admission.begin()
        try:
            await self._app(scope, receive, send)
        finally:  # a client that goes away in the middle of an answer ends it, too
            admission.end()


def is_open(scope: Scope) -> bool:
    """Say whether anybody may ask that: a health check, or a CORS preflight, which is answered before any route."""
    if scope["type"] != "http":
        return False
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    return (path in _OPEN_PATHS and scope["method"] in ("GET", "HEAD")) or _is_preflight(scope)


def _bearer(scope: Scope) -> str:
    """Return the key that a request carries, empty without one."""
    scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
    return key if scheme.lower() == "bearer" else ""


def _called_locally(scope: Scope) -> bool:
    try:
        name = urlsplit("//" + Headers(scope=scope).get("host", "localhost")).hostname or ""
        return name == "localhost" or ip_address(name).is_loopback
    except ValueError:
        return False


def _misdirected() -> JSONResponse:
    return error_response(
        "Without an API key this server answers to the names 'localhost' and '127.0.0.1' alone. Give it a key "
        "(CACHEBLEND_API_KEY) to ask by another name.",
        421,
        "MisdirectedRequest",
    )


def _is_preflight(scope: Scope) -> bool:
    """Say whether a browser asks what it may send; vLLM's CORS middleware answers that, and no route sees it."""
    headers = Headers(scope=scope)
    return scope.get("method") == "OPTIONS" and "origin" in headers and "access-control-request-method" in headers


def limits_of(scope: Scope) -> RequestLimits:
    """Return the limits of the application that serves a request."""
    found = scope["app"].state.limits
    assert isinstance(found, RequestLimits)
    return found
