"""Checks the API key, the tenant's quota and the size of the body before every route, and formats errors.

vLLM adds middleware by name and without arguments, so these classes read their limits from the application's ``state.limits``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cacheblend_rag.engines.results import NotStored
from cacheblend_rag.errors import CacheBlendError, InputError, StoreError, UnknownChunkError
from cacheblend_rag.protocol import UNKNOWN_CHUNK
from cacheblend_rag.retrieval.registered import ConflictError
from cacheblend_rag.server.amounts import MOST_ITEMS, refusal
from cacheblend_rag.server.keys import Admission, Key, Keys, key_of, may, needed
from cacheblend_rag.server.loopback import names_this_machine
from cacheblend_rag.server.options import DEFAULT_BODY_LIMIT
from cacheblend_rag.server.tenants import Caller, calling

DEFAULT_BODY_DEADLINE_S = 60.0
TOKENIZED_LIMIT = 1 << 17
"""Most bytes of a body to tokenise or detokenise, which vLLM does not limit: a token takes a hundred bytes, and blocks."""
DEFAULT_HELD_LIMIT = 4 * DEFAULT_BODY_LIMIT
NAMES = (
    f"{__name__}.Admit",
    "cacheblend_rag.server.observing.Observe",
    f"{__name__}.RequireKey",
)
"""Values for vLLM's ``--middleware``. The last class runs first, so no byte of a body is read without a key."""

_log = logging.getLogger("vllm.cacheblend")  # child of vLLM's logger, which vLLM's flags configure
_TOKENIZING = {"/tokenize", "/detokenize"}
_ANYBODY = Key(b"")
_NO_LIMIT = Admission()
_KINDS: tuple[tuple[type[CacheBlendError], tuple[int, str, str | None]], ...] = (
    (UnknownChunkError, (404, UNKNOWN_CHUNK, "id")),
    (ConflictError, (409, "ConflictError", "id")),
    (InputError, (422, "UnprocessableEntityError", None)),
    (StoreError, (507, "StoreError", None)),
    (CacheBlendError, (500, "InternalServerError", None)),
)
_NOT_STORED = frozenset(NotStored)
_HIDDEN = "The server's store cannot be used now; whoever runs the server finds why in its log"


@dataclass(frozen=True)
class RequestLimits:
    """Holds the keys and limits that requests are checked against.

    Attributes:
        keys: API keys with their tenants; none: everybody may do everything.
        body: Largest request body in bytes.
        body_deadline_s: Seconds within which the whole body must arrive.
        characters: Most characters of one prompt or text in a body.
        held: Most bytes of the bodies of one tenant's requests at a time.
        local: Whether ``Host`` must be a name of this machine: a page in a local browser could otherwise have its own name
            resolved to this machine.
        admissions: Counters of each tenant's answers and tokens, by the tenant's name.
        refused: Called with the tenant and the status of each request that is refused for a limit.
    """

    keys: Keys = field(default_factory=Keys)
    body: int = DEFAULT_BODY_LIMIT
    body_deadline_s: float = DEFAULT_BODY_DEADLINE_S
    characters: int = DEFAULT_BODY_LIMIT
    held: int = DEFAULT_HELD_LIMIT
    local: bool = False
    admissions: Mapping[str, Admission] = field(default_factory=dict)
    refused: Callable[[str, int], None] = lambda tenant, status: None


def error_response(
    message: str, status: int, kind: str, param: str | None = None, headers: Mapping[str, str] = MappingProxyType({})
) -> JSONResponse:
    """Return an error in the shape that OpenAI clients read."""
    return JSONResponse({"error": {"message": message, "type": kind, "param": param, "code": status}}, status, headers)


def come_again(message: str, after_s: int, headers: Mapping[str, str] = MappingProxyType({})) -> JSONResponse:
    """Return a 429 answer that asks the client to try again in ``after_s`` seconds."""
    return error_response(message, 429, "RateLimitError", headers={"Retry-After": str(after_s), **headers})


def answer_errors(app: Any) -> None:
    """Make a Starlette application answer the library's errors; the first matching class of ``_KINDS`` decides how."""
    app.add_exception_handler(CacheBlendError, _answered)
    app.middleware_stack = None  # vLLM has built the stack already, without this handler


async def _answered(request: Request, error: Exception) -> JSONResponse:
    status, kind, param = next(answer for of, answer in _KINDS if isinstance(error, of))
    if kind == UNKNOWN_CHUNK and request.method == "POST":
        status = 400  # the body, not the path, names the chunk
    assert isinstance(error, CacheBlendError)
    return error_response(_told(str(error), error.public), status, kind, param)


def told(reasons: Mapping[str, str]) -> dict[str, str]:
    """Return why chunks are not stored, as the caller may read it."""
    return {name: _told(why, why in _NOT_STORED) for name, why in reasons.items()}


def _told(why: str, public: bool) -> str:
    """Return a reason, hidden unless it is public or the operator asks: it may name the server's files or machines."""
    if public or calling.get().operator:
        return why
    _log.error("What others than the operator are not told: %s", why)
    return _HIDDEN


class RequireKey:
    """Answers 401 to every request without a valid key, except health checks and CORS preflights.

    The rest of the server sees the key's tenant in :data:`~cacheblend_rag.server.tenants.calling`. A key whose role is too small
    gets 403. vLLM's own check leaves ``/metrics``, ``/tokenize`` and other routes open.
    """

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        limits = limits_of(scope)
        if limits.local and not names_this_machine(Headers(scope=scope).get("host", "localhost")):
            why = (
                "Without an API key this server answers to the names 'localhost' and '127.0.0.1' alone. Give it a key "
                "(CACHEBLEND_API_KEY) to ask by another name."
            )
            await error_response(why, 421, "MisdirectedRequest")(scope, receive, send)
            return
        if is_open(scope):
            await self._app(scope, receive, send)
            return
        key = key_of(_bearer(scope), limits.keys.keys) if limits.keys.keys else _ANYBODY
        if key is not None and may(key, scope.get("method", ""), _path(scope), scope["query_string"]):
            admission = limits.admissions.get(key.tenant, _NO_LIMIT)
            token = calling.set(Caller(key.tenant, key.operator, admission))
            try:
                await self._app(scope, receive, send)
            finally:
                calling.reset(token)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "Unauthorized"})
        else:
            await _forbidden(key, scope)(scope, receive, send)


def is_open(scope: Scope) -> bool:
    """Return whether a request needs no key: a health check, or a CORS preflight, which is answered before any route."""
    if scope["type"] != "http":
        return False
    method, headers = scope["method"], Headers(scope=scope)
    preflight = method == "OPTIONS" and "origin" in headers and "access-control-request-method" in headers
    return preflight or (method in ("GET", "HEAD") and _path(scope) == "/health")


def _forbidden(key: Key | None, scope: Scope) -> JSONResponse:
    """Return the 401 answer, or the 403 answer that names the role needed, or a 404 answer if the server has no such route."""
    if key is None:
        why = "This server asks for an API key: send the header 'Authorization: Bearer KEY'."
        return error_response(why, 401, "Unauthorized", headers={"WWW-Authenticate": "Bearer"})
    asked = f"{scope['method']} {_path(scope)}"
    if all(route.matches(scope)[0] is Match.NONE for route in scope["app"].routes):
        return error_response(f"This server has no {asked} for the model that it serves.", 404, "NotFoundError")
    role, operators = needed(scope["method"], _path(scope), scope["query_string"])
    whose = " of the default tenant" if operators else ""
    return error_response(
        f"{asked} takes a key of the role {role!r}{whose}. This key has the role {key.role!r} of the tenant {key.tenant!r}: ask "
        "whoever runs the server for one with that role.",
        403,
        "PermissionDeniedError",
    )


def _path(scope: Scope) -> str:
    """Return the path of the requested route, without a proxy's prefix."""
    return str(scope["path"]).removeprefix(scope.get("root_path", ""))


def _bearer(scope: Scope) -> str:
    """Return the bearer key of a request; empty if there is none."""
    scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
    return key if scheme.lower() == "bearer" else ""


def limits_of(scope: Scope) -> RequestLimits:
    """Return the limits of the application that serves a request."""
    found = scope["app"].state.limits
    assert isinstance(found, RequestLimits)
    return found


_CLOSE: Final = {"Connection": "close"}
"""Header of refusals of a body that may still be arriving."""


class Admit:
    """Refuses requests beyond the tenant's limits, and reads the bodies of all others within their own limits.

    Answers 429 to POST requests of a tenant that has too many answers being computed, has used up its tokens, or whose bodies
    exceed ``held`` bytes; 413 to bodies that are too large, with or without a declared length, or hold too much; 408 to slow
    bodies. Each request counts as one answer here; the renderer adds the request's other answers. A request that needs no key
    has no body: the middleware does not read the body.
    """

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif is_open(scope):
            await self._app(scope, _with_body(b"", receive), send)
        elif scope["method"] != "POST":
            await self._with_body_read(scope, receive, send)
        else:
            caller = calling.get()
            refusal = caller.count(1)
            if refusal is not None:
                await come_again(*refusal)(scope, receive, send)
                return

            async def timed(message: Message) -> None:
                if message.get("status") == 429:
                    MutableHeaders(scope=message).setdefault("Retry-After", "1")
                await send(message)

            try:
                await self._with_body_read(scope, receive, timed)
            finally:  # also after a client has disconnected in the middle of an answer
                caller.end()

    async def _with_body_read(self, scope: Scope, receive: Receive, send: Send) -> None:
        limits, path = limits_of(scope), _path(scope)
        if path in _TOKENIZING:
            limits = replace(limits, body=min(limits.body, TOKENIZED_LIMIT))
        declared = Headers(scope=scope).get("content-length", "0")
        if declared.isdecimal() and int(declared) > limits.body:
            await _too_large(limits.body)(scope, receive, send)
            return
        body, admission = bytearray(), calling.get().admission
        try:
            try:
                async with asyncio.timeout(limits.body_deadline_s):
                    if not await _fill(body, receive, limits, admission):
                        return  # the client has disconnected
                refused = await _refusal(body, path, limits, admission)
            except TimeoutError:
                why = f"The request's body has not come within {limits.body_deadline_s:g} seconds."
                refused = error_response(why, 408, "RequestTimeout", headers=_CLOSE)
            await (refused or self._app)(scope, _with_body(bytes(body), receive), send)
        finally:
            admission.held -= len(body)


async def _refusal(body: bytearray, path: str, limits: RequestLimits, admission: Admission) -> JSONResponse | None:
    if len(body) > limits.body:
        return _too_large(limits.body)
    if admission.held > limits.held:
        why = "The bodies of this tenant's requests that are being read and served have more than"
        return come_again(f"{why} {limits.held} bytes. Wait for some to end.", 1, _CLOSE)
    if len(body) <= min(limits.characters, MOST_ITEMS):  # holds too little of anything
        return None
    why = await asyncio.to_thread(refusal, path, body, limits.characters)
    return error_response(why, 413, "RequestTooLarge") if why else None


async def _fill(body: bytearray, receive: Receive, limits: RequestLimits, admission: Admission) -> bool:
    """Read a request's body until it ends or exceeds a limit; return whether the client is still connected."""
    # Every route reads its whole body first, so holding the body here costs nothing more.
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
    """Return a receive function that yields ``body`` first, and drops all later parts of a body."""
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


def _too_large(limit: int) -> JSONResponse:
    more = ", or start the server with a larger --max-request-size" if limit != TOKENIZED_LIMIT else ""
    return error_response(
        f"The request is larger than {limit} bytes. Send fewer or shorter texts at a time{more}.",
        413,
        "RequestTooLarge",
        headers=_CLOSE,
    )
