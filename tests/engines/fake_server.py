"""A server on a real socket that misbehaves as a test directs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from cacheblend_rag.blending.outcome import PromptOutcome, Usage
from cacheblend_rag.blending.profile import ModelProfile
from cacheblend_rag.prompts.chunk import encoder_for
from cacheblend_rag.prompts.prompt import header_ids, rag_header
from cacheblend_rag.protocol import TOKENIZER_PROBE, ModelInfo
from tests.conftest import tokenizer_named

Handler = Callable[[Request], Any]


class FakeServer:
    """Answers ``GET /v1/chunks/stats`` as a healthy server does, everything else with :attr:`handle`.

    Attributes:
        requests: Method, path and parsed body of each request.
    """

    def __init__(self, **model: Any):
        tokenizer = tokenizer_named("byte_level")
        described = {
            "name": "fake",
            "served_as": ("fake",),
            "fingerprint": "f" * 32,
            "tokenizer": "nowhere/to-be-found",
            "tokenizer_probe": tuple(encoder_for(tokenizer).template(TOKENIZER_PROBE)),
            "header_ids": header_ids(tokenizer, rag_header(tokenizer)),
            "context_window": 500,
            "blended": True,
            "num_layers": 8,
            "profile": ModelProfile(),
        }
        self.model = ModelInfo(**{**described, **model})
        self.requests: list[tuple[str, str, Any]] = []
        self.handle: Handler = lambda request: Response(status_code=404)
        app = Starlette(routes=[Route("/{path:path}", self._serve, methods=["GET", "POST", "DELETE"])])
        config = uvicorn.Config(app, port=0, log_level="critical", lifespan="off", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    async def _serve(self, request: Request) -> Response:
        text = await request.body()
        self.requests.append((request.method, request.url.path, json.loads(text) if text else None))
        if request.url.path == "/v1/chunks/stats":
            return JSONResponse({"model": self.model.model_dump(mode="json")})
        answer = self.handle(request)
        return await answer if asyncio.iscoroutine(answer) else answer

    def __enter__(self) -> FakeServer:
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        return self

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"

    def __exit__(self, *exc: object) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join()


def stream(*pieces: Any, breaks: bool = False) -> StreamingResponse:
    """Return server-sent events; ``breaks`` cuts the connection instead of ending them."""

    async def events() -> AsyncIterator[str]:
        for piece in pieces:
            yield f"data: {piece if isinstance(piece, str) else json.dumps(piece)}\n\n"
            await asyncio.sleep(0)
        if breaks:
            raise ConnectionError("cut")

    return StreamingResponse(events(), media_type="text/event-stream")


def piece(text: str, *token_ids: int, finish: str | None = None, stop: Any = None) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "token_ids": list(token_ids), "finish_reason": finish, "stop_reason": stop}
    return {"id": "x", "object": "text_completion", "created": 1, "model": "fake", "choices": [choice]}


def usage(prompt: int = 9, **report: Any) -> dict[str, Any]:
    outcome = PromptOutcome("blend", "stored KV", Usage(prompt, 6, 1, 3, 2), load_s=0.25, fingerprint="f" * 32)
    counts = {"prompt_tokens": prompt, "completion_tokens": 2, "total_tokens": prompt + 2}
    whole = {**counts, "cacheblend": {**outcome.to_params(), **report}}
    return {"id": "x", "object": "text_completion", "created": 1, "model": "fake", "choices": [], "usage": whole}


@contextlib.contextmanager
def unused_port() -> Any:
    import socket

    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]  # bound, not listening: connections are refused
