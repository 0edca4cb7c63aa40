"""Holds what comes out of an engine: an answer, whole or as a stream that threads hand to event loops, and what it took."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from cacheblend_rag.blending.outcome import PromptOutcome


@dataclass(frozen=True)
class Timings:
    """Wall-clock seconds of one request.

    Attributes:
        ttft_s: Time to first token, from the engine's receipt of the prompt.
        total_s: Time to the last token.
    """

    ttft_s: float
    total_s: float


@dataclass(frozen=True)
class TokenLogprob:
    """Says how likely the model held a generated token, before temperature and nucleus.

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


@dataclass(frozen=True, kw_only=True)
class Generation(PromptOutcome):
    """A finished answer, and what became of its prompt.

    Attributes:
        text: The answer.
        token_ids: Generated token ids, the end-of-sequence token excluded.
        finish_reason: ``"stop"`` or ``"length"``.
        timings: Wall-clock seconds.
        logprobs: One for each of ``token_ids``, where :attr:`SamplingParams.logprobs` asked for them.
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
        """Return the answer to a prompt of which ``outcome`` is known; ``logprobs`` beyond its tokens are left out."""
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
    """A piece of a streamed answer; the last event carries the whole :class:`Generation`.

    Without a tokenizer there is no text, and an event for every token all the same.
    """

    text: str
    generation: Generation | None = None


@dataclass(frozen=True)
class PrecomputeReport:
    """Says what :meth:`BlendEngine.precompute` did.

    Attributes:
        computed: Chunks whose KV was computed.
        present: Chunks whose KV was in the store already.
        tokens: Tokens of the former.
        seconds: Wall-clock time.
        failed: Chunk ids, and why their KV is not in the store.
        ranked: Chunks whose static deviation was measured.
        rank_s: Seconds of that, where it can be told apart.
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
    """Ends the work on an answer for which nobody waits any more. Like GeneratorExit it passes whoever handles errors."""


Item = StreamEvent | BaseException | None
"""What travels between threads: an event, the error that ended the stream, or None at its end."""


class EventQueue:
    """Events from another thread, for the event loop it was made in.

    Unbounded and thread-safe: the producer never waits on the event loop, so it cannot deadlock with a gone consumer.
    """

    def __init__(self) -> None:
        """Deliver to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._items: asyncio.Queue[Item] = asyncio.Queue()

    def put(self, item: Item) -> None:
        """Deliver from any thread; once the loop is closed nobody listens."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._items.put_nowait, item)

    async def events(self) -> AsyncIterator[StreamEvent]:
        """Yield events to the end of the stream; raise the error that ended it."""
        while (item := await self._items.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item


async def iterate_in_thread(make: Callable[[threading.Event], Iterator[StreamEvent]]) -> AsyncIterator[StreamEvent]:
    """Run an iterator in a thread of its own until it ends, or the consumer goes away.

    ``make`` is given what is set once the consumer has gone. An iterator that looks at it may raise :class:`GivenUp` at any
    time; every other one is closed at its next event.
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
        except BaseException as error:  # handed to the consumer, which re-raises it
            queue.put(error)

    # What is current for the consumer (a span) is for the work, too.
    run = contextvars.copy_context().run
    threading.Thread(target=run, args=(produce,), name="cacheblend-stream", daemon=True).start()
    try:
        async for event in queue.events():
            yield event
    finally:
        gone.set()
