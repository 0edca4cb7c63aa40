"""What users and integrations hold: `BlendEngine`, and the values that go in and come out of it."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self

from cacheblend_rag.chunking import Chunk
from cacheblend_rag.errors import InputError, PromptTooLongError
from cacheblend_rag.kv import KVKey, ModelFingerprint, kv_key
from cacheblend_rag.prompt import BlendPrompt, ChunkRegistry
from cacheblend_rag.store import KVStore

Mode = Literal["blend", "prefill"]
Reuse = Literal["chunks", "prefix", "nothing"]
# What vLLM returns unless it is started with another `max_logprobs`.
_MOST_LOGPROBS = 20
# vLLM and OpenAI's API take no more.
_HOTTEST = 2.0


@dataclass(frozen=True)
class SamplingParams:
    """How to decode.

    Attributes:
        max_tokens: Most tokens to generate.
        temperature: 0 is greedy, 2 the highest.
        top_p: Nucleus mass in (0, 1].
        seed: Makes sampling repeatable.
        stop: Strings that end the answer; they are not part of it.
        json_schema: JSON schema (a mapping, or its JSON text) that the answer must conform to by guided decoding; engines
            without it (:attr:`BlendEngine.supports_json_schema`) refuse it.
        logprobs: Return the log-probability of every generated token and of so many likeliest alternatives (0 to 20).
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    json_schema: Mapping[str, Any] | str | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        """Refuse values outside their range."""
        if self.max_tokens < 1:
            raise InputError(f"max_tokens is {self.max_tokens}; give at least 1.")
        if not 0 <= self.temperature <= _HOTTEST:
            raise InputError(f"temperature is {self.temperature}; give 0 (greedy) to {_HOTTEST}.")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p is {self.top_p}; give a value in (0, 1].")
        if any(not s for s in self.stop):
            raise InputError("A stop string is empty; leave it out.")
        if self.logprobs is not None and not 0 <= self.logprobs <= _MOST_LOGPROBS:
            raise InputError(f"logprobs is {self.logprobs}; give 0 to {_MOST_LOGPROBS}.")


@dataclass(frozen=True)
class BlendSettings:
    """How to treat stored KV in one prompt.

    Attributes:
        ratio: Recompute ratio: the share of reused chunk tokens (outside the exact prefix) that is recomputed.
            None takes the model profile's.
        policy: Name of a token-selection policy (:mod:`cacheblend_rag.selection`).
        check_layers: Layers at which KV deviation is measured, ascending; None takes the model profile's.
        reuse: ``"chunks"`` blends all stored chunks, ``"prefix"`` reuses only what an ordinary prefix cache could,
            ``"nothing"`` is the full prefill.
    """

    ratio: float | None = None
    policy: str = "hkvd"
    check_layers: tuple[int, ...] | None = None
    reuse: Reuse = "chunks"

    def __post_init__(self) -> None:
        """Refuse a ratio outside [0, 1]."""
        if self.ratio is not None and not 0 <= self.ratio <= 1:
            raise InputError(f"ratio is {self.ratio}; give a value from 0 (full KV reuse) to 1 (full recompute).")


@dataclass(frozen=True)
class Usage:
    """Token counts of one request.

    ``prompt_tokens = reused_tokens + recomputed_tokens + (text and missing chunks)``; what was not reused was computed:
    ``computed_tokens = prompt_tokens - reused_tokens``.

    Attributes:
        prompt_tokens: Tokens in the prompt.
        reused_tokens: Prompt tokens whose stored KV was used as it is (the exact prefix included).
        recomputed_tokens: Tokens with stored KV that the selection policy chose to recompute.
        computed_tokens: Prompt tokens that went through all layers: text, missing chunks and recomputed ones.
        completion_tokens: Tokens generated.
    """

    prompt_tokens: int
    reused_tokens: int
    recomputed_tokens: int
    computed_tokens: int
    completion_tokens: int = 0


@dataclass(frozen=True)
class Timings:
    """Wall-clock seconds of one request.

    Attributes:
        load_s: Time the computation waited for stored KV.
        ttft_s: Time to first token, from the engine's receipt of the prompt.
        total_s: Time to the last token.
    """

    load_s: float
    ttft_s: float
    total_s: float


@dataclass(frozen=True)
class TokenLogprob:
    """How likely the model held a generated token, before temperature and nucleus.

    Attributes:
        token_id: The token.
        logprob: Its natural-log probability.
        top: Token ids and log-probabilities of the likeliest tokens, likeliest first; as many as were asked for.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def likeliest(logprobs: Iterable[tuple[int, float]], count: int) -> tuple[tuple[int, float], ...]:
    """Return the ``count`` likeliest of token ids with their log-probabilities, likeliest first."""
    return tuple(sorted(logprobs, key=lambda pair: -pair[1])[:count])


@dataclass(frozen=True)
class Generation:
    """A finished answer.

    Attributes:
        text: The answer.
        token_ids: Generated token ids, the end-of-sequence token excluded.
        finish_reason: ``"stop"`` or ``"length"``.
        mode: ``"blend"`` if stored KV was used anywhere in the prompt, else ``"prefill"``.
        reason: Why that mode, in words.
        missing: Ids of chunks whose KV was not in the store (computed in place, then written back).
        logprobs: One for each of ``token_ids``, where :attr:`SamplingParams.logprobs` asked for them.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: Literal["stop", "length"]
    mode: Mode
    reason: str
    usage: Usage
    timings: Timings
    missing: tuple[str, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class StreamEvent:
    """A piece of a streamed answer; the last event carries the whole :class:`Generation`.

    Without a tokenizer there is no text, and an event for every token all the same.
    """

    text: str
    generation: Generation | None = None


@dataclass(frozen=True)
class PrecomputeReport:
    """What :meth:`BlendEngine.precompute` did. ``failed`` maps chunk ids to why they are not in the store."""

    computed: int = 0
    present: int = 0
    tokens: int = 0
    seconds: float = 0.0
    failed: dict[str, str] = field(default_factory=dict)


def check_length(prompt_tokens: int, max_tokens: int, context_window: int) -> None:
    """Refuse an empty prompt, and one that leaves no room for its answer.

    Raises:
        PromptTooLongError: Prompt and ``max_tokens`` exceed the context window, or there is no prompt.
    """
    if not prompt_tokens:
        raise PromptTooLongError("The prompt is empty; give at least one token.")
    if prompt_tokens + max_tokens > context_window:
        raise PromptTooLongError(
            f"The prompt has {prompt_tokens} tokens; with max_tokens={max_tokens} that exceeds the model's context window of "
            f"{context_window}. Retrieve fewer or smaller chunks, or lower max_tokens."
        )


class BlendEngine(ABC):
    """A model that answers prompts made of text and chunks, reusing the chunks' stored KV.

    Safe to call from several threads; how much runs side by side is the engine's business.

    Attributes:
        fingerprint: Identity of the model, part of every store key.
        tokenizer: The model's Hugging Face tokenizer.
        context_window: Most tokens of prompt and completion together.
        registry: Chunks the engine knows: references are resolved and plain text is matched against it.
        header_ids: Tokens that chunks are precomputed behind.
        store: Where their KV is kept, if this process can see it.
        supports_json_schema: Whether it has guided decoding (:attr:`SamplingParams.json_schema`).
    """

    supports_json_schema: ClassVar[bool] = False

    fingerprint: ModelFingerprint
    tokenizer: Any
    context_window: int
    registry: ChunkRegistry
    header_ids: tuple[int, ...]
    store: KVStore | None = None

    @abstractmethod
    def precompute(self, chunks: Sequence[Chunk], progress: Callable[[int], None] | None = None) -> PrecomputeReport:
        """Compute, store and register the KV of ``chunks`` (those already stored are skipped).

        Args:
            chunks: Chunks cut with this engine's tokenizer.
            progress: Called with the number of chunks finished since its last call.

        Raises:
            StoreError: The store cannot be written. What was stored before stays.
        """

    @abstractmethod
    def stream(
        self, prompt: BlendPrompt | str, sampling: SamplingParams | None = None, settings: BlendSettings | None = None
    ) -> Iterator[StreamEvent]:
        """Answer piece by piece. Closing the iterator ends the work.

        A plain string is searched for registered chunks; without any it is an ordinary prefill.

        Raises:
            PromptTooLongError: Prompt and ``max_tokens`` exceed the context window.
            UnknownChunkError: A reference to a chunk that was never registered.
        """

    def generate(
        self, prompt: BlendPrompt | str, sampling: SamplingParams | None = None, settings: BlendSettings | None = None
    ) -> Generation:
        """Answer in one piece; raises as :meth:`stream` does."""
        last = None
        for event in self.stream(prompt, sampling, settings):
            last = event.generation
        assert last is not None
        return last

    async def aprecompute(
        self, chunks: Sequence[Chunk], progress: Callable[[int], None] | None = None
    ) -> PrecomputeReport:
        """Async twin of :meth:`precompute`, off the event loop."""
        return await asyncio.to_thread(self.precompute, chunks, progress)

    async def agenerate(
        self, prompt: BlendPrompt | str, sampling: SamplingParams | None = None, settings: BlendSettings | None = None
    ) -> Generation:
        """Async twin of :meth:`generate`, off the event loop; the pool of threads bounds how many hold KV at once."""
        return await asyncio.to_thread(self.generate, prompt, sampling, settings)

    async def astream(
        self, prompt: BlendPrompt | str, sampling: SamplingParams | None = None, settings: BlendSettings | None = None
    ) -> AsyncIterator[StreamEvent]:
        """Async twin of :meth:`stream`; a cancelled consumer stops the work at its next token."""
        async for event in _iterate_in_thread(lambda: self.stream(prompt, sampling, settings)):
            yield event

    def forget(self, chunk_ids: Iterable[str]) -> int:
        """Drop chunks from the registry and their KV from the store; unknown ids are ignored.

        Returns:
            How many stored entries were removed.
        """
        chunks = self._registered(chunk_ids)
        self.registry.remove([chunk.id for chunk in chunks])
        if self.store is None:
            return 0
        return sum(self.store.delete(key) for chunk in chunks for key in self._store_keys(chunk))

    def prefetch(self, chunk_ids: Iterable[str]) -> None:
        """Move the stored KV of chunks into the fastest tier (blocking); what is not stored or not known is left out."""
        if self.store is None:
            return
        for chunk in self._registered(chunk_ids):
            for key in self._store_keys(chunk):
                kv = self.store.get(key)
                if kv is not None:
                    kv.finish()

    def _registered(self, chunk_ids: Iterable[str]) -> list[Chunk]:
        return [chunk for chunk_id in chunk_ids if (chunk := self.registry.get(chunk_id)) is not None]

    def _store_keys(self, chunk: Chunk) -> Sequence[KVKey]:
        return [kv_key(self.fingerprint, self.header_ids, chunk.token_ids)]

    def flush(self) -> None:  # noqa: B027 - most engines write before they return
        """Wait until the chunks that answers found missing have been written back."""

    @abstractmethod
    def close(self) -> None:
        """Release the model and the store. The engine must not be used afterwards."""

    def __enter__(self) -> Self:
        """Use as a context manager that closes."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Close."""
        self.close()


async def last_generation(events: AsyncIterator[StreamEvent]) -> Generation:
    """Run a stream to its end and return the whole answer."""
    last = None
    async for event in events:
        last = event.generation
    assert last is not None
    return last


async def _iterate_in_thread(make: Callable[[], Iterator[StreamEvent]]) -> AsyncIterator[StreamEvent]:
    loop = asyncio.get_running_loop()
    # Unbounded and thread-safe: the producer never waits on the event loop, so it cannot deadlock with a gone consumer.
    events: asyncio.Queue[StreamEvent | BaseException | None] = asyncio.Queue()
    stop = threading.Event()

    def send(item: StreamEvent | BaseException | None) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(events.put_nowait, item)

    def produce() -> None:
        try:
            iterator = make()
            for event in iterator:
                send(event)
                if stop.is_set():
                    break
            if isinstance(iterator, Generator):
                iterator.close()
            send(None)
        except BaseException as error:  # handed to the consumer, which re-raises it
            send(error)

    threading.Thread(target=produce, name="cacheblend-stream", daemon=True).start()
    try:
        while (item := await events.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stop.set()
