"""Retrieval, overheard: an unchanged `index.as_query_engine()` tells the engine which chunks a prompt may hold.

A node registered in an earlier process is not known in this one, and LlamaIndex hands the LLM nothing but text. Its
instrumentation, however, reports every retrieval. The watcher notes the texts; the LLM registers them before its next prompt, in
its own thread, so that retrieval and the event loop do not wait for a tokenizer.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any
from weakref import WeakKeyDictionary

from llama_index.core.instrumentation import get_dispatcher  # type: ignore[attr-defined]
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.instrumentation.events.retrieval import RetrievalEndEvent

from cacheblend_rag import BlendEngine
from llama_index_cacheblend.nodes import node_text, register_texts

# Retrieved but not yet prompted with; an engine that is never asked must not collect a corpus.
_MOST_WAITING = 4096


class Inbox:
    """Texts that were retrieved and are not registered yet. Thread-safe."""

    def __init__(self) -> None:
        """Start empty."""
        self._texts: deque[str] = deque(maxlen=_MOST_WAITING)
        self._lock = threading.Lock()

    def put(self, texts: list[str]) -> None:
        """Note texts."""
        self._texts.extend(texts)

    def register(self, engine: BlendEngine) -> None:
        """Register what waits. A caller that finds the inbox empty may rely on it being registered, not just taken."""
        with self._lock:
            register_texts(engine, [self._texts.popleft() for _ in range(len(self._texts))])


_inboxes: WeakKeyDictionary[BlendEngine, Inbox] = WeakKeyDictionary()
_lock = threading.Lock()


class RetrievalWatcher(BaseEventHandler):
    """Notes the nodes of every finished retrieval for the engines that are watched for."""

    @classmethod
    def class_name(cls) -> str:
        """Return the name LlamaIndex knows the handler by."""
        return "CacheBlendRetrievalWatcher"

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        """Take in one event."""
        if isinstance(event, RetrievalEndEvent):
            with _lock:
                inboxes = list(_inboxes.values())
            if inboxes:
                texts = [node_text(node) for node in event.nodes]
                for inbox in inboxes:
                    inbox.put(texts)


def watch_for(engine: BlendEngine) -> Inbox:
    """Note retrievals for ``engine`` from now on, as long as it lives; return its inbox."""
    handlers = get_dispatcher().event_handlers
    with _lock:
        if not any(isinstance(handler, RetrievalWatcher) for handler in handlers):
            handlers.append(RetrievalWatcher())
        return _inboxes.setdefault(engine, Inbox())
