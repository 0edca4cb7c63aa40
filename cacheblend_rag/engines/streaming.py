"""Streams of events: run to their end, or from a thread into an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator

from cacheblend_rag.engines.results import Generation, StreamEvent


async def last_generation(events: AsyncIterator[StreamEvent]) -> Generation:
    """Run a stream to its end and return the whole answer."""
    last = None
    async for event in events:
        last = event.generation
    assert last is not None
    return last


async def iterate_in_thread(make: Callable[[], Iterator[StreamEvent]]) -> AsyncIterator[StreamEvent]:
    """Run an iterator in a thread of its own; a consumer that goes away stops it at its next event."""
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
