"""Runs every stage of REALM on fictional worlds with a small BERT, from the inverse cloze task to answers."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from cacheblend_lab.intervals import mean_interval
from cacheblend_lab.realm.closed import closed_book
from cacheblend_lab.realm.evaluate import evaluate, summary
from cacheblend_lab.realm.finetune import FinetuneSettings, finetune
from cacheblend_lab.realm.index import PassageIndex
from cacheblend_lab.realm.inputs import Collator
from cacheblend_lab.realm.model import TINY, RealmModel
from cacheblend_lab.realm.presets import demonstration
from cacheblend_lab.realm.pretrain import PretrainSettings, pretrain
from cacheblend_lab.realm.reading import Library
from cacheblend_lab.realm.runs import Say, write_aside
from cacheblend_lab.realm.staleness import staleness
from cacheblend_lab.realm.world import RealmWorld, make_world

ICT, PRETRAINED, TUNED, CLOSED = "ICT alone", "pre-trained", "fine-tuned", "closed book"

Scores = dict[str, list[dict[str, Any]]]


@dataclass(frozen=True)
class DemoSettings:
    """Holds the sizes of a demonstration; the defaults take minutes on one core.

    Attributes:
        entities: Number of entities in a world.
        pretrain: Settings of the pre-training.
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
