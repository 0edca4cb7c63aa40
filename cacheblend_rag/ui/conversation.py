"""Keeps conversations: what each tab has asked, what was answered, and where the answers come from."""

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
    from cacheblend_rag.rag.fates import PromptFate
    from cacheblend_rag.rag.results import Turn
    from cacheblend_rag.retrieval.index import Hit
    from cacheblend_rag.retrieval.passages import Saying

_MOST_TABS = 200

Outcome = Literal["answering", "done", "stopped", "failed"]


@dataclass
class Exchange:
    """A question, and all that is known of its answer so far; where there was an error its words are the text.

    The ``settings`` say how stored KV is treated. There is no prompt before retrieval, whose ``hits`` it holds; in the first of
    them the ``passage`` from one character to another is nearest to the question. Before the answer's end there is no
    ``generation``, as the engine reports it, no ``fate`` of the prompt's tokens, and no ``marked`` text, which names sources, nor
    ``sayings``: where the sources say what the answer says. The user should know the ``notes`` besides.
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
    fate: PromptFate | None = None
    retrieve_s: float = 0.0
    notes: tuple[str, ...] = ()


@dataclass
class Conversation:
    """One tab's conversation: questions and answers in order."""

    exchanges: list[Exchange] = field(default_factory=list)
    _current: Exchange | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def turns(self) -> list[Turn]:
        """Return what the next question is answered in the context of."""
        from cacheblend_rag.rag.results import Turn

        return [
            Turn(each.question, each.text.strip(), each.hits)
            for each in self.exchanges
            if each.outcome in ("done", "stopped") and each.text.strip()
        ]

    def begin(self, question: str, settings: BlendSettings | None = None) -> Exchange | None:
        """Note a question as being asked, which ends the one before it; None if it is the one that is being answered already."""
        with self._lock:  # Enter pressed twice comes in two threads
            running = self.current
            if running is not None and running.question == question.strip():
                return None
            self.stop()
            exchange = self._current = Exchange(question.strip(), settings or BlendSettings())
            self.exchanges.append(exchange)
            return exchange

    def answer(self, exchange: Exchange, collection: Collection, choices: Choices) -> Iterator[Exchange]:
        """Answer what :meth:`begin` has noted, in the context of the conversation.

        Yields:
            The exchange, whenever something of it has changed. What goes wrong is said in it, never raised.
        """
        if self._current is exchange:
            try:
                yield from self._answer(exchange, collection, choices, self.turns())
            except Exception as error:  # in the page's place for answers, where the person looks
                exchange.outcome, exchange.text = "failed", explain(error)
        yield exchange

    def _answer(
        self, exchange: Exchange, collection: Collection, choices: Choices, turns: list[Turn]
    ) -> Iterator[Exchange]:
        from cacheblend_rag.engines.thoughts import Parts, ThoughtReader
        from cacheblend_rag.rag.fates import prompt_fate
        from cacheblend_rag.rag.results import unanswered
        from cacheblend_rag.retrieval.passages import nearest_sentence, with_marks

        pipeline = collection.pipeline
        engine = exchange.engine = pipeline.engine
        found = pipeline.retrieve(exchange.question, turns)
        if not found.hits:
            raise InputError("Nothing is indexed yet. Drop files under “Documents” first.")
        asked = pipeline.prompt(exchange.question, found.hits, choices.sampling, turns)
        exchange.prompt, exchange.hits, exchange.notes = asked
        exchange.retrieve_s = found.seconds
        if exchange.hits:  # none, where the window has no room for one
            embedder = pipeline.chunks.load_embedder()
            exchange.passage = nearest_sentence(exchange.hits[0].text, exchange.question, embedder)
        yield exchange
        thoughts, reader = "", ThoughtReader(engine.tokenizer, exchange.prompt, choices.sampling)
        with closing(cast(Any, engine.stream(exchange.prompt, choices.sampling, exchange.settings))) as stream:
            for event in stream:
                if event.generation is None and self._current is not exchange:
                    return
                exchange.generation = event.generation
                said = reader.push(event.text, last=event.generation is not None)
                exchange.text += said.answer
                thoughts += said.reasoning
                if said.answer:
                    yield exchange
        assert exchange.generation is not None
        exchange.notes += unanswered(exchange.generation, Parts(exchange.text, thoughts))
        exchange.fate = prompt_fate(engine, exchange.prompt, exchange.generation, exchange.settings)
        texts = [hit.text for hit in exchange.hits]
        exchange.marked, exchange.sayings = with_marks(exchange.text.strip(), exchange.question, texts)
        exchange.outcome = "done"

    @property
    def current(self) -> Exchange | None:
        """Return the exchange that is being answered."""
        asked = self._current  # once: another thread may stop it
        return asked if asked is not None and asked.outcome == "answering" else None

    def stop(self) -> None:
        """End the answer that is being written, if there is one, at its next token."""
        if (running := self.current) is not None:
            running.outcome = "stopped"
        self._current = None


class Tabs:
    """Each tab's conversation, by an id that the tab has made up and keeps when it is loaded again."""

    def __init__(self) -> None:
        self._of: OrderedDict[str, Conversation] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, tab: str) -> Conversation:
        """Return the tab's conversation, a new one for a tab never seen; those not seen for longest are forgotten."""
        if not tab:  # a page that has only half arrived
            return Conversation()
        with self._lock:
            conversation = self._of.setdefault(tab, Conversation())
            self._of.move_to_end(tab)
            while len(self._of) > _MOST_TABS:
                self._of.popitem(last=False)
            return conversation
