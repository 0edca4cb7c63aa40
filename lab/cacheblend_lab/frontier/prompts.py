"""Stores the measured prompts as token ids, made with the retrieval model on one machine and read on a GPU machine."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import zip_longest
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Final

from cacheblend_rag.errors import InputError

if TYPE_CHECKING:
    from cacheblend_lab.evaluation.prepare import Preparation
    from cacheblend_rag.engines.transformers import TransformersEngine

GOLD_TOKENS: Final = 32
"""Maximum number of tokens of a right answer whose likelihood is measured."""


@dataclass(frozen=True)
class FrontierPrompt:
    """Holds a prompt of token ids.

    Attributes:
        data: Name of the prompt's data set.
        header: Token ids that the prompt's chunks are computed behind.
        spans: Start and end of each chunk.
        ids: Token ids of the prompt.
        group: Group of the prompt; prompts of one group share their texts.
        gold: Token ids of a right answer; empty if none is known.
    """

    data: str
    header: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    ids: tuple[int, ...]
    group: str = ""
    gold: tuple[int, ...] = ()

    @property
    def key(self) -> str:
        """Return a hash that identifies the prompt."""
        return sha256(json.dumps([self.data, self.spans, self.ids]).encode()).hexdigest()[:16]


def write_prompts(file: Path, prompts: Sequence[FrontierPrompt]) -> None:
    """Write prompts as compressed JSON lines, for a machine without the retrieval model."""
    with gzip.open(file, "wt", encoding="utf-8") as out:
        for each in prompts:
            out.write(json.dumps([each.data, each.header, each.spans, each.ids, each.group, each.gold]) + "\n")


def read_prompts(file: Path, most: int | None = None, only: Sequence[str] = ()) -> list[FrontierPrompt]:
    """Read the prompts of :func:`write_prompts`, one of each data set in turn, so that an early stop covers all sets alike.

    Args:
        file: The file.
        most: Maximum number of prompts of each data set; None for all.
        only: Names of data sets; empty for all data sets.

    Raises:
        InputError: The file holds no such prompts.
    """
    sets: dict[str, list[FrontierPrompt]] = {}
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        for line in lines:
            data, header, spans, ids, group, gold = json.loads(line)
            prompt = FrontierPrompt(data, tuple(header), tuple(map(tuple, spans)), tuple(ids), group, tuple(gold))
            if not only or data in only:
                sets.setdefault(data, []).append(prompt)
    found = [each for turn in zip_longest(*(prompts[:most] for prompts in sets.values())) for each in turn if each]
    if not found:
        raise InputError(f"{file} holds no prompts{' of these data sets' if only else ''}.")
    return found


def prepare_prompts(
    engine: TransformersEngine, name: str, file: str, most: int, seeds: Sequence[int], how: Preparation
) -> list[FrontierPrompt]:
    """Return prompts of a data set in equal parts drawn by each seed, without repetition.

    Args:
        engine: Engine whose tokenizer and context window are used.
        name: Name of the data set in the results.
        file: The data set, as ``cacheblend eval`` reads it.
        most: Maximum number of prompts over all draws.
        seeds: One seed for each draw.
        how: How prompts are made.
    """
    from cacheblend_lab.datasets import load_data_set
    from cacheblend_lab.evaluation.prepare import Preparer, set_header
    from cacheblend_rag.prompts.prompt import tokenize

    taken: set[str] = set()
    found: list[FrontierPrompt] = []
    for draw, seed in enumerate(seeds, 1):
        samples = load_data_set(file, None, (draw + 1) * most, seed, engine.tokenizer).samples
        # Samples come in the order of their file, and the first samples would be no fair draw.
        Random(f"order:{seed}").shuffle(samples)
        set_header(engine, samples)
        preparer = Preparer(engine, how)
        for sample in samples:
            if len(found) >= most * draw // len(seeds):
                break
            if sample.id in taken:
                continue
            taken.add(sample.id)
            prompt = tokenize(preparer.case(sample).prompt, engine.tokenizer, engine.registry)
            if len(prompt.spans) < 2:
                continue  # one chunk alone is exact
            spans = tuple((span.start, span.end) for span in prompt.spans)
            gold = engine.tokenizer(sample.answers[0], add_special_tokens=False)["input_ids"][:GOLD_TOKENS]
            found.append(FrontierPrompt(name, engine.header_ids, spans, prompt.token_ids, sample.group, tuple(gold)))
    return found


def describe(name: str, prompts: Sequence[FrontierPrompt]) -> str:
    """Return a line about the prompts of a data set."""
    count = max(1, len(prompts))
    tokens, chunks = sum(len(each.ids) for each in prompts), sum(len(each.spans) for each in prompts)
    return f"{name}: {len(prompts)} prompts of {tokens / count:.0f} tokens, {chunks / count:.1f} chunks"
