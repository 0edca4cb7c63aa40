"""Answers without retrieval: the closed-book reader, which has the same encoder, is the baseline for retrieval."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from cacheblend_lab.realm.finetune import FinetuneSettings
from cacheblend_lab.realm.inputs import Collator, Query
from cacheblend_lab.realm.model import RealmModel
from cacheblend_lab.realm.questions import RealmQuestion
from cacheblend_lab.realm.runs import RunDirectory, Say, Stage, Told, train

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
