"""Stands around every route: checks API key, tenant's quota, and the limits on a request's body, and words errors.

vLLM adds middleware by name and without arguments, so these read theirs from the application's ``state.limits``.
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
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cacheblend_rag.errors import CacheBlendError, InputError, StoreError, UnknownChunkError
from cacheblend_rag.retrieval.registered import ConflictError
from cacheblend_rag.server.keys import Admission, Key, Keys, QuotaError, key_of, may
from cacheblend_rag.server.loopback import names_this_machine
from cacheblend_rag.server.options import DEFAULT_BODY_LIMIT
from cacheblend_rag.server.tenants import Caller, calling

DEFAULT_BODY_DEADLINE_S = 60.0
DEFAULT_VALUES_LIMIT = 500_000
TOKENIZED_LIMIT = 1 << 17
"""Bytes of a body of which vLLM counts the tokens however many they are: each takes a hundred bytes and everybody's time."""
DEFAULT_HELD_LIMIT = 4 * DEFAULT_BODY_LIMIT
NAMES = (
    "cacheblend_rag.server.middleware.LimitBody",
    f"{__name__}.Admit",
    "cacheblend_rag.server.observing.Observe",
    f"{__name__}.RequireKey",
)
"""For vLLM's ``--middleware``. The last one is asked first: no byte of a body is read without the key."""

_log = logging.getLogger("vllm.cacheblend")  # below vLLM's logger, whose handlers and level its flags set
_OPEN_PATHS = {"/health"}
_TOKENIZING = {"/tokenize", "/detokenize"}
_ANYBODY = Key(b"")
_NO_LIMIT = Admission()
_KINDS: tuple[tuple[type[CacheBlendError], tuple[int, str, str | None]], ...] = (
    (UnknownChunkError, (404, "NotFoundError", "id")),
    (ConflictError, (409, "ConflictError", "id")),
    (InputError, (422, "UnprocessableEntityError", None)),
    (StoreError, (507, "StoreError", None)),
    (CacheBlendError, (500, "InternalServerError", None)),
)
_THEIRS = (InputError, QuotaError)
_HIDDEN = "The server's store cannot be used now; whoever runs the server finds why in its log"


@dataclass(frozen=True)
class RequestLimits:
    """Says who may send how much.

    Attributes:
        keys: API keys, and whose they are; none: everybody may do everything.
        body: Largest request body in bytes.
        body_deadline_s: Seconds until all of it must have come.
        values: Most JSON values in it.
        held: Most bytes of the bodies of one tenant's requests at a time.
        local: Whether requests must call the server by a name of this machine: another name may be that of a page in a browser
            here, whose owner has it resolved to this machine.
        admissions: The requests of those tenants, by their names.
        refused: Told of the tenant and the status of what is refused for a limit.
    """

    keys: Keys = field(default_factory=Keys)
    body: int = DEFAULT_BODY_LIMIT
    body_deadline_s: float = DEFAULT_BODY_DEADLINE_S
    values: int = DEFAULT_VALUES_LIMIT
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
    """Return a refusal to who shall try again in ``after_s`` seconds."""
    return error_response(message, 429, "RateLimitError", headers={"Retry-After": str(after_s), **headers})


def answer_errors(app: Any) -> None:
    """Have a Starlette application answer the library's errors; a subclass goes before its base."""
    app.add_exception_handler(CacheBlendError, _answered)
    app.middleware_stack = None  # vLLM's is built already, without this one


async def _answered(_: Request, error: Exception) -> JSONResponse:
    status, kind, param = next(answer for of, answer in _KINDS if isinstance(error, of))
    why = str(error) if isinstance(error, _THEIRS) else told({"": str(error)})[""]
    return error_response(why, status, kind, param)


def told(reasons: Mapping[str, str]) -> dict[str, str]:
    """Return why chunks are not stored, to others than the operator without what names the server's files and machines."""
    if calling.get().operator:
        return dict(reasons)
    found = {}
    for name, why in reasons.items():
        # Of a chunk itself they say "it ..."; of the model that it is not blended.
        theirs = why.startswith(("it ", "not blended"))
        if not theirs:
            _log.error("What others than the operator are not told: %s", why)
        found[name] = why if theirs else _HIDDEN
    return found


class RequireKey:
    """Answers 401 to every request but a health check and a CORS preflight that does not carry one of the keys.

    From here on the request is its key's tenant's (:data:`~cacheblend_rag.server.tenants.calling`). A key whose role is too small
    gets 403. vLLM's own check leaves ``/metrics``, ``/tokenize`` and others open.
    """

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        if limits_of(scope).local and not names_this_machine(Headers(scope=scope).get("host", "localhost")):
            why = (
                "Without an API key this server answers to the names 'localhost' and '127.0.0.1' alone. Give it a key "
                "(CACHEBLEND_API_KEY) to ask by another name."
            )
            await error_response(why, 421, "MisdirectedRequest")(scope, receive, send)
            return
        keys = limits_of(scope).keys.keys
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
        why = "This server asks for an API key: send the header 'Authorization: Bearer KEY'."
        response = error_response(why, 401, "Unauthorized", headers={"WWW-Authenticate": "Bearer"})
        await response(scope, receive, send)


class Admit:
    """Answers 429 to what would compute something while its tenant has too many answers computed, or has used its tokens.

    A request counts as one here; as how many more is said where it is rendered.
    """

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or is_open(scope):
            await self._app(scope, receive, send)
            return
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
            await self._app(scope, receive, timed)
        finally:  # a client that goes away in the middle of an answer ends it, too
            caller.end()


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


def _is_preflight(scope: Scope) -> bool:
    """Say whether a browser asks what it may send; vLLM's CORS middleware answers that, and no route sees it."""
    headers = Headers(scope=scope)
    return scope.get("method") == "OPTIONS" and "origin" in headers and "access-control-request-method" in headers


def limits_of(scope: Scope) -> RequestLimits:
    """Return the limits of the application that serves a request."""
    found = scope["app"].state.limits
    assert isinstance(found, RequestLimits)
    return found


_SLICE: Final = 1 << 16
"""Bytes looked at in one go, so that other threads get their turns."""
_CLOSE: Final = {"Connection": "close"}
"""For refusals of a body of which more may come."""


class LimitBody:
    """Answers 413 to bodies that are too large, whether they say so or not, or have too many values, and 408 to slow ones.

    429 where all with such keys together are too much.
    What anybody may ask without a key has no body: whatever comes is not read.
    """

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if is_open(scope):
            await self._app(scope, _with_body(b"", receive), send)
            return
        limits = limits_of(scope)
        if scope["path"].removeprefix(scope.get("root_path", "")) in _TOKENIZING:
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
                        return  # the client has gone
                refusal = await _refusal(body, limits, admission)
            except TimeoutError:
                why = f"The request's body has not come within {limits.body_deadline_s:g} seconds."
                refusal = error_response(why, 408, "RequestTimeout", headers=_CLOSE)
            await (refusal or self._app)(scope, _with_body(bytes(body), receive), send)
        finally:
            admission.held -= len(body)


async def _refusal(body: bytearray, limits: RequestLimits, admission: Admission) -> JSONResponse | None:
    if len(body) > limits.body:
        return _too_large(limits.body)
    if admission.held > limits.held:
        why = "The bodies of this tenant's requests that are being read and served have more than"
        return come_again(f"{why} {limits.held} bytes. Wait for some to end.", 1, _CLOSE)
    # Fewer bytes than values are allowed need no counting.
    if len(body) > limits.values and await asyncio.to_thread(count_values, body) > limits.values:
        return error_response(
            f"The request holds more than {limits.values} values. Send fewer at a time, and long prompts as text, not as token "
            "ids.",
            413,
            "RequestTooLarge",
        )
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


def _too_large(limit: int) -> JSONResponse:
    more = ", or start the server with a larger --max-request-size" if limit != TOKENIZED_LIMIT else ""
    return error_response(
        f"The request is larger than {limit} bytes. Send fewer or shorter texts at a time{more}.",
        413,
        "RequestTooLarge",
        headers=_CLOSE,
    )
