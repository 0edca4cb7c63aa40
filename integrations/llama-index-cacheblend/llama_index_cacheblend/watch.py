"""Overhears retrieval: an unchanged `index.as_query_engine()` tells the engine which chunks a prompt may hold.

A node registered in an earlier process is not known in this one, and LlamaIndex hands the LLM nothing but text. Its
instrumentation, however, reports every retrieval. The watcher notes the texts; the LLM registers them before its next prompt, in
its own thread, so that retrieval and the event loop do not wait for a tokenizer. It also notes which spans there are, so that the
LLM can say what became of just what was retrieved for its prompt.
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

# Retrieved but not yet prompted with; an engine that is never asked must not collect a corpus.
_MOST_WAITING = 4096

RETRIEVALS = RetrievalLog()
"""What was retrieved in which span, in this process."""


class Inbox:
    """Nodes that were retrieved and are not registered yet. Thread-safe."""

    def __init__(self) -> None:
        """Start empty."""
        self._nodes: deque[tuple[str, ...]] = deque(maxlen=_MOST_WAITING)
        self._lock = threading.Lock()

    def put(self, nodes: list[tuple[str, ...]]) -> None:
        """Note nodes by their forms."""
        self._nodes.extend(nodes)

    def register(self, engine: BlendEngine) -> None:
        """Register what waits. A caller that finds the inbox empty may rely on it being registered, not just taken."""
        with self._lock:
            register_forms(engine, [self._nodes.popleft() for _ in range(len(self._nodes))])


_inboxes: WeakKeyDictionary[BlendEngine, Inbox] = WeakKeyDictionary()
_lock = threading.Lock()


class RetrievalWatcher(BaseEventHandler):
    """Notes the nodes of every finished retrieval: for the span it is in, and for the engines that are watched for."""

    @classmethod
    def class_name(cls) -> str:
        """Return the name LlamaIndex knows the handler by."""
        return "CacheBlendRetrievalWatcher"

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        """Take in one event."""
        if isinstance(event, RetrievalEndEvent):
            nodes = [node_forms(node) for node in event.nodes]
            RETRIEVALS.note(event.span_id, nodes)
            with _lock:
                inboxes = list(_inboxes.values())
            for inbox in inboxes:
                inbox.put(nodes)


class SpanWatcher(BaseSpanHandler[BaseSpan]):
    """Notes which spans are open, and of which others they are part; it keeps nothing of them."""

    @classmethod
    def class_name(cls) -> str:
        """Return the name LlamaIndex knows the handler by."""
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
        """Note a span."""
        RETRIEVALS.begin(id_, parent_id)

    def span_exit(self, id_: str, *args: Any, **kwargs: Any) -> None:
        """Note that it has ended."""
        RETRIEVALS.end(id_)

    def span_drop(self, id_: str, *args: Any, **kwargs: Any) -> None:
        """Do the same when it ends by an error."""
        RETRIEVALS.end(id_)

    def new_span(self, *args: Any, **kwargs: Any) -> None:
        """Make none."""

    def prepare_to_exit_span(self, *args: Any, **kwargs: Any) -> None:
        """There is none."""

    def prepare_to_drop_span(self, *args: Any, **kwargs: Any) -> None:
        """There is none."""


def note_instead(nodes: Iterable[BaseNode | NodeWithScore]) -> None:
    """Note nodes in the place of those retrieved before: what postprocessors and the like have made of them."""
    RETRIEVALS.note(active_span_id.get(), [node_forms(node) for node in nodes], replace=True)


def current_span() -> str | None:
    """Return the span that runs."""
    return active_span_id.get()


def watch_retrievals() -> None:
    """Note retrievals and spans from now on."""
    root = get_dispatcher()
    with _lock:
        if not any(isinstance(handler, RetrievalWatcher) for handler in root.event_handlers):
            root.event_handlers.append(RetrievalWatcher())
        if not any(isinstance(handler, SpanWatcher) for handler in root.span_handlers):
            root.span_handlers.append(SpanWatcher())


def watch_for(engine: BlendEngine) -> Inbox:
    """Note retrievals for ``engine``, too, as long as it lives; return its inbox."""
    watch_retrievals()
    with _lock:
        return _inboxes.setdefault(engine, Inbox())
