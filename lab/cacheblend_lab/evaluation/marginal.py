"""Answers by the sum over chunks of p(y|z, x) p(z|x), each chunk alone in its prompt (REALM equation 1)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from cacheblend_lab.scoring import score
from cacheblend_lab.spelling import answer_ids
from cacheblend_rag.engines.base import BlendEngine
from cacheblend_rag.engines.results import Generation
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.thoughts import generate_answer
from cacheblend_rag.errors import InputError
from cacheblend_rag.prompts.prompt import BlendPrompt, rag_prompt
from cacheblend_rag.rag.pipeline import RagPipeline
from cacheblend_rag.rag.results import RagAnswer, check_question

TEMPERATURE: Final = 0.05
"""Divisor of cosine similarities for p(z|x), as in the tuning of a retriever."""


@dataclass(frozen=True)
class Marginal:
    """Holds the answers of one question from each chunk alone.

    Attributes:
        generations: Generation of each prompt, in order of the prompts.
        candidates: Each different answer and its probability p(y|x), likeliest first.
        weighing_tokens: Tokens computed to weigh the answers: every prompt is prefilled once more, followed by all
            answers.
    """

    generations: tuple[Generation, ...]
    candidates: tuple[tuple[str, float], ...]
    weighing_tokens: int

    @property
    def best(self) -> str:
        """Return the likeliest answer."""
        return self.candidates[0][0]

    @property
    def generation(self) -> Generation:
        """Return the generation of the first prompt that gave the likeliest answer."""
        return next(done for done in self.generations if done.text.strip() == self.best)


def marginalise(
    engine: BlendEngine,
    prompts: Sequence[BlendPrompt],
    prior: Sequence[float],
    sampling: SamplingParams | None = None,
) -> Marginal:
    """Generate an answer from every prompt, and weigh each answer by its likelihood behind all prompts.

    Args:
        engine: The reader.
        prompts: One prompt for each chunk.
        prior: p(z|x) of each chunk.
        sampling: Sampling parameters of the answers.

    Raises:
        InputError: The engine cannot score.
    """
    generations = tuple(generate_answer(engine, prompt, sampling) for prompt in prompts)
    answers = list(dict.fromkeys(done.text.strip() for done in generations))
    completions = [answer_ids(engine.tokenizer, answer) for answer in answers]
    scores = [score(engine, prompt, completions) for prompt in prompts]
    likelihood = np.exp([[each.logprob for each in row] for row in scores])
    probability = (np.asarray(prior) @ likelihood).tolist()
    ranked = sorted(zip(answers, probability, strict=True), key=lambda pair: -pair[1])
    behind = sum(len(ids) - 1 for ids in completions)  # an answer's last token is not computed
    weighing = sum(done.usage.computed_tokens + behind for done in generations)
    return Marginal(generations, tuple(ranked), weighing)


@dataclass(frozen=True)
class MarginalAnswer(RagAnswer):
    """Holds an answer with the candidates it was chosen from.

    Attributes:
        candidates: Each different answer and its probability p(y|x), likeliest first.
        priors: p(z|x) of each source, in order of the sources.
    """

    candidates: tuple[tuple[str, float], ...] = ()
    priors: tuple[float, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the answer as ``ask --answer marginal --json`` prints it."""
        sources = [
            {**source, "prior": prior} for source, prior in zip(super().to_dict()["sources"], self.priors, strict=True)
        ]
        found = [{"answer": text, "probability": probability} for text, probability in self.candidates]
        return {**super().to_dict(), "sources": sources, "candidates": found}


def answer_marginally(
    pipeline: RagPipeline, question: str, k: int = 6, sampling: SamplingParams | None = None
) -> MarginalAnswer:
    """Answer from each of the ``k`` nearest chunks alone, and choose the answer that is likeliest over all chunks.

    Header and one chunk are reused exactly, so that nothing is blended. Facts from two chunks are not combined: that
    takes one prompt with both chunks.

    Raises:
        InputError: The question is empty, nothing is indexed, the engine cannot score, or a chunk does not fit its
            context window.
    """
    check_question(question)
    begin = time.perf_counter()
    hits = pipeline.chunks.search(question, k)
    if not hits:
        raise InputError(f"Nothing is indexed in {pipeline.chunks.directory} yet; index some documents first.")
    engine, retrieve_s = pipeline.engine, time.perf_counter() - begin
    engine.registry.follow()  # another process may have indexed the chunks
    prompts = [rag_prompt(engine.tokenizer, [hit.chunk], question, pipeline.instruction) for hit in hits]
    prior = priors([hit.score or 0.0 for hit in hits])
    found = marginalise(engine, prompts, prior, sampling)
    note = (
        f"the likeliest of {len(found.candidates)} different answers from {len(hits)} chunks, "
        f"p = {found.candidates[0][1]:.2f}"
    )
    return MarginalAnswer(
        found.best,
        tuple(hits),
        found.generation,
        retrieve_s,
        (note,),
        candidates=found.candidates,
        priors=tuple(prior),
    )


def priors(similarities: Sequence[float]) -> list[float]:
    """Return p(z|x) of chunks by their cosine similarity to the question."""
    from scipy.special import softmax

    found: list[float] = softmax(np.asarray(similarities, np.float64) / TEMPERATURE).tolist()
    return found
