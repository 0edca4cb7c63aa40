"""Holds conversations: the questions of each tab, their answers, and the sources of the answers."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast

from cacheblend_rag.blending.settings import BlendSettings
from cacheblend_rag.errors import InputError
from cacheblend_rag.ui.collection import Collection
from cacheblend_rag.ui.workspace import Choices, explain

if TYPE_CHECKING:
    from cacheblend_rag.engines.base import BlendEngine
    from cacheblend_rag.engines.results import Generation
    from cacheblend_rag.prompts.prompt import TokenizedPrompt
    from cacheblend_rag.rag.results import Turn
    from cacheblend_rag.retrieval.index import Hit
    from cacheblend_rag.retrieval.passages import Saying

_MOST_TABS = 200

Outcome = Literal["answering", "done", "stopped", "failed"]


@dataclass
class Exchange:
    """Holds a question and the state of its answer; after an error, ``text`` is the error's message.

    ``settings`` control the reuse of stored KV. Retrieval fills in ``prompt``, ``hits`` and ``passage``: start and end
    of the first hit's sentence that is nearest to the question. The answer's end fills in the engine's ``generation``,
    ``notes`` for the user, the ``marked`` text with source numbers, and
    ``sayings``: the source sentences that support the answer.
    """

    question: str
    settings: BlendSettings = field(default_factory=BlendSettings)
    text: str = ""
    marked: str = ""
    sayings: tuple[Saying, ...] = ()
    outcome: Outcome = "answering"
    hits: tuple[Hit, ...] = ()
    passage: tuple[int, int] | None = None
    prompt: TokenizedPrompt | None = None
    engine: BlendEngine | None = None
    generation: Generation | None = None
    retrieve_s: float = 0.0
    notes: tuple[str, ...] = ()


@dataclass
class Conversation:
    """Holds the questions and answers of one tab, in order."""

    exchanges: list[Exchange] = field(default_factory=list)
    _current: Exchange | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def turns(self) -> list[Turn]:
        """Return the answered questions as the history of the next question."""
        from cacheblend_rag.rag.results import Turn

        return [
            Turn(each.question, each.text.strip(), each.hits)
            for each in self.exchanges
            if each.outcome in ("done", "stopped") and each.text.strip()
        ]

    def begin(self, question: str, settings: BlendSettings | None = None) -> Exchange | None:
        """Start a question and stop the question before; return None if the same question is already being answered."""
        with self._lock:  # pressing Enter twice calls this in two threads
            running = self.current
            if running is not None and running.question == question.strip():
                return None
            self.stop()
            exchange = self._current = Exchange(question.strip(), settings or BlendSettings())
            self.exchanges.append(exchange)
            return exchange

    def answer(self, exchange: Exchange, collection: Collection, choices: Choices) -> Iterator[Exchange]:
        """Answer the exchange that :meth:`begin` has started, in the context of the conversation.

        Yields:
            The exchange, whenever the exchange has changed. An error becomes the exchange's text, and is never raised.
        """
        if self._current is exchange:
            try:
                yield from self._answer(exchange, collection, choices, self.turns())
            except Exception as error:  # shown in the place of the answer, where the user looks
                exchange.outcome, exchange.text = "failed", explain(error)
        yield exchange

    def _answer(
        self, exchange: Exchange, collection: Collection, choices: Choices, turns: list[Turn]
    ) -> Iterator[Exchange]:
        from cacheblend_rag.retrieval.passages import nearest_sentence, with_marks

        pipeline = collection.pipeline
        exchange.engine = pipeline.engine
        if not pipeline.chunks.count():
            raise InputError("Nothing is indexed yet. Drop files under “Documents” first.")
        stream = pipeline.stream(exchange.question, choices.sampling, exchange.settings, turns)
        with closing(cast(Any, stream)):
            for event in stream:
                if event.answer is None and self._current is not exchange:
                    return
                exchange.text += event.text
                if event.prompt is not None:
                    exchange.prompt, exchange.hits = event.prompt, event.sources or ()
                    if exchange.hits:  # the window may have no room for any hit
                        embedder = pipeline.chunks.load_embedder()
                        exchange.passage = nearest_sentence(exchange.hits[0].text, exchange.question, embedder)
                elif event.answer is not None:
                    exchange.generation, exchange.notes = event.answer.generation, event.answer.notes
                    exchange.retrieve_s = event.answer.retrieve_s
                if event.prompt is not None or event.text:
                    yield exchange
        assert exchange.prompt is not None
        assert exchange.generation is not None
        texts = [hit.text for hit in exchange.hits]
        exchange.marked, exchange.sayings = with_marks(exchange.text.strip(), exchange.question, texts)
        exchange.outcome = "done"

    @property
    def current(self) -> Exchange | None:
        """Return the exchange that is being answered, or None."""
        asked = self._current  # read once, because another thread may stop the exchange
        return asked if asked is not None and asked.outcome == "answering" else None

    def stop(self) -> None:
        """Stop the answer that is being written, if any, at its next token."""
        if (running := self.current) is not None:
            running.outcome = "stopped"
        self._current = None


class Tabs:
    """Holds each tab's conversation by an id, which the tab has chosen and uses again when it is reloaded."""

    def __init__(self) -> None:
        self._of: OrderedDict[str, Conversation] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, tab: str) -> Conversation:
        """Return the tab's conversation, new for an unknown tab; the conversations unused for longest are dropped."""
        if not tab:  # the page has not arrived completely
            return Conversation()
        with self._lock:
            conversation = self._of.setdefault(tab, Conversation())
            self._of.move_to_end(tab)
            while len(self._of) > _MOST_TABS:
                self._of.popitem(last=False)
            return conversation
