"""Watches retrieval: with an unchanged `index.as_query_engine()`, the engine learns which chunks a prompt may hold.

Nodes registered in an earlier process are unknown in this process, and LlamaIndex passes only text to the LLM.
LlamaIndex's instrumentation, however, reports every retrieval. The watcher records the texts. The LLM registers the
texts before its next prompt, in its own thread, so that retrieval and the event loop do not wait for a tokenizer. The
watcher also records which spans exist, so that the LLM can report on exactly the chunks retrieved for its prompt.
"""

from __future__ import annotations

import inspect
import threading
from collections import deque
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

from llama_index.core.instrumentation import get_dispatcher  # type: ignore[attr-defined]
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.instrumentation.events.retrieval import RetrievalEndEvent
from llama_index.core.instrumentation.span import BaseSpan, active_span_id
from llama_index.core.instrumentation.span_handlers import BaseSpanHandler
from llama_index.core.schema import BaseNode, NodeWithScore

from cacheblend_rag import BlendEngine
from cacheblend_rag.frameworks import RetrievalLog
from llama_index_cacheblend.nodes import node_forms, register_forms

# Limit of nodes retrieved but not yet in a prompt; an engine that is never asked must not collect a corpus.
_MOST_WAITING = 4096

RETRIEVALS = RetrievalLog()
"""Retrievals of this process, by span."""


class Inbox:
    """Holds nodes that were retrieved and are not registered yet. Thread-safe."""

    def __init__(self) -> None:
        """Start empty."""
        self._nodes: deque[tuple[str, ...]] = deque(maxlen=_MOST_WAITING)
        self._lock = threading.Lock()

    def put(self, nodes: list[tuple[str, ...]]) -> None:
        """Add nodes by their forms."""
        self._nodes.extend(nodes)

    def register(self, engine: BlendEngine) -> None:
        """Register the waiting nodes. A caller that finds the inbox empty can rely on completed registration."""
        with self._lock:
            register_forms(engine, [self._nodes.popleft() for _ in range(len(self._nodes))])


_inboxes: WeakKeyDictionary[BlendEngine, Inbox] = WeakKeyDictionary()
_lock = threading.Lock()


class RetrievalWatcher(BaseEventHandler):
    """Records the nodes of every finished retrieval: for its span, and for the watched engines."""

    @classmethod
    def class_name(cls) -> str:
        """Return LlamaIndex's name for the handler."""
        return "CacheBlendRetrievalWatcher"

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        """Record the nodes of a finished retrieval."""
        if isinstance(event, RetrievalEndEvent):
            nodes = [node_forms(node) for node in event.nodes]
            RETRIEVALS.note(event.span_id, nodes)
            with _lock:
                inboxes = list(_inboxes.values())
            for inbox in inboxes:
                inbox.put(nodes)


class SpanWatcher(BaseSpanHandler[BaseSpan]):
    """Records which spans are open, and their parents; stores nothing else of them."""

    @classmethod
    def class_name(cls) -> str:
        """Return LlamaIndex's name for the handler."""
        return "CacheBlendSpanWatcher"

    def span_enter(
        self,
        id_: str,
        bound_args: inspect.BoundArguments,
        instance: Any = None,
        parent_id: str | None = None,
        tags: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Record the start of a span."""
        RETRIEVALS.begin(id_, parent_id)

    def span_exit(self, id_: str, *args: Any, **kwargs: Any) -> None:
        """Record the end of a span."""
        RETRIEVALS.end(id_)

    def span_drop(self, id_: str, *args: Any, **kwargs: Any) -> None:
        """Record the end of a span that fails."""
        RETRIEVALS.end(id_)

    def new_span(self, *args: Any, **kwargs: Any) -> None:
        """Return None, so that LlamaIndex stores no span."""

    def prepare_to_exit_span(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing, since no span is stored."""

    def prepare_to_drop_span(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing, since no span is stored."""


def note_instead(nodes: Iterable[BaseNode | NodeWithScore]) -> None:
    """Record nodes in place of nodes retrieved before, after postprocessors and similar steps have changed them."""
    RETRIEVALS.note(active_span_id.get(), [node_forms(node) for node in nodes], replace=True)


def current_span() -> str | None:
    """Return the id of the running span."""
    return active_span_id.get()


def watch_retrievals() -> None:
    """Record retrievals and spans from now on."""
    root = get_dispatcher()
    with _lock:
        if not any(isinstance(handler, RetrievalWatcher) for handler in root.event_handlers):
            root.event_handlers.append(RetrievalWatcher())
        if not any(isinstance(handler, SpanWatcher) for handler in root.span_handlers):
            root.span_handlers.append(SpanWatcher())


def watch_for(engine: BlendEngine) -> Inbox:
    """Record retrievals for ``engine``, too, as long as the engine lives; return its inbox."""
    watch_retrievals()
    with _lock:
        return _inboxes.setdefault(engine, Inbox())
