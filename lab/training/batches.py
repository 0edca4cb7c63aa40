"""Makes training batches: contexts in a prompt skeleton, packed questions, marks for the loss, and binding targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from random import Random
from typing import Final

import torch
from tokenizers import Tokenizer
from torch import Tensor

from cacheblend_lab.fiction.entities import NameMaker, Place, make_entities
from cacheblend_lab.fiction.phrases import KINDS
from cacheblend_lab.fiction.questions import QUESTION_KINDS, FictionQuestion, Shares, compare
from cacheblend_lab.fiction.world import FictionContext, sample_context
from cacheblend_lab.fiction.writer import Sentence
from training.tokenizer import BOS, EOS, PAD, Skeleton, sample_skeleton

BIND_LAYER: Final = 2
"""Layer whose input must name a value's entity, so that a check layer there sees cross-chunk references."""
LINK_LAYER: Final = 5
"""Layer whose input must name earlier information: a nickname's entity, a list's topic, a number's unit."""

FIND_LAYER: Final = 3
"""Layer with a head that must attend from a nickname to the sentence that explains the nickname."""

TEXT, ANSWER = 1, 2
"""Marks of tokens with a loss; the mark of an answer is ANSWER plus the index of its question's kind."""
VERDICT: Final = ANSWER + len(QUESTION_KINDS)
"""Mark of the tokens that name the earlier entity in a comparison: few, and the only tokens that compare."""

EXERCISES: Final = 6
"""Questions per exercise; an exercise compares two invented years, since contexts have few comparisons."""


class Encoder:
    """Tokenises texts one by one, with a cache, since sentences repeat."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.size: int = tokenizer.get_vocab_size()
        self.encode = lru_cache(maxsize=200_000)(self._encode)
        self.lead = lru_cache(maxsize=50_000)(self._lead)

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids) if text else ()

    def _lead(self, name: str) -> tuple[int, int]:
        ids = self.encode(name.removeprefix("the "))
        return ids[0], ids[min(1, len(ids) - 1)]

    def count(self, text: str) -> int:
        """Return the number of tokens of `text`."""
        return len(self.encode(text))


@dataclass
class Example:
    """Holds one packed training sequence.

    `bind` rows are (position, layer, two tokens that the layer's input must name, two tokens that it may name as well).
    `find` rows are (position, start and end of the tokens to attend to). `explained` maps nicknames to start and end of
    their tokens.
    """

    ids: list[int] = field(default_factory=list)
    loss: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    bind: list[tuple[int, ...]] = field(default_factory=list)
    find: list[tuple[int, int, int]] = field(default_factory=list)
    explained: dict[str, tuple[int, int]] = field(default_factory=dict)
    next_position: int = 0

    def name(self, position: int, layer: int, named: tuple[int, int], beside: tuple[int, int] = (PAD, PAD)) -> None:
        """Require that the input of `layer` names the tokens `named` at `position`; the tokens `beside` are ignored."""
        self.bind.append((position, layer, *named, *beside))

    def look_up(self, position: int, nickname: str) -> None:
        """Require that `FIND_LAYER` attends from `position` to the nickname's explanation, if there is one."""
        if nickname in self.explained:
            self.find.append((position, *self.explained[nickname]))

    def put(self, ids: Sequence[int], loss: int = 0) -> None:
        """Append tokens with the mark `loss`."""
        self.ids += ids
        self.loss += [loss] * len(ids)
        self.positions += range(self.next_position, self.next_position + len(ids))
        self.next_position += len(ids)


def _find_last(haystack: Sequence[int], needle: Sequence[int]) -> int:
    for start in range(len(haystack) - len(needle), -1, -1):
        if tuple(haystack[start : start + len(needle)]) == tuple(needle):
            return start
    return -1


def _put_context(
    example: Example, encoder: Encoder, context: FictionContext, skeleton: Skeleton, *, jump: float, rng: Random
) -> None:
    for index, chunk in enumerate(context.chunks):
        if index:
            example.put(encoder.encode(skeleton.separator))
        example.put(encoder.encode(skeleton.label.format(n=index + 1)))
        for place, sentence in enumerate(chunk):
            if place and sentence.before != " ":
                example.put(encoder.encode(sentence.before))
            if jump and sentence.opens_document:
                example.next_position += int(rng.expovariate(1 / jump))
            ids = encoder.encode(sentence.text)
            if sentence.value is not None:
                _bind(example, encoder, sentence, ids)
            example.put(ids, TEXT if sentence.entity else 0)


def _bind(example: Example, encoder: Encoder, sentence: Sentence, ids: Sequence[int]) -> None:
    """Add the binding targets of the value in a sentence, before the sentence's tokens are appended."""
    value, entity = encoder.encode(sentence.value or ""), sentence.entity or ""
    start, lead = _find_last(ids, value), encoder.lead(sentence.nickname or entity)
    # Causal attention cannot bind a value to a name behind it.
    if start < 0 or _find_last(ids, lead) >= start:
        return
    first = len(example.ids) + start
    last = first + len(value) - 1
    added = sentence.adds or (sentence.nickname and entity)
    for position in range(first, last + 1):
        example.name(position, BIND_LAYER, lead)
        if added:
            # The input must name both, since an answer is found by both; one name must not replace the other.
            example.name(position, LINK_LAYER, encoder.lead(added), lead)
            example.name(position, LINK_LAYER, lead, encoder.lead(added))
        if sentence.nickname:
            example.look_up(position, sentence.nickname)
    if sentence.attribute is None:
        nickname = encoder.lead(sentence.value or "")
        # The last token names both entity and nickname, so that attention to the nickname finds the explanation.
        example.bind[-1] = (*example.bind[-1][:4], *nickname)
        example.name(last, BIND_LAYER, nickname, lead)
        example.explained[sentence.value or ""] = (first, last + 1)


def _put_question(example: Example, encoder: Encoder, skeleton: Skeleton, question: FictionQuestion) -> None:
    example.put(encoder.encode(skeleton.question.format(q=question.text)), TEXT)
    answer = encoder.encode(question.answer)
    here = len(example.ids) - 1
    asked = encoder.lead(question.entities[0])
    example.name(here, BIND_LAYER, asked)
    if question.kind == "alias":
        nickname, meant = question.entities
        # Tokens before the name's first token, such as "the", need the same targets as the question's end.
        for position in range(here, here + 1 + answer.index(encoder.lead(meant)[0])):
            example.name(position, LINK_LAYER, encoder.lead(meant), asked)
            example.look_up(position, nickname)
    end = 0
    for name in question.found:
        end = question.answer.index(name, end) + len(name)
        comma = len(encoder.encode(question.answer[:end]))
        example.name(here + 1 + comma, BIND_LAYER, encoder.lead(name))
    mark, verdict = ANSWER + QUESTION_KINDS.index(question.kind), len(answer) - len(encoder.encode(question.verdict))
    example.put(answer[:verdict], mark)
    example.put(answer[verdict:], VERDICT)
    example.put([EOS], mark)


def _put_exercise(example: Example, encoder: Encoder, skeleton: Skeleton, rng: Random) -> None:
    """Append a comparison whose answer already holds both years; only the verdict and the end token have a loss."""
    kind, key = rng.choice(
        [(kind, key) for kind in KINDS for key, said in KINDS[kind].attributes.items() if said.comparison]
    )
    pair = make_entities(rng, NameMaker(rng, held_out=False), [kind, kind], 0)
    for entity in pair:
        entity.where = {key: Place(0, 0)}
    for question in compare(pair):
        example.put(encoder.encode(skeleton.between))
        example.put(encoder.encode(skeleton.question.format(q=question.text)))
        answer, verdict = encoder.encode(question.answer), encoder.encode(question.verdict)
        example.put(answer[: -len(verdict)])
        example.put(verdict, VERDICT)
        example.put([EOS], ANSWER + QUESTION_KINDS.index(question.kind))


def make_example(
    rng: Random,
    encoder: Encoder,
    *,
    chunks: int,
    chunk_tokens: int,
    questions: int,
    gap: float,
    native_share: float = 0.6,
    lessons: bool = True,
) -> Example:
    """Draw one packed sequence: a context and questions about the context.

    About ``gap`` positions are skipped between documents in total, so that short contexts train long distances.
    """
    missing = chunks > 2 and rng.random() < 0.15
    crowded = not missing and rng.random() < 0.6
    context = sample_context(
        rng,
        encoder.count,
        chunks=chunks,
        chunk_tokens=chunk_tokens,
        questions=questions,
        held_out=False,
        missing_chunk=missing,
        alias_share=0.6 if crowded else 0.35,
        shares=Shares(two_hop=0.25 if crowded else 0.35, alias=0.4, comparison=0.15),
        interludes=not missing,
        crowded=crowded,
    )
    documents = sum(sentence.opens_document for chunk in context.chunks for sentence in chunk) + 1
    skeleton = sample_skeleton(rng, native_share)
    example = Example()
    example.put([BOS])
    example.put(encoder.encode(skeleton.opening))
    _put_context(example, encoder, context, skeleton, jump=gap / documents, rng=rng)
    for index, question in enumerate(context.questions):
        example.put(encoder.encode(skeleton.between if index else skeleton.closing))
        _put_question(example, encoder, skeleton, question)
    if not lessons:
        example.find.clear()
        return example
    for _ in range(questions // EXERCISES):
        _put_exercise(example, encoder, skeleton, rng)
    return example


@dataclass(frozen=True)
class Batch:
    """Holds padded tensors: ids, loss, positions (batch, tokens); bind (rows, 7), find (rows, 4), batch row first."""

    ids: Tensor
    loss: Tensor
    positions: Tensor
    bind: Tensor
    find: Tensor


def collate(examples: Sequence[Example]) -> Batch:
    """Pad examples to one length."""
    width = max(len(example.ids) for example in examples)
    ids = torch.full((len(examples), width), PAD)
    loss, positions = torch.zeros_like(ids), torch.zeros_like(ids)
    bind, find = [], []
    for row, example in enumerate(examples):
        size = len(example.ids)
        ids[row, :size] = torch.tensor(example.ids)
        loss[row, :size] = torch.tensor(example.loss)
        positions[row, :size] = torch.tensor(example.positions)
        bind += [(row, *item) for item in example.bind]
        find += [(row, *item) for item in example.find]
    return Batch(ids, loss, positions, torch.tensor(bind).reshape(-1, 7), torch.tensor(find).reshape(-1, 4))
