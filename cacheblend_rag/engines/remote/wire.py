"""Connects to a server, and words what failures mean to a user."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from openai import (
    APIConnectionError,
    APIError,
    APIStatusError,
    APITimeoutError,
    AsyncOpenAI,
    OpenAI,
    Timeout,
)

from cacheblend_rag.errors import CacheBlendError, InputError, PromptTooLongError, ServerError, UnknownChunkError

_NO_KEY = "none"  # the client library insists on one


class Wire:
    """Clients for one server: one for threads, one for each event loop (its connections cannot leave the loop).

    Attributes:
        url: Where the server is, ``/v1`` included.
    """

    def __init__(self, url: str, api_key: str | None, timeout_s: float, connect_timeout_s: float, max_retries: int):
        """Prepare to connect; nothing is sent yet."""
        self.url = url
        self._timeout_s = timeout_s
        self._arguments: dict[str, Any] = {
            "base_url": url,
            "api_key": api_key or _NO_KEY,
            "timeout": Timeout(timeout_s, connect=connect_timeout_s),
            "max_retries": max_retries,
        }
        self.sync = OpenAI(**self._arguments)
        self._async: WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncOpenAI] = WeakKeyDictionary()

    def asynchronous(self) -> AsyncOpenAI:
        """Return the client of the running event loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._async:
            self._async[loop] = AsyncOpenAI(**self._arguments)
        return self._async[loop]

    @contextmanager
    def explained(self, begun: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Turn the client library's errors into ours; ``begun`` says whether an answer has begun to arrive.

        Raises:
            ServerError: The server does not answer or refuses.
            PromptTooLongError: It refuses because of the prompt's length.
            UnknownChunkError: It does not know a chunk.
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
        if isinstance(error, APITimeoutError):
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
            return self._refused(error.status_code, _message(error))
        return ServerError(f"The server at {self.url} ended the answer with an error: {_message(error)}")

    def _refused(self, status: int, message: str) -> CacheBlendError:
        lowered = message.lower()
        if status == 401:
            return ServerError(
                f"The server at {self.url} refuses the API key. Give api_key=, or set CACHEBLEND_API_KEY.", 401
            )
        if status == 400 and ("context length" in lowered or "context window" in lowered or "max_model_len" in lowered):
            return PromptTooLongError(f"The server at {self.url} refuses the prompt's length: {message}")
        if status in (400, 404) and "No chunk has the id" in message:
            return UnknownChunkError(f"The server at {self.url}: {message}")
        return ServerError(f"The server at {self.url} refuses with status {status}: {message}", status)

    def _broken(self, error: Exception) -> ServerError:
        return ServerError(
            f"The connection to the server at {self.url} broke off in the middle of an answer ({type(error).__name__}: {error}). "
            "The server may have been stopped; try again."
        )

    def close(self) -> None:
        """Close the connections of threads; those of event loops go with their loops."""
        self.sync.close()


def with_version(url: str) -> str:
    """Return the address with ``/v1``.

    Raises:
        InputError: It is no address.
    """
    url = url.rstrip("/")
    if not url.startswith(("http://", "https://")):
        raise InputError(f"{url!r} is not the address of a server; write http://HOST:PORT/v1.")
    return url if url.endswith("/v1") else f"{url}/v1"


def _is_transport(error: Exception) -> bool:
    # The client library has changed its HTTP library between versions; both call the base of such errors the same.
    return any(cls.__name__ == "TransportError" for cls in type(error).__mro__)


def _message(error: APIError) -> str:
    body = error.body
    if isinstance(body, dict):
        inner = body.get("error", body)
        if isinstance(inner, dict) and isinstance(inner.get("message"), str):
            return str(inner["message"])
    return error.message
