"""Runs every stage of REALM on fictional worlds with a small BERT, and a closed-book reader as the baseline."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any, Final

import torch
from torch import Tensor

from cacheblend_lab.fiction.entities import Entity, NameMaker, draw_kinds, make_entities
from cacheblend_lab.fiction.phrases import KINDS
from cacheblend_lab.fiction.writer import Sentence, Style, Writer
from cacheblend_lab.intervals import mean_interval
from cacheblend_lab.realm.evaluate import Library, evaluate, summary
from cacheblend_lab.realm.finetune import FinetuneSettings, finetune
from cacheblend_lab.realm.index import PassageIndex
from cacheblend_lab.realm.model import TINY, RealmModel
from cacheblend_lab.realm.passages import Collator, Passage, Query, cut
from cacheblend_lab.realm.presets import demonstration
from cacheblend_lab.realm.pretrain import PretrainSettings, pretrain
from cacheblend_lab.realm.questions import RealmQuestion
from cacheblend_lab.realm.runs import RunDirectory, Say, Stage, Told, staleness, train, write_aside

_STAGE = 3


def closed_book(
    model: RealmModel,
    learn: Sequence[RealmQuestion],
    ask: Sequence[RealmQuestion],
    output: Path,
    settings: FinetuneSettings,
    device: torch.device,
    say: Say = lambda done, of, at: None,
) -> list[dict[str, Any]]:
    """Train the encoder to fill the answer into masks behind the question, and ask the questions of ``ask``.

    The encoder starts from the pre-trained weights, as the reader does. The number of masks reveals how many word
    pieces the answer has, which makes the scores somewhat too high.

    Returns:
        One row per question of ``ask``: ``question``, ``answer`` and ``em``.
    """
    encoder = deepcopy(model)
    collator = Collator(model.tokenizer, device)
    train_on = [_masked(encoder, question, collator.mask) for question in learn]

    def loss(step: int) -> tuple[Tensor, Told]:
        rng = Random(f"{settings.seed}:{_STAGE}:{step}")
        # A step without passages has room for `k` times as many questions.
        drawn = [rng.choice(train_on) for _ in range(settings.batch * settings.k)]
        logprobs, targets = _predict(encoder, collator, drawn)
        return torch.nn.functional.nll_loss(logprobs, targets), Told()

    run = RunDirectory(output)
    how = asdict(settings) | {"model": "closed book"}
    with run.alone(how):
        run.begin(how)
        stage = Stage(_STAGE, "closed book", settings.steps, settings.rate, loss, encoder.encoder.parameters())
        train(run, encoder, stage, settings.steps, settings.seed, say)
    rows = []
    with torch.no_grad():
        for question in ask:
            logprobs, _ = _predict(encoder, collator, [_masked(encoder, question, collator.mask)])
            said = str(model.tokenizer.decode(logprobs.argmax(-1).tolist()))
            rows.append({"question": question.text, "answer": said, "em": question.right(said)})
    return rows


def _masked(model: RealmModel, question: RealmQuestion, mask: int) -> Query:
    ids = Query.question(question.text, model.tokenizer, model.shape.query_tokens - model.shape.span_tokens).ids
    answer = model.tokenizer(question.answers[0], add_special_tokens=False)["input_ids"][: model.shape.span_tokens]
    return Query([*ids, *[mask] * len(answer)], list(range(len(ids), len(ids) + len(answer))), answer)


def _predict(model: RealmModel, collator: Collator, queries: Sequence[Query]) -> tuple[Tensor, Tensor]:
    states = model.states(collator.queries(queries))
    rows = [(number, 1 + at) for number, query in enumerate(queries) for at in query.masked]
    numbers, positions = torch.tensor(rows, device=states.device).T
    targets = torch.tensor([piece for query in queries for piece in query.targets], device=states.device)
    return model.token_logprobs(states[numbers, positions]), targets


VOLUMES: Final = 2
"""Number of articles about each entity; two articles may state one fact in different words, as in encyclopedias."""

_STYLE: Final = Style(filler=0.1, headings=0.0, long=0.0, short_chunks=0.0, inline=1.0)
_ASKED_LATER: Final = 0.3
_ENDLESS: Final = 1_000_000


@dataclass(frozen=True)
class RealmWorld:
    """Holds a corpus and questions about the corpus.

    Attributes:
        held_out: Questions about other entities of the corpus.
    """

    passages: list[Passage]
    train: list[RealmQuestion]
    held_out: list[RealmQuestion]


def make_world(seed: int, entities: int, tokenizer: Any, size: int) -> RealmWorld:
    """Write articles about fictional entities, and ask about every fact in them."""
    rng = Random(f"realm:{seed}")
    names = NameMaker(rng, held_out=False)
    made = make_entities(rng, names, draw_kinds(rng, entities), 0.0)
    later = set(rng.sample(range(entities), round(_ASKED_LATER * entities)))
    world = RealmWorld([], [], [])
    for number, entity in enumerate(made):
        stated: dict[str, list[int]] = {}
        for _ in range(VOLUMES):
            written = _write(rng, entity)
            title = entity.name.removeprefix("the ")
            begin = len(world.passages)
            world.passages.extend(
                cut(title, "".join(s.before * (i > 0) + s.text for i, s in enumerate(written)), tokenizer, size)
            )
            for sentence in written:
                if sentence.attribute is not None:
                    places = [
                        at for at in range(begin, len(world.passages)) if sentence.text in world.passages[at].text
                    ]
                    stated.setdefault(sentence.attribute, []).extend(places)
        asked = _ask(rng, entity, stated, every=number not in later)
        (world.held_out if number in later else world.train).extend(asked)
    return world


def _write(rng: Random, entity: Entity) -> Sequence[Sentence]:
    writer = Writer(rng, lambda text: len(text.split()), chunks=1, chunk_tokens=_ENDLESS, style=_STYLE)
    writer.write(replace(entity, where={}))
    return writer.chunks[0]


def _ask(rng: Random, entity: Entity, stated: dict[str, list[int]], *, every: bool) -> list[RealmQuestion]:
    """Return one question about each stated fact in a random wording or, with ``every``, in each known wording."""
    found = []
    for key, places in stated.items():
        wordings = KINDS[entity.kind].attributes[key].questions
        for wording in wordings if every else (rng.choice(wordings),):
            text = wording.format(E=entity.name)
            found.append(RealmQuestion(text, (entity.facts[key],), passages=tuple(places), group=entity.name))
    return found


ICT, PRETRAINED, TUNED, CLOSED = "ICT alone", "pre-trained", "fine-tuned", "closed book"

Scores = dict[str, list[dict[str, Any]]]


@dataclass(frozen=True)
class DemoSettings:
    """Holds the sizes of a demonstration; the defaults take minutes on one core.

    Attributes:
        finetune: Settings of the fine-tuning and of the closed-book reader's training.
    """

    entities: int = 120
    pretrain: PretrainSettings = field(default_factory=lambda: demonstration(TINY)[0])
    finetune: FinetuneSettings = field(default_factory=lambda: demonstration(TINY)[1])


def run_demo(
    seeds: Sequence[int],
    settings: DemoSettings,
    output: Path | None,
    say: Callable[[str, float, int], None] = lambda at, done, of: None,
) -> dict[str, Any]:
    """Train one model per seed's world, ask about entities that no training question names, and pool the answers.

    Args:
        seeds: Seeds of the worlds; each world gets its own model.
        settings: Sizes.
        output: Directory that keeps the models, for inspection or for resuming; None deletes the models.
        say: Called with the current task, the steps done and the number of steps.

    Returns:
        ``scores``: a summary (see :func:`summary`) after each stage and of the closed-book reader; ``gains``: the
        fine-tuned model's gain in ``recall@1`` over the inverse cloze task alone and in ``em`` over the closed-book
        reader, each with its interval; ``seeds``: scores and gains of each seed; ``worlds``: sizes of each world.
    """
    pooled: Scores = {}
    groups: list[str] = []
    worlds, by_seed = [], []
    for seed in seeds:
        with _directory(output, seed) as place:
            world, scores, index = _one(seed, settings, place, say)
        names = [f"{seed}:{question.group}" for question in world.held_out]
        groups += names
        for stage, rows in scores.items():
            pooled.setdefault(stage, []).extend(rows)
        worlds.append({"seed": seed, **_sizes(world), "index": index})
        by_seed.append({"seed": seed, "scores": _summaries(scores, names), "gains": _gains(scores, names)})
    return {"scores": _summaries(pooled, groups), "gains": _gains(pooled, groups), "seeds": by_seed, "worlds": worlds}


def _one(
    seed: int, settings: DemoSettings, place: Path, say: Callable[[str, float, int], None]
) -> tuple[RealmWorld, Scores, dict[str, Any]]:
    device = torch.device("cpu")
    how = replace(settings.pretrain, seed=seed)
    tokenizer = RealmModel.create(how.bert, how.shape).tokenizer
    world = make_world(seed, settings.entities, tokenizer, how.shape.passage_tokens)
    scores: Scores = {}
    kept = place / "ict.json"

    def told(what: str) -> Say:
        return lambda done, of, at: say(f"seed {seed}, {at or what}", done, of)

    def score(stage: str, model: RealmModel, library: Library) -> None:
        collator = Collator(model.tokenizer, device)
        scores[stage] = evaluate(model.eval(), library, world.held_out, collator, settings.finetune.k, told("asking"))

    def warmed(model: RealmModel, index: PassageIndex) -> None:
        score(ICT, model, Library(world.passages, index, model))
        write_aside(kept, json.dumps(scores[ICT]))

    model = pretrain(world.passages, place / "pretrained", how, device, told("pre-training"), warmed)
    scores.setdefault(ICT, json.loads(kept.read_text(encoding="utf-8")))  # a resumed run reads the earlier scores
    score(PRETRAINED, model, Library(world.passages, PassageIndex.load(place / "pretrained" / "index"), model))
    taught = replace(settings.finetune, seed=seed)
    tuned, library = finetune(place / "pretrained", world.train, place / "tuned", taught, device, told("fine-tuning"))
    score(TUNED, tuned, library)
    scores[CLOSED] = closed_book(
        RealmModel.load(place / "pretrained"),
        world.train,
        world.held_out,
        place / "closed",
        taught,
        device,
        told("closed book"),
    )
    return world, scores, staleness(place / "pretrained")


@contextmanager
def _directory(output: Path | None, seed: int) -> Iterator[Path]:
    """Yield a directory for one seed; a temporary one without ``output``."""
    if output is not None:
        place = output / f"seed-{seed}"
        place.mkdir(parents=True, exist_ok=True)
        yield place
        return
    with tempfile.TemporaryDirectory(prefix="cacheblend-realm-") as name:
        yield Path(name)


def _sizes(world: RealmWorld) -> dict[str, int]:
    return {"passages": len(world.passages), "train": len(world.train), "held_out": len(world.held_out)}


def _summaries(scores: Scores, groups: Sequence[str]) -> dict[str, Any]:
    found = {stage: summary(rows, groups) for stage, rows in scores.items()}
    for stage in (ICT, PRETRAINED):
        found.get(stage, {}).pop("em", None)  # the reader is untrained at this stage
    return found


def _gains(scores: Scores, groups: Sequence[str]) -> dict[str, Any]:
    found = {}
    for name, stage in (("recall@1", ICT), ("em", CLOSED)):
        values = [after[name] - before[name] for after, before in zip(scores[TUNED], scores[stage], strict=True)]
        low, high = mean_interval(values, groups) or (None, None)
        found[name] = {"over": stage, "mean": sum(values) / len(values), "low": low, "high": high}
    return found
