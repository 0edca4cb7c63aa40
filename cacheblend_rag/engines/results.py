"""Holds an engine's answers, streamed pieces, timings and reports; passes streams from threads to event loops."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Literal

from cacheblend_rag.blending.outcome import PromptOutcome


@dataclass(frozen=True)
class Timings:
    """Holds wall-clock seconds of one request.

    Attributes:
        ttft_s: Time to first token, from the engine's receipt of the prompt.
        total_s: Time to the last token.

    Example:
        Print how long an answer took::

            timings = engine.generate(prompt).timings
            print(f"{timings.ttft_s:.2f} s to the first token, {timings.total_s:.2f} s in total")
    """

    ttft_s: float
    total_s: float


@dataclass(frozen=True)
class TokenLogprob:
    """Holds the probability that the model gave a generated token, before temperature and nucleus sampling.

    Attributes:
        token_id: Id of the token.
        logprob: Natural logarithm of the token's probability.
        top: Token ids and log-probabilities of the most likely tokens, most likely first; as many as requested.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def likeliest(logprobs: Iterable[tuple[int, float]], count: int) -> tuple[tuple[int, float], ...]:
    """Return the ``count`` most likely of pairs of token id and log-probability, most likely first."""
    return tuple(sorted(logprobs, key=lambda pair: -pair[1])[:count])


@dataclass(frozen=True, kw_only=True)
class Generation(PromptOutcome):
    """Holds a finished answer, and the outcome of its prompt.

    Attributes:
        text: Text of the answer.
        token_ids: Generated token ids, without the end-of-sequence token.
        finish_reason: ``"stop"`` or ``"length"``.
        timings: Wall-clock seconds.
        logprobs: One item for each of ``token_ids`` if :attr:`SamplingParams.logprobs` is set; else empty.

    Example:
        Print an answer, and the number of prompt tokens that reused stored KV::

            generation = engine.generate(prompt)
            print(generation.text, generation.finish_reason)
            print(generation.usage.reused_tokens, "of", generation.usage.prompt_tokens, "tokens reused")
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: Literal["stop", "length"]
    timings: Timings
    logprobs: tuple[TokenLogprob, ...] = ()

    @classmethod
    def of(
        cls,
        outcome: PromptOutcome,
        text: str,
        token_ids: Sequence[int],
        finish_reason: Literal["stop", "length"],
        timings: Timings,
        logprobs: Iterable[TokenLogprob] = (),
    ) -> Generation:
        """Return the answer to a prompt with this ``outcome``; ``logprobs`` beyond the answer's tokens are dropped."""
        usage = replace(outcome.usage, completion_tokens=len(token_ids))
        return cls(
            **{**vars(outcome), "usage": usage},
            text=text,
            token_ids=tuple(token_ids),
            finish_reason=finish_reason,
            timings=timings,
            logprobs=tuple(logprobs)[: len(token_ids)],
        )


@dataclass(frozen=True)
class StreamEvent:
    """Holds a piece of a streamed answer; the last event carries the whole :class:`Generation`.

    An engine without a tokenizer yields an event with empty text for every token.

    Example:
        Print an answer while the model generates it::

            for event in engine.stream(prompt):
                print(event.text, end="", flush=True)
            print(event.generation.usage)
    """

    text: str
    generation: Generation | None = None


class NotStored(StrEnum):
    """Lists the reasons for a chunk without stored KV that a server tells every caller."""

    NO_TOKENS = "it has no tokens"
    NO_WINDOW = "it does not fit the model's context window"
    NO_ROOM = "it does not fit the store's budget"


@dataclass(frozen=True)
class PrecomputeReport:
    """Reports the work of :meth:`BlendEngine.precompute`.

    Attributes:
        computed: Number of chunks whose KV was computed.
        present: Number of chunks whose KV was already in the store.
        tokens: Number of tokens in the computed chunks.
        seconds: Wall-clock time.
        failed: Ids of chunks whose KV is not in the store, each with the reason.
        ranked: Number of chunks whose static deviation was measured.
        rank_s: Seconds spent on static deviations, if the engine measures them separately.

    Example:
        Precompute chunks and list the failures::

            report = engine.precompute(chunks)
            print(report.computed, "computed,", report.present, "already stored")
            print(report.failed)
    """

    computed: int = 0
    present: int = 0
    tokens: int = 0
    seconds: float = 0.0
    failed: dict[str, str] = field(default_factory=dict)
    ranked: int = 0
    rank_s: float = 0.0

    def __add__(self, other: PrecomputeReport) -> PrecomputeReport:
        return PrecomputeReport(
            self.computed + other.computed,
            self.present + other.present,
            self.tokens + other.tokens,
            self.seconds + other.seconds,
            {**self.failed, **other.failed},
            self.ranked + other.ranked,
            self.rank_s + other.rank_s,
        )


class GivenUp(BaseException):
    """Ends the work on an answer that nobody waits for. Like GeneratorExit, it passes ``except Exception`` handlers."""


Item = StreamEvent | BaseException | None
"""Item passed between threads: an event, the error that ended the stream, or None at the end of the stream."""


class EventQueue:
    """Passes events from other threads to the event loop in which the queue was created.

    The queue is unbounded and thread-safe: a producer never waits for the event loop, and so cannot deadlock with a
    consumer that is gone.
    """

    def __init__(self) -> None:
        """Create a queue for the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._items: asyncio.Queue[Item] = asyncio.Queue()

    def put(self, item: Item) -> None:
        """Add an item from any thread; after the loop is closed, items are dropped."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._items.put_nowait, item)

    async def events(self) -> AsyncIterator[StreamEvent]:
        """Yield events until the end of the stream; raise the error that ended the stream."""
        while (item := await self._items.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item


async def iterate_in_thread(make: Callable[[threading.Event], Iterator[StreamEvent]]) -> AsyncIterator[StreamEvent]:
    """Run an iterator in its own thread until the iterator ends or the consumer is gone; yield its events.

    ``make`` creates the iterator from an event that is set once the consumer is gone. An iterator that checks the event
    may raise :class:`GivenUp` at any time; other iterators are closed at their next item.
    """
    queue, gone = EventQueue(), threading.Event()

    def produce() -> None:
        try:
            iterator = make(gone)
            for event in iterator:
                queue.put(event)
                if gone.is_set():
                    break
            if isinstance(iterator, Generator):
                iterator.close()
            queue.put(None)
        except GivenUp:
            pass
        except BaseException as error:  # the consumer re-raises the error
            queue.put(error)

    # The consumer's context variables (its current span) also apply to the work.
    run = contextvars.copy_context().run
    threading.Thread(target=run, args=(produce,), name="cacheblend-stream", daemon=True).start()
    try:
        async for event in queue.events():
            yield event
    finally:
        gone.set()
