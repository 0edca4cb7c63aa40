"""Pre-trains (paper sections 3.3, 3.4): a warm start, then masked spans filled with the help of retrieved passages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any, get_args

import torch
from torch import Tensor, nn

from cacheblend_lab.marginal import log_marginal
from cacheblend_lab.realm.examples import Examples, Masked
from cacheblend_lab.realm.index import PassageIndex, newest_step
from cacheblend_lab.realm.inputs import Collator
from cacheblend_lab.realm.model import RealmModel, Shape
from cacheblend_lab.realm.passages import Passage, Tokenized, load_passages, save_passages, tokenize
from cacheblend_lab.realm.refresh import PASSAGES
from cacheblend_lab.realm.renewal import RenewedIndex, age
from cacheblend_lab.realm.runs import RunDirectory, Say, Stage, Told, train
from cacheblend_lab.realm.salient import Finder, Spans, salient_finder
from cacheblend_rag.errors import InputError

WARM, MASKED = 0, 1
"""Numbers of the stages."""


@dataclass(frozen=True)
class PretrainSettings:
    """Says how to pre-train; the defaults are the paper's, but for numbers of steps, which suit one machine.

    Attributes:
        bert: ``tiny`` or the directory of a BERT.
        shape: Lengths and sizes.
        ict: Whether the towers begin with the inverse cloze task.
        warm_steps: Steps of the warm start.
        warm_batch: Sentences in a step of it.
        warm_rate: Its learning rate.
        steps: Steps of masked spans over retrieved passages.
        batch: Sentences in a step.
        rate: Learning rate.
        candidates: Passages that are retrieved for each, the null document not counted.
        refresh_every: Steps between two checkpoints for the index to be renewed from; 0 never renews it.
        spans: What is masked.
        faiss: Kind of index, in FAISS's words.
        seed: Of all that is drawn.
    """

    bert: str = "tiny"
    shape: Shape = field(default_factory=Shape)
    ict: bool = True
    warm_steps: int = 2000
    warm_batch: int = 64
    warm_rate: float = 1e-4
    steps: int = 5000
    batch: int = 16
    rate: float = 3e-5
    candidates: int = 7
    refresh_every: int = 500
    spans: Spans = "salient"
    faiss: str = "Flat"
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            InputError: One is out of range.
        """
        for name in ("warm_batch", "batch", "candidates"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; give at least 1.")
        for name in ("warm_steps", "steps", "refresh_every"):
            if getattr(self, name) < 0:
                raise InputError(f"{name} is {getattr(self, name)}; give 0 or more.")
        if self.spans not in get_args(Spans):
            raise InputError(f"spans is {self.spans!r}; give salient or random.")


Looker = Callable[[RealmModel, PassageIndex], None]


def pretrain(
    corpus: Sequence[Passage] | Callable[[Any, int], Sequence[Passage]],
    output: Path,
    settings: PretrainSettings,
    device: torch.device,
    say: Say = lambda done, of, at: None,
    warmed: Looker = lambda model, index: None,
) -> RealmModel:
    """Pre-train into a directory; called again after it was killed, go on where it was.

    Args:
        corpus: The passages, or what makes them of the tokenizer and the size of a passage.
        output: Gets checkpoints, indexes, ``metrics.jsonl``, and in the end the model.
        settings: How.
        device: Where.
        say: Told of each step.
        warmed: Shown the model and its first index after the warm start; not in a run that goes on beyond it.

    Raises:
        InputError: Another run's settings are in ``output``, or the corpus is too small.
        ModelError: The BERT cannot be used.
        StoreError: Another run is at work there, or it cannot be written.
    """
    run = RunDirectory(output)
    how = asdict(settings)
    with run.alone(how):
        model = RealmModel.create(settings.bert, settings.shape, settings.seed)
        if not (output / PASSAGES).exists():
            made = corpus(model.tokenizer, model.shape.passage_tokens) if callable(corpus) else corpus
            aside = output / f".{PASSAGES}"
            save_passages(made, aside)
            model.save(output)  # the refresher reads the shape from it, and a user's eye the tokenizer
            aside.replace(output / PASSAGES)
        passages = load_passages(output / PASSAGES)
        run.begin(how)
        trainer = Pretraining(model.to(device), passages, run, settings, device)
        trainer.warm_start(say)
        newest = run.newest()
        if newest is None or newest[0] == WARM:
            warmed(model, trainer.open_index())
        trainer.fill_masks(say)
        trainer.finish()
    return model


class Pretraining:
    """The two stages, over one model and corpus."""

    def __init__(
        self,
        model: RealmModel,
        passages: Sequence[Passage],
        run: RunDirectory,
        settings: PretrainSettings,
        device: torch.device,
    ):
        """Prepare; nothing is trained yet."""
        self.model, self.run, self.settings = model, run, settings
        self.passages = tokenize(passages, model.tokenizer, model.shape.passage_tokens)
        self.collator = Collator(model.tokenizer, device)
        self.examples = Examples(passages, self.passages, self.collator.mask, model.shape.query_tokens)
        self.candidates = min(settings.candidates, len(passages) - 1)
        self.finder: Finder | None = None if settings.spans == "random" else salient_finder()[1]
        self.index = RenewedIndex(run, model, self.passages, self.collator)

    def warm_start(self, say: Say) -> None:
        """Run the inverse cloze task; an encoder whose head is new learns to fill in words meanwhile, as BERT has."""
        how, model = self.settings, self.model
        parts: list[nn.Module] = [*([model.query, model.document] if how.ict else [])]
        parts += [model.encoder] if model.shape.new_head else []
        if parts:
            parameters = [parameter for part in parts for parameter in part.parameters()]
            stage = Stage(WARM, "warm start", how.warm_steps, how.warm_rate, self._warm_loss, parameters)
            train(self.run, model, stage, max(1, how.refresh_every or 500), how.seed, say)

    def _warm_loss(self, step: int) -> tuple[Tensor, Told]:
        rng = Random(f"{self.settings.seed}:{WARM}:{step}")
        losses, told = [], Told()
        if self.settings.ict:
            queries, passages = self.examples.cloze(rng, self.settings.warm_batch)
            relevance = self.model.relevance(
                self.model.query(self.collator.queries(queries)), self.model.document(self.collator.documents(passages))
            )
            losses.append(-relevance.log_softmax(-1).diagonal().mean())
            told["ict"] = losses[-1].item()
        if self.model.shape.new_head:
            drawn = self.examples.words(rng, max(1, self.settings.warm_batch // 2))
            sources = [self.passages[example.source] for example in drawn]
            logprobs = self._fill(drawn, [[source] for source in sources])
            masks = sum(len(example.query.masked) for example in drawn)
            losses.append(-logprobs.sum() / masks)
            told["words"] = losses[-1].item()
        return torch.stack(losses).sum(), told

    def fill_masks(self, say: Say) -> None:
        """Run masked language modelling over retrieved passages, the index being renewed beside it."""
        how = self.settings
        self.open_index()
        with self.index.renewed(MASKED, how.steps if how.refresh_every else 0, how.faiss) as saved:
            stage = Stage(
                MASKED, "masked spans", how.steps, how.rate, self._masked_loss, self.model.parameters(), saved
            )
            train(self.run, self.model, stage, how.refresh_every or 500, how.seed, say)

    def _masked_loss(self, step: int) -> tuple[Tensor | None, Told]:
        rng = Random(f"{self.settings.seed}:{MASKED}:{step}")
        drawn = self.examples.spans(rng, self.settings.batch, self.finder)
        index = self.index.newest()
        told = age(index, step)
        if not drawn:
            return None, told
        queries = self.model.query(self.collator.queries([example.query for example in drawn]))
        found = index.search(queries, self.candidates, [example.source for example in drawn])
        fewest = min(map(len, found))  # an inexact index may find fewer
        rows = [row[:fewest] for row in found]
        relevance = self.model.relevance(queries, self.index.vectors([[None, *row] for row in rows]))
        likelihood = self._fill(drawn, [[None, *(self.passages[at] for at in row)] for row in rows])
        prior = relevance.detach().softmax(-1)
        told["p_null"] = prior[:, 0].mean().item()
        if fewest:
            # The paper's retrieval utility, of what the retriever likes best.
            best = likelihood.detach().gather(1, 1 + prior[:, 1:].argmax(1, keepdim=True))
            told["utility"] = (best[:, 0] - likelihood.detach()[:, 0]).mean().item()
        return -log_marginal(relevance, likelihood).mean(), told

    def _fill(self, drawn: Sequence[Masked], candidates: Sequence[Sequence[Tokenized | None]]) -> Tensor:
        """Return log p(y|z,x) of each query's masks together, for each of its candidates: ``[queries, candidates]``."""
        queries = [example.query for example, row in zip(drawn, candidates, strict=True) for _ in row]
        states = self.model.states(self.collator.pairs(queries, [passage for row in candidates for passage in row]))
        masks = [(pair, 1 + at) for pair, query in enumerate(queries) for at in query.masked]
        pairs, positions = torch.tensor(masks, device=states.device).T
        targets = torch.tensor([piece for query in queries for piece in query.targets], device=states.device)
        logprobs = self.model.token_logprobs(states[pairs, positions]).gather(1, targets[:, None])[:, 0]
        total = torch.zeros(len(queries), device=states.device).index_add(0, pairs, logprobs)
        return total.view(len(drawn), -1)

    def open_index(self) -> PassageIndex:
        """Return the newest index; the first one is made here, since there is nothing to go on with before it."""
        if newest_step(self.run.index) is None:
            self.index.build(0, self.settings.faiss)
        return self.index.newest()

    def finish(self) -> None:
        """Keep the model and an index made by it."""
        self.index.build(self.settings.steps, self.settings.faiss)
        self.model.save(self.run.path)
