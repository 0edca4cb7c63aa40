"""Holds tokenised pieces of documents and questions about passages, split into training and held-out texts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any, Final

from cacheblend_lab.datasets import read_data_set
from cacheblend_lab.spelling import answer_ids
from cacheblend_rag.errors import InputError
from cacheblend_rag.prompts.chunk import Chunk, encoder_for, make_chunk
from cacheblend_rag.prompts.prompt import (
    DEFAULT_INSTRUCTION,
    TokenizedPrompt,
    header_ids,
    rag_header,
    rag_prompt,
    tokenize,
)
from cacheblend_rag.prompts.registry import ChunkRegistry

LEAST_TOKENS: Final = 20_000
"""Fewest tokens of training text; the writer would memorise a smaller text."""
_HELD_OUT: Final = 0.06
_LEAST_HELD_OUT: Final = 4
_PIECE: Final = 9_000  # characters: room for a chunk and its continuation
_BLANK = re.compile(r"\n\s*\n")
_NAMES = re.compile(r"\b[A-Z][\w'-]+(?: [A-Z][\w'-]+)*")

INSTRUCTIONS: Final = (
    DEFAULT_INSTRUCTION,
    "Answer the question from the notes with a few words.",
    "Answer from the documents. If they do not say it, say so.",
    "You are a helpful assistant. Use the context below to answer the user's question.",
    "Use only the following passages.",
    "You are an expert. Read the excerpts carefully, then reply concisely and cite what you used.",
    "Reply in one sentence, based on the text.",
    "",
)
"""Instructions of the headers in training; several, so that a writer works with any header."""

_REQUESTS: Final = (
    "What do the notes say about {}?",
    "Who or what is {}?",
    "Explain {} in one sentence.",
    "Why does {} matter here?",
    "List what is said of {}.",
    "Summarize the notes.",
    "What are the notes about?",
    "Continue the text.",
)


@dataclass(frozen=True)
class AskedText:
    """Holds a question about passages, or a request.

    Attributes:
        passages: Token ids of each passage.
        ids: Token ids behind the chunks: the question and the beginning of the answer's turn.
        answer: Token ids of the answer; empty if none is known.
    """

    passages: tuple[tuple[int, ...], ...]
    ids: tuple[int, ...]
    answer: tuple[int, ...] = ()


@dataclass(frozen=True)
class LearnTexts:
    """Holds the token ids of pieces of documents, and questions."""

    pieces: list[tuple[int, ...]] = field(default_factory=list)
    asked: list[AskedText] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Return the number of tokens of pieces and passages."""
        return sum(map(len, self.pieces)) + sum(len(p) for each in self.asked for p in each.passages)


@dataclass(frozen=True)
class LearnCorpus:
    """Holds training texts and held-out texts.

    Attributes:
        headers: Token ids of the prompts' headers.
        separator: Token ids between two chunks.
        about: Files, numbers of tokens and questions, for the writer's card.
    """

    train: LearnTexts
    held_out: LearnTexts
    headers: tuple[tuple[int, ...], ...]
    separator: tuple[int, ...]
    about: dict[str, Any]


def read_corpus(
    tokenizer: Any,
    documents: Iterable[Path | str],
    questions: Iterable[Path | str] = (),
    seed: int = 0,
    requests: int = 1000,
    say: Callable[[str], None] | None = None,
) -> LearnCorpus:
    """Read documents and data sets, and hold some of each out.

    Raises:
        InputError: There is too little text, or a file cannot be read.
    """
    say, encoder, random = say or (lambda line: None), encoder_for(tokenizer), Random(seed)
    frame = _Frame(tokenizer)
    pieces: list[tuple[str, tuple[int, ...]]] = []
    files: dict[str, int] = {}
    for name, stretches in _read_documents(documents, say):
        made = [(text, tuple(encoder.document(text))) for text in stretches]
        files[name] = sum(len(ids) for _, ids in made)
        pieces += made
    asked: list[AskedText] = []
    for file in questions:
        samples = read_data_set(Path(file)).samples
        files[Path(file).name] = len(samples)
        known: dict[str, tuple[int, ...]] = {}
        for sample in samples:
            for text in sample.texts:
                if text not in known:
                    known[text] = tuple(encoder.document(text.strip()))
            answer = answer_ids(tokenizer, sample.answers[0])
            passages = tuple(known[text] for text in sample.texts)
            asked.append(AskedText(passages, frame.around(sample.question), answer))
    for _ in range(requests if pieces else 0):
        text, ids = random.choice(pieces)
        names = [name for name in _NAMES.findall(text) if len(name) > 3] or text.split()[:3]
        request = random.choice(_REQUESTS).format(random.choice(names))
        asked.append(AskedText((ids,), frame.around(request)))
    train, held_out = _apart([ids for _, ids in pieces], asked, random)
    if train.tokens < LEAST_TOKENS or not (held_out.pieces or held_out.asked):
        raise InputError(
            f"{train.tokens + held_out.tokens:,} tokens of text are too little to learn from; a writer needs "
            f"{LEAST_TOKENS:,} at least, and gets better up to some millions. Name more documents, of any kind."
        )
    about = {"files": files, "tokens": train.tokens + held_out.tokens, "questions": len(asked)}
    say(f"{about['tokens']:,} tokens of text, {len(asked):,} questions")
    return LearnCorpus(train, held_out, frame.headers, frame.separator, about)


def _read_documents(documents: Iterable[Path | str], say: Callable[[str], None]) -> Iterator[tuple[str, list[str]]]:
    """Yield the name and the pieces of each readable document; report the others."""
    from cacheblend_rag.retrieval.documents import Document, find_documents, load_document

    for path in find_documents(documents).files:
        loaded = load_document(path)
        if isinstance(loaded, Document):
            yield path.name, cut_up(loaded.text)
        else:
            say(f"{loaded.path} was skipped: {loaded.reason}")


def cut_up(text: str) -> list[str]:
    """Return a document in pieces of at most about :data:`_PIECE` characters, cut at empty lines where possible."""
    pieces: list[str] = []
    current: list[str] = []
    size = 0
    for paragraph in _BLANK.split(text.strip()):
        for begin in range(0, len(paragraph), _PIECE):
            part = paragraph[begin : begin + _PIECE]
            if current and size + len(part) > _PIECE:
                pieces.append("\n\n".join(current))
                current, size = [], 0
            current.append(part)
            size += len(part)
    if current:
        pieces.append("\n\n".join(current))
    return [piece for piece in pieces if piece.strip()]


def _apart(
    pieces: Sequence[tuple[int, ...]], asked: Sequence[AskedText], random: Random
) -> tuple[LearnTexts, LearnTexts]:
    """Split off held-out pieces, the questions about these pieces, and some questions with several passages."""
    count = min(len(pieces) // 2, max(_LEAST_HELD_OUT, round(_HELD_OUT * len(pieces))))
    kept = set(random.sample(pieces, count))
    train, held_out = LearnTexts(), LearnTexts()
    for piece in pieces:
        (held_out if piece in kept else train).pieces.append(piece)
    for each in asked:
        of_document = len(each.passages) == 1
        apart = each.passages[0] in kept if of_document else random.random() < _HELD_OUT
        (held_out if apart else train).asked.append(each)
    return train, held_out


class _Frame:
    """Holds the token ids around chunks in the model's prompts."""

    def __init__(self, tokenizer: Any):
        self._tokenizer, self._registry = tokenizer, ChunkRegistry()
        found = {header_ids(tokenizer, rag_header(tokenizer, instruction)): None for instruction in INSTRUCTIONS}
        self.headers = tuple(ids for ids in found if ids)
        self._chunk = make_chunk("some words", tokenizer)
        prompt = self._prompt([self._chunk, self._chunk], "?")
        self.separator = prompt.token_ids[prompt.spans[0].end : prompt.spans[1].start]

    def around(self, question: str) -> tuple[int, ...]:
        """Return the token ids behind the chunks in a prompt with this question."""
        prompt = self._prompt([self._chunk], question.strip())
        return prompt.token_ids[prompt.spans[0].end :]

    def _prompt(self, chunks: list[Chunk], question: str) -> TokenizedPrompt:
        return tokenize(rag_prompt(self._tokenizer, chunks, question), self._tokenizer, self._registry)


def with_answers(texts: LearnTexts, answers: dict[int, tuple[int, ...]]) -> LearnTexts:
    """Return texts with other answers to some questions, given by number."""
    asked = [replace(each, answer=answers.get(number, each.answer)) for number, each in enumerate(texts.asked)]
    return LearnTexts(texts.pieces, asked)
