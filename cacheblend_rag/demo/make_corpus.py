"""Write the demo's corpus and questions: `python -m cacheblend_rag.demo.make_corpus`.

Every name in the corpus is held out: the bundled model never saw it in training. A question's kind follows from where the
library's own chunker cuts the files.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

from transformers import AutoTokenizer

from cacheblend_rag.chunking import split_text
from cacheblend_rag.demo.entities import Entity, make_entities
from cacheblend_rag.demo.names import NameMaker
from cacheblend_rag.demo.training.train import MODEL_FOLDER
from cacheblend_rag.demo.world import Question, ask
from cacheblend_rag.demo.writer import Sentence, Style, Writer

DEMO_FOLDER: Final = Path(__file__).parent
SEED: Final = 2026
BLOCK_TOKENS: Final = 512
STYLE: Final = Style(filler=0.3, headings=0.6, long=0.6, short_chunks=0.0, inline=0.0)
WANTED: Final = {"single": 6, "cross": 7, "two_hop": 4, "two_hop_cross": 3}


@dataclass(frozen=True)
class Plan:
    """One file of the corpus.

    Attributes:
        name: File name.
        opening: Title and first paragraph.
        kinds: How many entities of each kind it may tell about.
        blocks: Its length, in blocks of 512 tokens.
    """

    name: str
    opening: str
    kinds: dict[str, int]
    blocks: int


PLANS: Final = (
    Plan(
        "handbook.md",
        "# Handbook for new staff\n\nRead this before your first day in the office. It tells you which companies we work "
        "with, who runs them and whom to ask. Please keep the handbook in the library and put it back after use.",
        {"company": 28, "person": 8},
        11,
    ),
    Plan(
        "ship-logs.md",
        "# Ship logs\n\nThe harbour office keeps a page for every ship that comes in, and a few lines about the people on "
        "board. Sailors add to it in the evening. Not every page is complete.",
        {"ship": 26, "person": 10},
        11,
    ),
    Plan(
        "town-chronicle.md",
        "# Town chronicle\n\nThe chronicle was begun in the old school. It tells who lived here, what they did for a living "
        "and where they went. The weather is noted when nothing else happened.",
        {"person": 30, "company": 6},
        11,
    ),
    Plan(
        "observatory-notes.txt",
        "Observatory notes\n\nThese notes were collected on several visits. They are about the observatories on the hills, "
        "the people who lead them and the companies that pay for them.",
        {"observatory": 22, "person": 8, "company": 6},
        10,
    ),
    Plan(
        "market-letters.txt",
        "Letters from the market\n\nThe merchants wrote these letters to each other. They are about ships, companies and the "
        "people behind them. A clerk copied them into one book.",
        {"company": 12, "ship": 12, "person": 10},
        10,
    ),
)


@dataclass
class Document:
    """A written file: its text, the entities in it and the place of every sentence."""

    plan: Plan
    text: str
    entities: list[Entity]
    sentences: list[tuple[int, Sentence]]


def write_document(rng: Random, names: NameMaker, plan: Plan, tokenizer: Any) -> Document:
    """Write one file of the corpus."""

    def count(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False).input_ids)

    kinds = [kind for kind, number in plan.kinds.items() for _ in range(number)]
    rng.shuffle(kinds)
    entities = make_entities(rng, names, kinds, alias_share=0.1)
    writer = Writer(rng, count, chunks=plan.blocks, chunk_tokens=BLOCK_TOKENS, style=STYLE)
    for entity in entities:
        if writer.full:
            break
        if rng.random() < 0.3:
            writer.fill(rng.uniform(15, 60), "\n\n")
        writer.write(entity)
    text, sentences = plan.opening, []
    for block in writer.chunks[: plan.blocks]:
        for index, sentence in enumerate(block):
            opens = sentence.opens_document or sentence.entity is None
            text += sentence.before if index else "\n\n" if opens else " "
            sentences.append((len(text), sentence))
            text += sentence.text
    return Document(plan, text + "\n", entities, sentences)


def locate_facts(document: Document, tokenizer: Any) -> None:
    """Set `Entity.where` by the chunks that the library cuts the file into."""
    chunks = split_text(document.text, tokenizer, BLOCK_TOKENS)
    ends = [chunk.metadata["end"] for chunk in chunks]
    by_name = {entity.name: entity for entity in document.entities}
    named: dict[str, set[int]] = defaultdict(set)
    for entity in document.entities:
        entity.where = {}
    for offset, sentence in document.sentences:
        if sentence.entity is None:
            continue
        chunk = next(index for index, end in enumerate(ends) if offset < end)
        if sentence.entity.removeprefix("the ").lower() in sentence.text.lower():
            named[sentence.entity].add(chunk)
        if sentence.attribute:
            by_name[sentence.entity].where[sentence.attribute] = (chunk, chunk in named[sentence.entity])


def choose_questions(rng: Random, documents: Sequence[Document]) -> list[dict[str, str]]:
    """Return the demo's questions, spread over files and entities."""
    pools: dict[str, list[tuple[Plan, Question]]] = defaultdict(list)
    for document in documents:
        for group in ask(rng, document.entities):
            for question in group:
                pools[question.kind].append((document.plan, question))
    chosen: list[dict[str, str]] = []
    asked: set[str] = set()
    for kind, number in WANTED.items():
        rng.shuffle(pools[kind])
        files = [document.plan.name for document in documents]
        rng.shuffle(files)
        for turn in range(number):
            wanted = files[turn % len(files)]
            plan, question = next(
                (plan, question)
                for match in (True, False)
                for plan, question in pools[kind]
                if (plan.name == wanted or not match) and question.entities[0] not in asked
            )
            asked.update(question.entities)
            chosen.append({"question": question.text, "answer": question.answer, "kind": kind, "source": plan.name})
    return chosen


def main() -> None:
    """Write `corpus/` and `questions.json`."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL_FOLDER)
    rng = Random(SEED)
    names = NameMaker(rng, held_out=True)
    corpus = DEMO_FOLDER / "corpus"
    corpus.mkdir(exist_ok=True)
    documents = []
    for plan in PLANS:
        document = write_document(rng, names, plan, tokenizer)
        locate_facts(document, tokenizer)
        documents.append(document)
        (corpus / plan.name).write_text(document.text, encoding="utf-8")
    questions = choose_questions(rng, documents)
    (DEMO_FOLDER / "questions.json").write_text(json.dumps(questions, indent=2) + "\n", encoding="utf-8")
    sys.stdout.write(f"{len(documents)} files, {len(questions)} questions\n")


if __name__ == "__main__":
    main()
