"""Answers prompts with the model of a `cacheblend serve`, on this or another machine."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar
from urllib.parse import quote

from pydantic import ValidationError

from cacheblend_rag.blending.gate import GateReport
from cacheblend_rag.blending.settings import BlendSettings
from cacheblend_rag.engines.base import BlendEngine, Prompt, Request
from cacheblend_rag.engines.entries import Ranking
from cacheblend_rag.engines.models import is_named, model_directory
from cacheblend_rag.engines.remote.wire import (
    ServerAnswer,
    Wire,
    batches,
    chunk_bodies,
    completion_request,
    weight_of,
    with_version,
)
from cacheblend_rag.engines.results import PrecomputeReport, StreamEvent
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.spans import RequestSpans
from cacheblend_rag.errors import InputError, ModelError, ServerError
from cacheblend_rag.prompts.chunk import Chunk, encoder_for, pack_ids
from cacheblend_rag.prompts.prompt import BlendPrompt, ChunkRef, TokenizedPrompt, tokenize
from cacheblend_rag.prompts.registry import ChunkRegistry
from cacheblend_rag.protocol import TOKENIZER_PROBE, ModelInfo
from cacheblend_rag.spans import headers
from cacheblend_rag.store.kv import ModelFingerprint

_QUERY_BYTES = 32_000  # a server accepts twice as many


class RemoteEngine(BlendEngine):
    """Answers prompts with the model of a `cacheblend serve`.

    The client tokenises prompts of text and chunks with the server's tokenizer, and sends token ids and the chunks'
    positions. A plain string is sent as text, in which the server searches for chunks. All methods may be called from
    several threads and event loops; the server decides how many requests run at the same time.

    Example:
        Answer a prompt on a server::

            with RemoteEngine("http://localhost:8000/v1", api_key="secret") as engine:
                print(engine.generate("Who is the captain of the Lonely Tide?").text)
    """

    supports_json_schema: ClassVar[bool] = True

    def __init__(
        self,
        url: str = "http://localhost:8000/v1",
        *,
        api_key: str | None = None,
        model: str | None = None,
        tokenizer: Any = None,
        fingerprint: ModelFingerprint | None = None,
        timeout_s: float = 600.0,
        connect_timeout_s: float = 5.0,
        max_retries: int = 2,
        holder: str = "",
    ):
        """Connect to a server and fetch the description of its model.

        Args:
            url: Address of the server; ``/v1`` is appended if it is missing.
            api_key: API key of the server; None takes ``CACHEBLEND_API_KEY`` from the environment.
            model: Name under which the server must serve the model; None takes the server's first name.
            tokenizer: Tokenizer of the model; None loads the tokenizer from the server's source (a hub name, or a
                directory that exists on this machine too).
            fingerprint: Fingerprint of the required model, such as an index's; None accepts any model.
            timeout_s: Maximum wait for the next piece of an answer, in seconds.
            connect_timeout_s: Maximum wait for a connection, in seconds.
            max_retries: Number of retries of a request after a failed connection, 408, 409, 429 or 5xx. A request is
                not retried once its answer has begun.
            holder: Name under which this application registers chunks. All clients share the chunks of a namespace, and
                :meth:`forget` does not remove another holder's chunks; clients with the same name count as one holder.

        Raises:
            ServerError: No server answers at ``url``, or the server is no `cacheblend serve` of this version, serves
                another model, or refuses the request.
            ModelError: The tokenizer cannot be loaded, or differs from the server's tokenizer.
        """
        again = partial(RemoteEngine, url, api_key=api_key, model=model, tokenizer=tokenizer, holder=holder)
        self._again = partial(again, timeout_s=timeout_s, connect_timeout_s=connect_timeout_s, max_retries=max_retries)
        self._holder = holder
        key = api_key or os.environ.get("CACHEBLEND_API_KEY")
        self._wire = Wire(with_version(url), key, timeout_s, connect_timeout_s, max_retries)
        self.model = self._model_info()
        self.fingerprint = ModelFingerprint(self.model.fingerprint, self.model.name)
        self._check_model(model, fingerprint)
        self._name = model or self.model.served_as[0]
        self.tokenizer = _tokenizer_of(self.model, tokenizer)
        self.header_ids = self.model.header_ids
        self.context_window, self.num_layers = self.model.context_window, self.model.num_layers
        self.gate = GateReport(self.model.blended, self.model.reason)
        self.profile = self.model.profile
        self.registry = ChunkRegistry()

    def _check_model(self, name: str | None, fingerprint: ModelFingerprint | None) -> None:
        """Raise ServerError if the server's model does not have the required name or fingerprint."""
        if name is not None and name not in self.model.served_as:
            raise ServerError(
                f"The server at {self._wire.url} serves {', '.join(self.model.served_as)}, not {name!r}. Ask for that, or start "
                f"`cacheblend serve --model {name}`."
            )
        if fingerprint is not None and fingerprint != self.fingerprint:
            raise ServerError(
                f"The server at {self._wire.url} serves another model or dtype ({self.model.name}, "
                f"{self.fingerprint.digest[:8]}) than the one wanted ({fingerprint.name}, {fingerprint.digest[:8]}). "
                f"Start `cacheblend serve --model {fingerprint.name}`."
            )

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Return how another process connects to the same server; registered chunks are not passed on."""
        if self._reopen is not None:
            return super().__reduce__()
        return partial(self._again, fingerprint=self.fingerprint), ()

    def _become(self) -> None:
        raise InputError(
            f"The server decides by its key what an engine may use: make a RemoteEngine with api_key= of {self.namespace.name!r} "
            "instead."
        )

    @property
    def ranking(self) -> Ranking:
        """Return ``"off"``: the server decides when chunks are ranked."""
        return "off"

    @ranking.setter
    def ranking(self, when: Ranking) -> None:
        raise InputError(
            f"ranking is {when!r}, but the server decides when chunks are ranked: leave it out with a server."
        )

    @property
    def controlled(self) -> bool:
        """Return whether the server has a loading controller; see :class:`BlendEngine`."""
        return self.model.controlled

    def _model_info(self) -> ModelInfo:
        try:
            return ModelInfo.model_validate(self._get("/chunks/stats").get("model"))
        except ServerError as error:
            if error.status in (404, 405):
                raise self._not_ours() from error
            raise
        except ValidationError as error:
            raise self._not_ours() from error

    def _not_ours(self) -> ServerError:
        return ServerError(
            f"The server at {self._wire.url} has no /v1/chunks of this version: it is not a `cacheblend serve`, or one of "
            "another version. Check the address, or start one."
        )

    def precompute(self, chunks: Sequence[Chunk], progress: Callable[[int], None] | None = None) -> PrecomputeReport:
        """See :class:`BlendEngine`; the server computes, stores and registers the chunks, in batches."""
        self.check_open()
        begin = time.perf_counter()
        total = PrecomputeReport()
        waiting = {chunk.id: chunk for chunk in chunks}
        held = {"holder": self._holder} if self._holder else {}
        if progress is not None and len(chunks) > len(waiting):
            progress(len(chunks) - len(waiting))
        for batch in batches(waiting.values(), weight_of):
            with self._wire.explained():
                answer = self._wire.sync.post(
                    "/chunks",
                    cast_to=dict[str, Any],
                    body={"chunks": chunk_bodies(batch), **held},
                    options={"headers": headers()},
                )
            total += PrecomputeReport(**answer["report"])
            self.registry.add(batch)
            if progress is not None:
                progress(len(batch))
        return replace(total, seconds=time.perf_counter() - begin)

    def stream(
        self, prompt: Prompt | Request, sampling: SamplingParams | None = None, settings: BlendSettings | None = None
    ) -> Iterator[StreamEvent]:
        """See :class:`BlendEngine`.

        Raises:
            ServerError: The server does not answer, refuses, or ends the answer early.
        """
        return self._stream(self._completion(self.request(prompt, sampling, settings)))

    def _completion(self, request: Request) -> dict[str, Any]:
        # A rendered chat may begin with the BOS token that the server's tokenizer adds; the model must see only one.
        prefix = str(self.tokenizer.decode(list(encoder_for(self.tokenizer).prefix_ids)))
        return completion_request(self._name, request, prefix)

    def _stream(self, request: dict[str, Any]) -> Generator[StreamEvent, None, None]:
        answer = ServerAnswer(self._wire.url, self.fingerprint.digest, self.tokenizer, request["logprobs"] or 0)
        with RequestSpans(self.namespace.name, "client") as spans:  # the server's spans are children of these spans
            request["extra_headers"] = spans.headers
            with self._wire.explained(answer.begun), self._wire.sync.completions.create(**request) as pieces:
                for piece in pieces:
                    text = answer.push(piece)
                    if text:
                        yield StreamEvent(text)
            yield _told(answer.end(), spans)

    async def astream(
        self, prompt: Prompt | Request, sampling: SamplingParams | None = None, settings: BlendSettings | None = None
    ) -> AsyncIterator[StreamEvent]:
        """Answer asynchronously; see :meth:`stream`. Cancelling the consumer ends the work on the server."""
        asked = await asyncio.to_thread(self.request, prompt, sampling, settings)
        request = self._completion(asked)
        answer = ServerAnswer(self._wire.url, self.fingerprint.digest, self.tokenizer, request["logprobs"] or 0)
        with RequestSpans(self.namespace.name, "client") as spans:  # the server's spans are children of these spans
            request["extra_headers"] = spans.headers
            client = await self._wire.asynchronous()
            with self._wire.explained(answer.begun):
                async with await client.completions.create(**request) as pieces:
                    async for piece in pieces:
                        text = answer.push(piece)
                        if text:
                            yield StreamEvent(text)
            yield _told(answer.end(), spans)

    def tokenize(self, prompt: Prompt) -> TokenizedPrompt:
        """See :class:`BlendEngine`; the server searches plain strings for chunks, and returns chunks unknown here."""
        if isinstance(prompt, str):
            tokens = tokenize(BlendPrompt((prompt,) if prompt else ()), self.tokenizer, self.registry)
            return replace(tokens, text=prompt)
        if isinstance(prompt, BlendPrompt):
            for segment in prompt.segments:
                if isinstance(segment, ChunkRef) and segment.id not in self.registry:
                    self.registry.add([self._fetch(segment.id)])
        return super().tokenize(prompt)

    def _fetch(self, chunk_id: str) -> Chunk:
        """Return the server's chunk with this id; raise UnknownChunkError if the server does not know the id."""
        found = self._get(f"/chunks/{quote(chunk_id, safe='')}")
        return Chunk(found["id"], found["text"], pack_ids(found["token_ids"]), found["metadata"])

    def _get(self, path: str) -> dict[str, Any]:
        with self._wire.explained():
            answer = self._wire.sync.get(path, cast_to=dict[str, Any])
        if not isinstance(answer, dict):  # a page from another kind of server
            raise self._not_ours()
        return answer

    def forget(self, chunks: Iterable[str | Chunk]) -> int:
        """Remove chunks from the registry and from the server, and delete their KV.

        The server ignores unknown ids, chunks of its own index, and chunks that another ``holder`` has registered.

        Returns:
            Number of chunks that the server has removed.
        """
        names = [chunk if isinstance(chunk, str) else chunk.id for chunk in chunks]
        gone = 0
        fields = (f"id={quote(name, safe='')}" for name in names)
        for batch in batches(fields, len, _QUERY_BYTES):
            query = "&".join([*batch, f"holder={quote(self._holder, safe='')}"])
            with self._wire.explained():
                answer = self._wire.sync.delete(f"/chunks?{query}", cast_to=dict[str, Any])
            gone += len(answer["data"])
        self.registry.remove(names)
        return gone

    def flush(self) -> None:
        """Wait until the server has written back missing KV; see :class:`BlendEngine`."""
        with self._wire.explained():
            self._wire.sync.post("/chunks/flush", cast_to=dict[str, Any])

    def prefetch(self, chunk_ids: Iterable[str]) -> None:
        """Do nothing: the server manages its own tiers."""

    def close(self) -> None:
        """Close the connections; the server keeps running."""
        self._closed = True
        self._wire.close()


def _tokenizer_of(model: ModelInfo, given: Any) -> Any:
    """Return the ``given`` tokenizer; for None load the server's tokenizer on this machine.

    Raises:
        ModelError: The tokenizer cannot be loaded here, or splits text differently from the server's.
    """
    if given is None:
        from transformers import AutoTokenizer

        name = model.tokenizer
        try:
            # AutoTokenizer downloads the tokenizer's files only: a client needs no weights.
            given = AutoTokenizer.from_pretrained(model_directory(name) if is_named(name) else name)
        except (OSError, ValueError) as error:
            raise ModelError(
                f"The server's tokenizer {name!r} cannot be loaded here: {error} Give tokenizer= (that of the same model)."
            ) from error
    if tuple(encoder_for(given).template(TOKENIZER_PROBE)) != model.tokenizer_probe:
        raise ModelError(
            f"The tokenizer is not that of the server's model {model.name}: it splits text otherwise. Give the tokenizer of that "
            "model."
        )
    return given


def _told(last: StreamEvent, spans: RequestSpans) -> StreamEvent:
    """Add the outcome of the ``last`` event to the request's spans, and return the event."""
    assert last.generation is not None
    spans.answered(last.generation)
    return last
