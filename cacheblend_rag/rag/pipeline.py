"""Answers questions with an index and an engine, without a framework."""

from __future__ import annotations

import asyncio
import threading
import time
import warnings
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Sequence
from contextlib import aclosing, closing
from dataclasses import replace
from functools import partial
from pathlib import Path

from cacheblend_rag import spans
from cacheblend_rag.blending.settings import BlendSettings
from cacheblend_rag.engines.base import BlendEngine
from cacheblend_rag.engines.results import Generation, StreamEvent
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.thoughts import ThoughtReader
from cacheblend_rag.errors import InputError, PromptTooLongError
from cacheblend_rag.prompts.prompt import DEFAULT_INSTRUCTION, TokenizedPrompt, rag_prompt
from cacheblend_rag.rag.indexing import IndexProgress, IndexReport, forget, index_documents
from cacheblend_rag.rag.results import RagAnswer, RagEvent, Retrieved, Turn, check_question, unanswered
from cacheblend_rag.retrieval.chunking import DEFAULT_CHUNK_TOKENS, check_sizes
from cacheblend_rag.retrieval.database import IndexConfig
from cacheblend_rag.retrieval.documents import FoundDocuments, absolute, find_documents
from cacheblend_rag.retrieval.index import ChunkIndex, Hit
from cacheblend_rag.store.base import Closing

_SPAN = "cacheblend.ask"


class RagPipeline(Closing):
    """Indexes documents and answers questions over them. Safe to use from several threads.

    Attributes:
        engine: The model.
        chunks: The index of chunks.

    Example:
        Index documents and ask a question::

            engine = TransformersEngine("Qwen/Qwen2.5-1.5B-Instruct", store="~/.cache/acme")
            with RagPipeline(engine, "~/.cache/acme") as rag:
                rag.index(["docs/", "handbook.pdf"])
                print(rag.ask("Who approves travel above 500 euros?").answer)
    """

    def __init__(
        self,
        engine: BlendEngine,
        index: str | Path | ChunkIndex,
        *,
        k: int = 6,
        follow: int = 2,
        instruction: str = DEFAULT_INSTRUCTION,
        chunk_tokens: int | None = None,
        overlap: int | None = None,
        embedding: str | None = None,
        query_encoder: str | Path | None = None,
    ):
        """Open an index (made if missing) and register its chunks with the engine.

        Args:
            engine: The model; the pipeline does not close the engine.
            index: Directory of the index, usually the directory of the engine's KV store; or an open index.
            k: Maximum number of chunks in a prompt.
            follow: Number of best hits that bring their next chunk into the prompt: "It was founded in..." often stands
                in another chunk than the name. The next chunks count towards ``k``.
            instruction: First sentence of every prompt. The engine should have the header of this instruction;
                otherwise the first chunk is blended like the others instead of being reused unchanged.
            chunk_tokens: Maximum number of tokens in a chunk; None takes the index's own (512 for a new index).
            overlap: Tokens that neighbouring chunks share; None takes the index's own (0 for a new index).
            embedding: Embedding model; None takes the index's own (all-MiniLM-L6-v2 for a new index).
            query_encoder: Directory of a model that `cacheblend tune-retriever` has made for this index, to embed the
                questions.

        Raises:
            InputError: An argument cannot be used, or the engine has the maximum number of indexes open.
            StoreMismatchError: The index was made for another model or with other settings.
            StoreError: The index is damaged, or cannot be made.
        """
        if k < 1:
            raise InputError(f"k is {k}; ask for at least 1 chunk.")
        if follow < 0:
            raise InputError(f"follow is {follow}; give 0 or more.")
        self.engine, self.instruction = engine, instruction
        self._k, self._follow = k, follow
        self._indexing, self._told = threading.Lock(), False
        if not isinstance(index, ChunkIndex):
            self.chunks = _open_index(index, engine, chunk_tokens, overlap, embedding, query_encoder)
        elif query_encoder is not None:
            raise InputError("Open the index with query_encoder=, or give its directory: it is open already.")
        else:
            self.chunks = index
        try:
            engine.registry.attach(self.chunks)
        except BaseException:
            if self.chunks is not index:
                self.chunks.close()
            raise

    def over(self, chunks: ChunkIndex) -> RagPipeline:
        """Return a pipeline with the same settings over another open index, such as one with another query encoder."""
        return RagPipeline(self.engine, chunks, k=self._k, follow=self._follow, instruction=self.instruction)

    def index(
        self,
        paths: Iterable[str | Path] | FoundDocuments,
        progress: Callable[[IndexProgress], None] | None = None,
        *,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        beyond_budget: bool = False,
    ) -> IndexReport:
        """Bring the index and the KV store up to date with files and directories; see :func:`index_documents`.

        ``include`` and ``exclude`` choose among the files of directories (:func:`find_documents`), and have no effect
        on :class:`FoundDocuments`.

        Threads take turns. While another process is indexing into the same directory, the method raises
        :class:`StoreError`.
        """
        with self._indexing:
            found = paths if isinstance(paths, FoundDocuments) else find_documents(paths, include, exclude)
            return index_documents(self.engine, self.chunks, found, progress, beyond_budget)

    def remove(self, path: str | Path) -> None:
        """Remove a document from the index, together with the KV of chunks that no other document holds.

        Args:
            path: Path of the document in the index, or the path that :meth:`index` would take from the current
                directory.

        Raises:
            InputError: The document is not in the index.
            StoreError: The index cannot be written.
        """
        name = str(path) if self.chunks.digest_of(str(path)) is not None else str(absolute(path))
        forget(self.engine, self.chunks, self.chunks.delete(name))

    def retrieve(self, question: str, history: Sequence[Turn] = ()) -> Retrieved:
        """Return the chunks for a question, best first, each once.

        A chunk whose score is not above 0 has nothing in common with the question, whatever the embedding model, and is
        left out, unless it is the nearest of all.

        With a ``history``, the question is searched for alone, and together with the turn before, which often names the
        thing that the question asks about. If all chunks found stood in that turn's prompt, that turn's chunks are
        returned: the two prompts then begin alike, and the engine's own prefix cache can serve the common prefix.

        Raises:
            InputError: The question is empty, or is not valid Unicode.
        """
        check_question(question)
        begin = time.perf_counter()
        chosen: dict[str, Hit] = {}
        alone = self._near(question)
        if history:
            # The search with the turn before gets a third of the room, to leave room for a question that needs no
            # context.
            self._choose(chosen, alone, max(1, self._k - max(1, self._k // 3)), self._follow)
            said = "\n".join((history[-1].question, history[-1].answer, question))
            self._choose(chosen, self._near(said), self._k, 0)
        self._choose(chosen, alone, self._k, self._follow)
        last = {hit.chunk.id: replace(hit, score=None) for hit in history[-1].hits} if history else {}
        if chosen.keys() <= last.keys():
            chosen |= {key: hit for key, hit in last.items() if key not in chosen}
        self.engine.registry.follow()  # another process may have indexed the chunks
        return Retrieved(tuple(chosen.values()), time.perf_counter() - begin)

    def _near(self, text: str) -> list[Hit]:
        found = self.chunks.search(text, self._k)
        return [hit for place, hit in enumerate(found) if place == 0 or hit.score is None or hit.score > 0]

    def _choose(self, chosen: dict[str, Hit], hits: Sequence[Hit], most: int, follow: int) -> None:
        """Add hits until ``most`` chunks are chosen, and behind each of the first ``follow`` hits the next chunk."""
        for place, hit in enumerate(hits):
            following = self.chunks.neighbours(hit) if place < follow else []
            for candidate in (hit, *following):
                known = chosen.get(candidate.chunk.id)
                if known is not None and known.score is None:
                    chosen[candidate.chunk.id] = replace(known, score=candidate.score)
                elif known is None and len(chosen) < most:
                    chosen[candidate.chunk.id] = candidate

    def prompt(
        self, question: str, hits: Sequence[Hit], sampling: SamplingParams | None = None, history: Sequence[Turn] = ()
    ) -> tuple[TokenizedPrompt, tuple[Hit, ...], tuple[str, ...]]:
        """Build the prompt of the hits, in reading order (reference words point backwards).

        If the context window is too small, the oldest turns are left out first, then the hits, beginning with the last.

        Returns:
            The prompt in tokens; the hits in the prompt, the most relevant first, and then the chunks without a score;
            and notes for the user.

        Raises:
            PromptTooLongError: Even the question alone does not fit.
        """
        window = self.engine.context_window
        room = window - (sampling or SamplingParams()).max_tokens
        forgotten = [(turns, len(hits)) for turns in range(len(history), 0, -1)]
        for turns, count in [*forgotten, *((0, count) for count in range(len(hits), -1, -1))]:
            kept = sorted(hits[:count], key=lambda hit: (hit.path, hit.ordinal))
            before = [(turn.question, turn.answer) for turn in history[len(history) - turns :]]
            prompt = rag_prompt(self.engine.tokenizer, [hit.chunk for hit in kept], question, self.instruction, before)
            tokens = self.engine.tokenize(prompt)
            size = len(tokens.token_ids)
            if size <= room:
                shown = sorted(hits[:count], key=lambda hit: (hit.score is None, -(hit.score or 0)))
                return tokens, tuple(shown), _left_out(len(history), turns, len(hits), count, window)
        raise PromptTooLongError(
            f"The question has {size} tokens with its header; a context window of {window} less max_tokens leaves "
            f"{max(0, room)}. Shorten it or lower max_tokens."
        )

    def stream(
        self,
        question: str,
        sampling: SamplingParams | None = None,
        settings: BlendSettings | None = None,
        history: Sequence[Turn] = (),
    ) -> Iterator[RagEvent]:
        """Answer piece by piece: yield an event with the sources, events with text, and an event with the whole answer.

        Args:
            question: The question.
            sampling: Sampling parameters of the answer.
            settings: Settings for the reuse of stored KV.
            history: Turns of the conversation before the question, oldest first; see :meth:`retrieve` and
                :meth:`prompt`.

        Raises:
            InputError: The question is empty, or nothing is indexed yet.
        """
        asked = spans.begin(_SPAN)
        with spans.current(asked):
            prepared = self._prepare(question, sampling, history)
        return prepared.events(spans.within(asked, self.engine.stream(prepared.prompt, sampling, settings)))

    def _prepare(self, question: str, sampling: SamplingParams | None, history: Sequence[Turn]) -> _Prepared:
        if not self._told and self.engine.entries is not None:
            self._told = True
            if why := self.chunks.config.unused_by(self.engine.writer):
                warnings.warn(why, stacklevel=3)
        found = self.retrieve(question, history)
        if not found.hits:
            raise InputError(f"Nothing is indexed in {self.chunks.directory} yet; index some documents first.")
        built, hits, notes = self.prompt(question, found.hits, sampling, history)
        return _Prepared(self.engine, built, sampling, Retrieved(hits, found.seconds), notes)

    def ask(
        self,
        question: str,
        sampling: SamplingParams | None = None,
        settings: BlendSettings | None = None,
        history: Sequence[Turn] = (),
    ) -> RagAnswer:
        """Return the whole answer; takes the arguments and raises the errors of :meth:`stream`."""
        with spans.span(_SPAN):
            prepared = self._prepare(question, sampling, history)
            done = self.engine.generate(prepared.prompt, sampling, settings)
        return prepared.answer(done)

    async def aask(
        self,
        question: str,
        sampling: SamplingParams | None = None,
        settings: BlendSettings | None = None,
        history: Sequence[Turn] = (),
    ) -> RagAnswer:
        """Return the answer as :meth:`ask` does, off the event loop; cancelling the call ends the engine's work."""
        with spans.span(_SPAN):
            prepared = await asyncio.to_thread(self._prepare, question, sampling, history)
            done = await self.engine.agenerate(prepared.prompt, sampling, settings)
        return prepared.answer(done)

    async def astream(
        self,
        question: str,
        sampling: SamplingParams | None = None,
        settings: BlendSettings | None = None,
        history: Sequence[Turn] = (),
    ) -> AsyncIterator[RagEvent]:
        """Yield the events of :meth:`stream` asynchronously; cancelling the consumer ends the engine's work."""
        asked = spans.begin(_SPAN)
        with spans.current(asked):
            prepared = await asyncio.to_thread(self._prepare, question, sampling, history)
        async with aclosing(spans.awithin(asked, self.engine.astream(prepared.prompt, sampling, settings))) as events:
            yield prepared.first
            async for event in events:
                yield prepared.event(event)

    def close(self) -> None:
        """Close the index; the engine stays open."""
        self.engine.registry.detach(self.chunks)
        self.chunks.close()


class _Prepared:
    """Holds a question's prompt and its retrieved chunks; makes the pipeline's events of the engine's events."""

    def __init__(
        self,
        engine: BlendEngine,
        prompt: TokenizedPrompt,
        sampling: SamplingParams | None,
        shown: Retrieved,
        notes: tuple[str, ...],
    ):
        self.prompt, self._shown, self._notes = prompt, shown, notes
        self._reader = partial(ThoughtReader, engine.tokenizer, prompt, sampling)
        self._pieces = self._reader()
        self.first = RagEvent("", prompt, shown.hits)

    def events(self, stream: Generator[StreamEvent, None, None]) -> Iterator[RagEvent]:
        """Yield the pipeline's events for the engine's events."""
        with closing(stream):
            yield self.first
            yield from map(self.event, stream)

    def event(self, event: StreamEvent) -> RagEvent:
        """Return the pipeline's event for the engine's next event."""
        done = event.generation
        said = self._pieces.push(event.text, last=done is not None)
        return RagEvent(said.answer, answer=None if done is None else self.answer(done), reasoning=said.reasoning)

    def answer(self, done: Generation) -> RagAnswer:
        """Return the pipeline's answer for the engine's whole generation."""
        said, shown = self._reader().push(done.text, last=True), self._shown
        notes = (*self._notes, *unanswered(done, said))
        return RagAnswer(said.answer.strip(), shown.hits, done, shown.seconds, notes, said.reasoning)


def _left_out(turns: int, kept_turns: int, hits: int, kept_hits: int, window: int) -> tuple[str, ...]:
    because = f"left out: the context window is {window} tokens."
    notes = [f"{turns - kept_turns} of {turns} earlier questions {because}"] if kept_turns < turns else []
    return (*notes, *([f"{hits - kept_hits} of {hits} sources {because}"] if kept_hits < hits else []))


def _open_index(
    directory: str | Path,
    engine: BlendEngine,
    chunk_tokens: int | None,
    overlap: int | None,
    embedding: str | None,
    query_encoder: str | Path | None,
) -> ChunkIndex:
    new = IndexConfig(
        engine.fingerprint,
        engine.header_ids,
        DEFAULT_CHUNK_TOKENS if chunk_tokens is None else chunk_tokens,
        overlap or 0,
        embedding,
        engine.writer,
    )
    unset = [name for name, size in (("chunk_tokens", chunk_tokens), ("overlap", overlap)) if size is None]
    if len(unset) < 2 and not ChunkIndex.exists(directory):
        check_sizes(new.chunk_tokens, new.overlap)
    return ChunkIndex(directory, new, query_encoder, unset)
