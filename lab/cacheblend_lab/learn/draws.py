"""Draws batches of prompts: chunks of random number, length, order and place, then a question or a continuation.

The first chunk is directly behind the header, where engines have exact KV for it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from random import Random
from typing import Final

import torch

from cacheblend_lab.learn.blend import BatchLayout, PromptBatch
from cacheblend_lab.learn.corpus import LearnCorpus, LearnTexts
from cacheblend_rag.errors import InputError

_MANY: Final = 0.1  # share of batches with more than twelve chunks
_UNIFORM: Final = 0.5
_CONTINUED: Final = 0.3
_NEIGHBOURS: Final = 0.5
_MOST_TAIL: Final = 96
_CONTINUATION: Final = 48
_QUESTION_WEIGHT: Final = 0.3


@dataclass(frozen=True)
class DrawSettings:
    """Holds the sizes of batches.

    Attributes:
        batch_tokens: Most tokens of a batch, padding included; every batch has at least one prompt.
    """

    prompt_tokens: int
    batch_tokens: int
    shortest: int = 64
    longest: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise `InputError` for sizes that fit no prompt."""
        if not 1 < self.shortest <= self.longest:
            raise InputError("Chunks need at least 2 tokens, and no fewer at the most than at the least.")
        if self.prompt_tokens < 2 * self.shortest + 2 * _MOST_TAIL:
            raise InputError(f"prompt_tokens is {self.prompt_tokens}: two chunks and a question do not fit.")


class Draws:
    """Makes batches by number; equal numbers give equal prompts while the batch size is unchanged."""

    def __init__(self, corpus: LearnCorpus, settings: DrawSettings, device: torch.device, held_out: bool = False):
        """Draw from the corpus's training texts, or from its held-out texts."""
        self._texts: LearnTexts = corpus.held_out if held_out else corpus.train
        self._corpus, self._settings, self._device = corpus, settings, device
        self._kind = "held out" if held_out else "train"
        self.batch_tokens = settings.batch_tokens

    @property
    def identity(self) -> str:
        """Return a hash of texts and settings, which must be equal for a run to resume."""
        read = (self._texts.pieces, self._texts.asked, self._corpus.headers, self._settings)
        return hashlib.sha256(repr(read).encode()).hexdigest()[:16]

    def shrink(self, share: float) -> bool:
        """Multiply the batch size by ``share``; return True if every batch was a single prompt before."""
        single = self.batch_tokens < self._settings.shortest
        self.batch_tokens = round(self.batch_tokens * share)
        return single

    def batch(self, number: int) -> PromptBatch:
        """Return batch ``number``."""
        random = Random(f"{self._settings.seed} {self._kind} {number}")
        header, lengths = random.choice(self._corpus.headers), self._lengths(random)
        gap = len(self._corpus.separator)
        total = len(header) + sum(lengths) + gap * (len(lengths) - 1)
        rows = max(1, self.batch_tokens // (total + _MOST_TAIL))
        spans, at = [], len(header)
        for length in lengths:
            spans.append((at, at + length))
            at += length + gap
        drawn = [self._prompt(random, lengths) for _ in range(rows)]
        watched = max(len(tail) for _, tail, _ in drawn)
        prompts, weights = [], []
        for chunks, tail, counts in drawn:
            prompt = list(header)
            for chunk in chunks:
                prompt += [*(self._corpus.separator if len(prompt) > len(header) else ()), *chunk]
            padding = [0] * (watched - len(tail))
            prompts.append([*prompt, *tail, *padding])
            weights.append([*counts, *padding])
        layout = BatchLayout(header, tuple(spans), total + watched, watched, exact=1)
        ids = torch.tensor(prompts)
        weight = torch.tensor(weights, dtype=torch.float32)
        if self._device.type == "cuda":
            ids, weight = ids.pin_memory(), weight.pin_memory()
        return PromptBatch(layout, ids.to(self._device, non_blocking=True), weight.to(self._device, non_blocking=True))

    def _lengths(self, random: Random) -> list[int]:
        """Return the lengths of a prompt's 2 to 12, rarely up to 24, chunks; the lengths are random or all equal."""
        how = self._settings
        count = random.randint(13, 24) if random.random() < _MANY else random.randint(2, 12)
        size = round(how.shortest * (how.longest / how.shortest) ** random.random())
        uniform = random.random() < _UNIFORM
        lengths = [size if uniform else random.randint(how.shortest, how.longest) for _ in range(count)]
        room = how.prompt_tokens - _MOST_TAIL - max(map(len, self._corpus.headers))
        gap = len(self._corpus.separator)
        while len(lengths) > 2 and sum(lengths) + gap * len(lengths) > room:
            lengths.pop()
        most = room // len(lengths) - gap
        return [min(length, most) for length in lengths]

    def _prompt(self, random: Random, lengths: list[int]) -> tuple[list[tuple[int, ...]], tuple[int, ...], list[float]]:
        """Return chunks of these lengths, the token ids behind the chunks, and the weight of each of these tokens."""
        asked = self._texts.asked
        continued = not asked or (bool(self._texts.pieces) and random.random() < _CONTINUED)
        if continued:
            stretches, follows = self._continued(random, lengths)
            return stretches, follows, [1.0] * len(follows)
        each = random.choice(asked)
        passages = list(each.passages)
        random.shuffle(passages)
        stream = self._joined(passages)
        missing = sum(lengths) - len(stream)
        if missing > 0:
            before = random.randint(0, missing)
            stream = (*self._filler(random, before), *stream, *self._filler(random, missing - before))
        begin = random.randint(0, len(stream) - sum(lengths))
        chunks: list[tuple[int, ...]] = [()] * len(lengths)
        for slot in random.sample(range(len(lengths)), len(lengths)):
            chunks[slot] = stream[begin : begin + lengths[slot]]
            begin += lengths[slot]
        tail = (*each.ids, *each.answer)[:_MOST_TAIL]
        # The last token of the question predicts the answer's first token, so it counts fully.
        question = min(len(each.ids) - 1, len(tail))
        return chunks, tail, [_QUESTION_WEIGHT] * question + [1.0] * (len(tail) - question)

    def _continued(self, random: Random, lengths: list[int]) -> tuple[list[tuple[int, ...]], tuple[int, ...]]:
        """Return chunks cut from documents, and the continuation of the last chunk."""
        pieces = self._texts.pieces
        at = random.randrange(len(pieces))
        near = random.random() < _NEIGHBOURS
        chunks: list[tuple[int, ...]] = []
        for number, length in enumerate(lengths):
            last = number == len(lengths) - 1
            wanted = length + (_CONTINUATION if last else 0)
            piece = pieces[(at + random.randint(-2, 2)) % len(pieces) if near else random.randrange(len(pieces))]
            if len(piece) < wanted:
                piece = (*piece, *self._filler(random, wanted - len(piece)))
            begin = random.randint(0, len(piece) - wanted)
            chunks.append(piece[begin : begin + wanted])
        last_chunk, length = chunks[-1], lengths[-1]
        chunks[-1] = last_chunk[:length]
        return chunks, last_chunk[length:]

    def _filler(self, random: Random, count: int) -> tuple[int, ...]:
        """Return ``count`` tokens of random other texts."""
        parts: list[int] = []
        while len(parts) < count:
            if self._texts.pieces and (not self._texts.asked or random.random() < 0.5):
                text = random.choice(self._texts.pieces)
                begin = random.randrange(len(text))
                text = text[begin : begin + count]
            else:
                text = self._joined([random.choice(random.choice(self._texts.asked).passages)])
            parts += [*text, *self._corpus.separator]
        return tuple(parts[:count])

    def _joined(self, passages: list[tuple[int, ...]]) -> tuple[int, ...]:
        joined: list[int] = []
        for passage in passages:
            joined += [*(self._corpus.separator if joined else ()), *passage]
        return tuple(joined)
