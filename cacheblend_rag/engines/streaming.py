"""Runs streams of events to their end, or from another thread into an event loop."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator

from cacheblend_rag.engines.results import Generation, StreamEvent

Item = StreamEvent | BaseException | None
"""What travels between threads: an event, the error that ended the stream, or None at its end."""


async def last_generation(events: AsyncIterator[StreamEvent]) -> Generation:
    """Run a stream to its end and return the whole answer."""
    last = None
    async for event in events:
        last = event.generation
    assert last is not None
    return last


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


async def iterate_in_thread(make: Callable[[], Iterator[StreamEvent]]) -> AsyncIterator[StreamEvent]:
    """Run an iterator in a thread of its own; a consumer that goes away stops it at its next event."""
    queue, stop = EventQueue(), threading.Event()

    def produce() -> None:
        try:
            iterator = make()
            for event in iterator:
                queue.put(event)
                if stop.is_set():
                    break
            if isinstance(iterator, Generator):
                iterator.close()
            queue.put(None)
        except BaseException as error:  # handed to the consumer, which re-raises it
            queue.put(error)

    # What is current for the consumer (a span) is for the work, too.
    run = contextvars.copy_context().run
    threading.Thread(target=run, args=(produce,), name="cacheblend-stream", daemon=True).start()
    try:
        async for event in queue.events():
            yield event
    finally:
        stop.set()
