"""Builds requests to a server, reads streamed answers, and translates the client library's errors."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

from openai import APIConnectionError, APIError, APIStatusError, APITimeoutError, AsyncOpenAI, OpenAI, Timeout

from cacheblend_rag.blending.outcome import PromptOutcome
from cacheblend_rag.engines.base import Request
from cacheblend_rag.engines.results import Generation, StreamEvent, Timings, TokenLogprob, likeliest
from cacheblend_rag.engines.sampling import REPEATED
from cacheblend_rag.errors import CacheBlendError, InputError, PromptTooLongError, ServerError, UnknownChunkError
from cacheblend_rag.prompts.chunk import Chunk, begins_with_space
from cacheblend_rag.protocol import UNKNOWN_CHUNK

T = TypeVar("T")

_BATCH_ITEMS, _BATCH_BYTES = 64, 4 << 20


def completion_request(model: str, request: Request, prefix: str = "") -> dict[str, Any]:
    """Return the arguments of a streamed completion by the server's model called ``model``.

    ``prefix`` is the text (BOS) that the server's tokenizer adds in front; if the prompt's text begins with ``prefix``,
    ``prefix`` is removed.

    Raises:
        InputError: The JSON schema is not JSON.
    """
    prompt, sampling = request.prompt, request.sampling
    blend = request.settings.to_params()
    if prompt.text is None:
        blend["spans"] = [
            {"id": span.chunk.id, "start": span.start, "end": span.end, "text": span.chunk.text or None}
            for span in prompt.spans
        ]
    extra: dict[str, Any] = {"cacheblend": blend, "return_token_ids": True}
    # The server may have other defaults, from the model's generation_config.json.
    extra |= {"top_k": sampling.top_k, "min_p": 0.0, "repetition_penalty": 1.0}
    if sampling.stop_repeating:
        extra["repetition_detection"] = REPEATED
    if sampling.json_schema is not None:
        extra["structured_outputs"] = {"json": sampling.schema()}
    if sampling.logprobs is not None:
        extra["return_tokens_as_token_ids"] = True
    return {
        "model": model,
        "prompt": list(prompt.token_ids) if prompt.text is None else prompt.text.removeprefix(prefix),
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": sampling.seed,
        "logprobs": sampling.logprobs,
        "stop": list(sampling.stop) or None,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "stream": True,
        "stream_options": {"include_usage": True},
        "extra_body": extra,
    }


def chunk_bodies(chunks: Iterable[Chunk]) -> list[dict[str, Any]]:
    """Return chunks in the form that ``POST /v1/chunks`` takes."""
    return [
        {
            "id": chunk.id,
            "text": chunk.text,
            "token_ids": list(chunk.token_ids),
            "metadata": json.loads(json.dumps(dict(chunk.metadata), default=str)),
        }
        for chunk in chunks
    ]


def weight_of(chunk: Chunk) -> int:
    """Return the approximate size of a chunk in a request's body, in bytes."""
    return 4 * len(chunk.text) + 8 * len(chunk.token_ids)


def batches(items: Iterable[T], weigh: Callable[[T], int], most: int = _BATCH_BYTES) -> Iterator[list[T]]:
    """Yield groups of at most 64 items and ``most`` bytes, by default well below a server's limit on request sizes."""
    batch: list[T] = []
    size = 0
    for item in items:
        weight = weigh(item)
        if batch and (len(batch) == _BATCH_ITEMS or size + weight > most):
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += weight
    if batch:
        yield batch


TOO_LONG = ("input_tokens", "input_text")
"""Parameters that vLLM's error names if a prompt is too long."""


class ServerAnswer:
    """Collects one answer: :meth:`push` takes every piece of the stream, then :meth:`end` returns the last event."""

    def __init__(self, url: str, fingerprint: str, tokenizer: Any, top_logprobs: int = 0):
        """Start the clock of the time to first token, for an answer of the model with this ``fingerprint``.

        ``top_logprobs`` is the number of most likely tokens to keep for every token.
        """
        self._url, self._fingerprint, self._tokenizer, self._top = url, fingerprint, tokenizer, top_logprobs
        self._begin = time.perf_counter()
        self._ttft_s = 0.0
        self._pieces = 0
        self._text = ""
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._finish: str | None = None
        self._stop: Any = None
        self._usage: Any = None

    def begun(self) -> bool:
        """Return whether a piece has arrived."""
        return self._pieces > 0

    def push(self, piece: Any) -> str:
        """Take a piece of the stream; return the piece's text."""
        self._pieces += 1
        if piece.usage is not None:
            self._usage = piece.usage
        text = ""
        for choice in piece.choices:
            fields = choice.model_extra or {}
            new = fields.get("token_ids") or ()
            if new and not self._token_ids:
                self._ttft_s = time.perf_counter() - self._begin
            self._token_ids.extend(new)
            if choice.logprobs is not None:
                self._logprobs.extend(_logprobs(choice.logprobs, self._top))
            text += choice.text
            if choice.finish_reason is not None:
                self._finish, self._stop = choice.finish_reason, fields.get("stop_reason")
        if not self._text and text.startswith(" ") and not begins_with_space(self._tokenizer, self._token_ids):
            text = text[1:]
        self._text += text
        return text

    def end(self) -> StreamEvent:
        """Return the last event.

        Raises:
            ServerError: The stream ended too early, or another model answered.
        """
        extra = (self._usage.model_extra or {}) if self._usage is not None else {}
        if self._finish not in ("stop", "length", "repetition") or "cacheblend" not in extra:
            how = "ended the answer early" if self._finish is None else f"ended the answer with {self._finish!r}"
            raise ServerError(
                f"The server at {self._url} {how}, after {len(self._token_ids)} tokens; its log says why."
            )
        try:
            outcome = PromptOutcome.from_params(extra["cacheblend"])
        except InputError as error:
            raise ServerError(f"{error} Give the server at {self._url} the version of this package.") from error
        if outcome.fingerprint != self._fingerprint:
            raise ServerError(
                f"The server at {self._url} now serves another model ({outcome.fingerprint[:8]}, not {self._fingerprint[:8]}): "
                "connect again, with a new RemoteEngine."
            )
        ids = self._token_ids
        if self._finish == "stop" and not isinstance(self._stop, str) and ids:
            ids = ids[:-1]  # the end-of-sequence token
        total = time.perf_counter() - self._begin
        timings = Timings(self._ttft_s or total, total)
        finish: Literal["stop", "length"] = "length" if self._finish == "length" else "stop"
        return StreamEvent("", Generation.of(outcome, self._text, ids, finish, timings, self._logprobs))


def _logprobs(found: Any, top: int) -> list[TokenLogprob]:
    # Tokens are named by id, as in "token_id:17", because different tokens can have the same text.
    tokens = [_token_id(name) for name in found.tokens]
    ranked = [
        likeliest(((_token_id(name), value) for name, value in (others or {}).items()), top)
        for others in found.top_logprobs or [None] * len(tokens)
    ]
    return [TokenLogprob(t, p, r) for t, p, r in zip(tokens, found.token_logprobs, ranked, strict=True)]


def _token_id(name: str) -> int:
    return int(name.removeprefix("token_id:"))


_NO_KEY = "none"  # the client library requires a key


class Wire:
    """Holds the clients for one server: one for threads, and one per event loop, since connections cannot leave a loop.

    Attributes:
        url: Address of the server, including ``/v1``.
    """

    def __init__(self, url: str, api_key: str | None, timeout_s: float, connect_timeout_s: float, max_retries: int):
        """Create the client for threads; nothing is sent yet."""
        self.url = url
        self._timeout_s = timeout_s
        self._arguments: dict[str, Any] = {
            "base_url": url,
            "api_key": api_key or _NO_KEY,
            "timeout": Timeout(timeout_s, connect=connect_timeout_s),
            "max_retries": max_retries,
        }
        self.sync = OpenAI(**self._arguments)
        self._async: dict[asyncio.AbstractEventLoop, tuple[AsyncOpenAI, AsyncGenerator[AsyncOpenAI, None]]] = {}

    async def asynchronous(self) -> AsyncOpenAI:
        """Return the client of the running event loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._async:
            opened = self._open(loop)
            self._async[loop] = await anext(opened), opened
        return self._async[loop][0]

    async def _open(self, loop: asyncio.AbstractEventLoop) -> AsyncGenerator[AsyncOpenAI, None]:
        """Yield the client of ``loop``; the ending loop closes this generator, and so the client's connections."""
        async with AsyncOpenAI(**self._arguments) as client:
            try:
                yield client
            finally:
                del self._async[loop]

    @contextmanager
    def explained(self, begun: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Translate the client library's errors; ``begun`` returns whether an answer has begun to arrive.

        Raises:
            ServerError: The server does not answer, or refuses the request.
            PromptTooLongError: The server refuses the prompt because of its length.
            UnknownChunkError: The server does not know a chunk.
        """
        try:
            yield
        except APIError as error:
            lost = isinstance(error, APIConnectionError) and not isinstance(error, APITimeoutError) and begun()
            raise (self._broken(error) if lost else self._explain(error)) from error
        except Exception as error:
            if not _is_transport(error):
                raise
            raise self._broken(error) from error

    def _explain(self, error: APIError) -> CacheBlendError:
        if isinstance(error, APITimeoutError) and type(error.__cause__).__name__ != "ConnectTimeout":
            return ServerError(
                f"The server at {self.url} did not answer within {self._timeout_s:g} s. It may be busy: try again, or give "
                "RemoteEngine a longer timeout_s."
            )
        if isinstance(error, APIConnectionError):
            cause = error.__cause__ or error
            return ServerError(
                f"No server answers at {self.url} ({cause}). Start one with `cacheblend serve --model MODEL --store DIR --port "
                "PORT`, or check the address."
            )
        if isinstance(error, APIStatusError):
            return self._refused(error.status_code, _message(error), error.type, error.param)
        return ServerError(f"The server at {self.url} ended the answer with an error: {_message(error)}")

    def _refused(self, status: int, message: str, kind: str | None, param: str | None) -> CacheBlendError:
        if status == 401:
            return ServerError(
                f"The server at {self.url} refuses the API key. Give api_key=, or set CACHEBLEND_API_KEY.", 401
            )
        if status == 400 and param in TOO_LONG:
            return PromptTooLongError(f"The server at {self.url} refuses the prompt's length: {message}")
        if kind == UNKNOWN_CHUNK:
            return UnknownChunkError(f"The server at {self.url}: {message}")
        return ServerError(f"The server at {self.url} refuses with status {status}: {message}", status)

    def _broken(self, error: Exception) -> ServerError:
        return ServerError(
            f"The connection to the server at {self.url} broke off in the middle of an answer ({type(error).__name__}: {error}). "
            "The server may have been stopped; try again."
        )

    def close(self) -> None:
        """Close the threads' connections; the connections of an event loop are closed with the loop."""
        self.sync.close()


def with_version(url: str) -> str:
    """Return the address with ``/v1``.

    Raises:
        InputError: ``url`` is not an HTTP address.
    """
    url = url.rstrip("/")
    if not url.startswith(("http://", "https://")):
        raise InputError(f"{url!r} is not the address of a server; write http://HOST:PORT/v1.")
    return url if url.endswith("/v1") else f"{url}/v1"


def _is_transport(error: Exception) -> bool:
    # Versions of the client library use different HTTP libraries, in which the base class has the same name.
    return any(cls.__name__ == "TransportError" for cls in type(error).__mro__)


def _message(error: APIError) -> str:
    body = error.body
    if isinstance(body, dict):
        inner = body.get("error", body)
        if isinstance(inner, dict) and isinstance(inner.get("message"), str):
            return str(inner["message"])
    return error.message
