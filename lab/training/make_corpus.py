"""Writes the demo's corpus and questions: `python -m training.make_corpus`.

Every name in the corpus is held out: the bundled model never saw it in training. A question's kind depends on where the
library's own chunker cuts the files. Only questions whose chunks are all found by the library's default retrieval are
used: the demo shows the KV of retrieved chunks, not retrieval.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, Final

from transformers import AutoTokenizer

from cacheblend_lab.fiction.entities import Entity, NameMaker, Place, make_entities
from cacheblend_lab.fiction.questions import FictionQuestion, ask
from cacheblend_lab.fiction.writer import Sentence, Style, Writer
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.prompts.chunk import Chunk, chunk_id
from cacheblend_rag.rag.pipeline import RagPipeline
from cacheblend_rag.retrieval.chunking import split_text
from training.train import MODEL_FOLDER

DEMO_FOLDER: Final = MODEL_FOLDER.parent
SEED: Final = 2026
BLOCK_TOKENS: Final = 512
STYLE: Final = Style(filler=0.3, headings=0.7, long=0.0, short_chunks=0.0, inline=0.0, wordy=True)
WANTED: Final = {"single": 7, "cross": 8, "two_hop": 4, "two_hop_cross": 1}


@dataclass(frozen=True)
class Plan:
    """Describes one file of the corpus."""

    name: str
    opening: str
    kinds: dict[str, int]
    blocks: int


PLANS: Final = (
    Plan(
        "handbook.md",
        "# Handbook for new staff\n\nRead this before your first day in the office. It tells you which companies we work "
        "with, who runs them and whom to ask. Please keep the handbook in the library and put it back after use.",
        {"company": 11, "person": 4},
        10,
    ),
    Plan(
        "ship-logs.md",
        "# Ship logs\n\nThe harbour office keeps a page for every ship that comes in, and a few lines about the people on "
        "board. Sailors add to it in the evening. Not every page is complete.",
        {"ship": 11, "person": 4},
        10,
    ),
    Plan(
        "town-chronicle.md",
        "# Town chronicle\n\nThe chronicle was begun in the old school. It tells who lived here, what they did for a living "
        "and where they went. The weather is noted when nothing else happened.",
        {"person": 12, "company": 3},
        10,
    ),
    Plan(
        "observatory-notes.txt",
        "Observatory notes\n\nThese notes were collected on several visits. They are about the observatories on the hills, "
        "the people who lead them and the companies that pay for them.",
        {"observatory": 9, "person": 4, "company": 2},
        10,
    ),
    Plan(
        "market-letters.txt",
        "Letters from the market\n\nThe merchants wrote these letters to each other. They are about ships, companies and the "
        "people behind them. A clerk copied them into one book.",
        {"company": 5, "ship": 5, "person": 4},
        9,
    ),
)


@dataclass
class Document:
    """Holds a written file: its text, its entities and the place of every sentence.

    Attributes:
        entities: The entities; `locate_facts` sets their `where`.
        sentences: Pairs of offset in `text` and sentence.
        named: Entity name -> chunks that name the entity, in order.
        chunks: The chunks that the library cuts the text into.
    """

    plan: Plan
    text: str
    entities: list[Entity]
    sentences: list[tuple[int, Sentence]]
    named: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    chunks: list[Chunk] = field(default_factory=list)

    def needed(self, question: FictionQuestion) -> set[int]:
        """Return the chunks that a question needs."""
        by_name = {entity.name: entity for entity in self.entities}
        chunks: set[int] = set()
        for name, value in zip(question.entities, question.answer.split(", "), strict=True):
            entity = by_name[name]
            stated = [entity.where[key].chunk for key in entity.where if entity.facts[key] == value]
            chunks.update(stated)
            chunks.add(max(chunk for chunk in self.named[name] if chunk <= max(stated)))
        return chunks


def follow_links(entities: Sequence[Entity]) -> list[Entity]:
    """Order entities so that a linked entity, such as a ship's captain, directly follows, as in a real file."""
    by_name = {entity.name: entity for entity in entities}
    ordered: dict[str, Entity] = {}
    for entity in entities:
        current: Entity | None = entity
        while current is not None and current.name not in ordered:
            ordered[current.name] = current
            linked = (by_name.get(value) for value in current.facts.values())
            current = next((other for other in linked if other and other.name not in ordered), None)
    return list(ordered.values())


def write_document(rng: Random, names: NameMaker, plan: Plan, tokenizer: Any) -> Document:
    """Write one file of the corpus."""

    def count(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False).input_ids)

    kinds = [kind for kind, number in plan.kinds.items() for _ in range(number)]
    rng.shuffle(kinds)
    entities = make_entities(rng, names, kinds, alias_share=0.1)
    writer = Writer(rng, count, chunks=plan.blocks, chunk_tokens=BLOCK_TOKENS, style=STYLE)
    for entity in follow_links(entities):
        if writer.full:
            break
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
    """Cut the file into chunks by the library's chunker, and set `Entity.where` of the document's entities."""
    chunks = split_text(document.text, tokenizer, BLOCK_TOKENS)
    document.chunks = chunks
    ends = [chunk.metadata["end"] for chunk in chunks]
    by_name = {entity.name: entity for entity in document.entities}
    named = document.named
    for entity in document.entities:
        entity.where = {}
    for offset, sentence in document.sentences:
        if sentence.entity is None:
            continue
        chunk = next(index for index, end in enumerate(ends) if offset < end)
        if sentence.entity.removeprefix("the ").lower() in sentence.text.lower():
            named[sentence.entity].append(chunk)
        if sentence.attribute:
            # The fact depends on the last chunk that names the entity, which may be the fact's own chunk.
            by_name[sentence.entity].where[sentence.attribute] = Place(chunk, named[sentence.entity][-1])


def find_answerable(rng: Random, documents: Sequence[Document]) -> dict[str, list[tuple[Plan, FictionQuestion]]]:
    """Return question kind -> questions whose chunks the default retrieval finds, with the plan of their file."""
    pools: dict[str, list[tuple[Plan, FictionQuestion]]] = defaultdict(list)
    with TemporaryDirectory() as folder, TransformersEngine() as engine:
        pipeline = RagPipeline(engine, folder)
        for document in documents:
            pipeline.chunks.add(document.plan.name, chunk_id(document.text), document.chunks)
        for document in documents:
            for question in (question for group in ask(rng, document.entities) for question in group):
                if question.kind in WANTED:
                    found = {(hit.path, hit.ordinal) for hit in pipeline.retrieve(question.text).hits}
                    if {(document.plan.name, chunk) for chunk in document.needed(question)} <= found:
                        pools[question.kind].append((document.plan, question))
    return pools


def choose_questions(rng: Random, documents: Sequence[Document]) -> list[dict[str, str]]:
    """Return the demo's questions, spread over files and entities."""
    pools = find_answerable(rng, documents)
    chosen: list[dict[str, str]] = []
    asked: set[str] = set()
    for kind, number in WANTED.items():
        rng.shuffle(pools[kind])
        files = [document.plan.name for document in documents]
        rng.shuffle(files)
        for turn in range(number):
            wanted = files[turn % len(files)]
            fitting = [(plan, question) for plan, question in pools[kind] if question.entities[0] not in asked]
            if not fitting:
                raise SystemExit(
                    f"The default retrieval finds all chunks of only {turn} {kind} questions: try another seed."
                )
            plan, question = next((item for item in fitting if item[0].name == wanted), fitting[0])
            asked.update(question.entities)
            chosen.append({"question": question.text, "answer": question.answer, "kind": kind, "source": plan.name})
    return chosen


def write_documents(rng: Random) -> list[Document]:
    """Return the documents of the corpus, with their facts located in chunks."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL_FOLDER)
    names = NameMaker(rng, held_out=True)
    documents = [write_document(rng, names, plan, tokenizer) for plan in PLANS]
    for document in documents:
        locate_facts(document, tokenizer)
    return documents


def main() -> None:
    """Write `corpus/` and `questions.json`."""
    rng = Random(SEED)
    documents = write_documents(rng)
    corpus = DEMO_FOLDER / "corpus"
    corpus.mkdir(exist_ok=True)
    for document in documents:
        (corpus / document.plan.name).write_text(document.text, encoding="utf-8")
    questions = choose_questions(rng, documents)
    (DEMO_FOLDER / "questions.json").write_text(json.dumps(questions, indent=2) + "\n", encoding="utf-8")
    sys.stdout.write(f"{len(documents)} files, {len(questions)} questions\n")


if __name__ == "__main__":
    main()
