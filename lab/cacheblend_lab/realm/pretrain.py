"""Pre-trains a model (paper sections 3.3, 3.4): a warm start, then filling masked spans from retrieved passages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any, get_args

import torch
from torch import Tensor, nn

from cacheblend_lab.marginal import log_marginal
from cacheblend_lab.realm.examples import Examples, Finder, Masked, Spans, salient_finder
from cacheblend_lab.realm.index import PassageIndex, newest_step
from cacheblend_lab.realm.model import RealmModel, Shape
from cacheblend_lab.realm.passages import Collator, Passage, Tokenized, load_passages, save_passages, tokenize
from cacheblend_lab.realm.renewal import PASSAGES, RenewedIndex, age
from cacheblend_lab.realm.runs import RunDirectory, Say, Stage, Told, train
from cacheblend_rag.errors import InputError

WARM, MASKED = 0, 1
"""Numbers of the stages."""


@dataclass(frozen=True)
class PretrainSettings:
    """Holds the settings of pre-training; the defaults are the paper's, with fewer steps to suit one machine.

    Attributes:
        bert: ``tiny``, ``minilm`` or the directory of a BERT.
        ict: Whether the towers begin with the inverse cloze task.
        steps: Steps of masked spans over retrieved passages.
        candidates: Passages retrieved for each sentence, besides the null document.
        refresh_every: Steps between the checkpoints from which the index is rebuilt; 0 never rebuilds the index.
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
            InputError: A number is out of range, or ``spans`` is unknown.
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
    """Pre-train a model into a directory; a second call resumes a killed run.

    Args:
        corpus: The passages, or a function that returns them from the tokenizer and the size of a passage.
        output: Directory for checkpoints, indexes, ``metrics.jsonl`` and the final model.
        settings: Settings of the pre-training.
        device: Device to train on.
        say: Called after each step.
        warmed: Called with the model and its first index after the warm start; not called if the run resumes a later
            stage.

    Raises:
        InputError: ``output`` holds a run with other settings, or the corpus is too small.
        ModelError: The BERT cannot be used.
        StoreError: Another run is active in ``output``, or ``output`` cannot be written.
    """
    run = RunDirectory(output)
    how = asdict(settings)
    with run.alone(how):
        model = RealmModel.create(settings.bert, settings.shape, settings.seed)
        if not (output / PASSAGES).exists():
            made = corpus(model.tokenizer, model.shape.passage_tokens) if callable(corpus) else corpus
            aside = output / f".{PASSAGES}"
            save_passages(made, aside)
            model.save(output)  # the refresher reads the shape from `output`
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
    """Runs the two stages over one model and corpus."""

    def __init__(
        self,
        model: RealmModel,
        passages: Sequence[Passage],
        run: RunDirectory,
        settings: PretrainSettings,
        device: torch.device,
    ):
        """Tokenize the corpus and set up the examples, without training."""
        self.model, self.run, self.settings = model, run, settings
        self.passages = tokenize(passages, model.tokenizer, model.shape.passage_tokens)
        self.collator = Collator(model.tokenizer, device)
        self.examples = Examples(passages, self.passages, self.collator.mask, model.shape.query_tokens)
        self.candidates = min(settings.candidates, len(passages) - 1)
        self.finder: Finder | None = None if settings.spans == "random" else salient_finder()[1]
        self.index = RenewedIndex(run, model, self.passages, self.collator)

    def warm_start(self, say: Say) -> None:
        """Train the towers on the inverse cloze task, and an encoder with a new head to fill in words, as in BERT."""
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
        """Run masked language modelling over retrieved passages, while another process rebuilds the index."""
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
            # The paper's retrieval utility, for the passage that the retriever ranks first.
            best = likelihood.detach().gather(1, 1 + prior[:, 1:].argmax(1, keepdim=True))
            told["utility"] = (best[:, 0] - likelihood.detach()[:, 0]).mean().item()
        return -log_marginal(relevance, likelihood).mean(), told

    def _fill(self, drawn: Sequence[Masked], candidates: Sequence[Sequence[Tokenized | None]]) -> Tensor:
        """Return log p(y|z,x), summed over a query's masks, for each candidate: ``[queries, candidates]``."""
        queries = [example.query for example, row in zip(drawn, candidates, strict=True) for _ in row]
        states = self.model.states(self.collator.pairs(queries, [passage for row in candidates for passage in row]))
        masks = [(pair, 1 + at) for pair, query in enumerate(queries) for at in query.masked]
        pairs, positions = torch.tensor(masks, device=states.device).T
        targets = torch.tensor([piece for query in queries for piece in query.targets], device=states.device)
        logprobs = self.model.token_logprobs(states[pairs, positions]).gather(1, targets[:, None])[:, 0]
        total = torch.zeros(len(queries), device=states.device).index_add(0, pairs, logprobs)
        return total.view(len(drawn), -1)

    def open_index(self) -> PassageIndex:
        """Return the newest index, and build it first if there is none yet."""
        if newest_step(self.run.index) is None:
            self.index.build(0, self.settings.faiss)
        return self.index.newest()

    def finish(self) -> None:
        """Save the model and an index built with its final weights."""
        self.index.build(self.settings.steps, self.settings.faiss)
        self.model.save(self.run.path)
