"""Makes the prompts that the ablations measure on, one a context: generated, of a data set, or random."""

from __future__ import annotations

from pathlib import Path

from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.lab.datasets import demo_samples, load_data_set
from cacheblend_rag.lab.doctor.workbench import Workbench
from cacheblend_rag.lab.evaluation.prepare import Preparation, Preparer, set_header
from cacheblend_rag.lab.samples import Sample
from cacheblend_rag.prompts.prompt import TokenizedPrompt, tokenize


def random_prompts(place: Workbench, count: int, chunks: int, chunk_tokens: int) -> list[TokenizedPrompt]:
    """Return prompts of random tokens, for models of random weights."""
    return [
        place.prompt(place.random_chunks(chunks, chunk_tokens, 1000 + number), 16, number) for number in range(count)
    ]


def demo_prompts(engine: TransformersEngine, count: int, seed: int, chunks: int) -> list[TokenizedPrompt]:
    """Return one prompt per generated context, about references across chunks."""
    samples = demo_samples(engine.tokenizer, 8 * count, seed, kinds=("cross", "two_hop_cross"), chunks=chunks)
    first = list({sample.group: sample for sample in reversed(samples)}.values())[::-1]
    return _prompts(engine, first[:count], chunks)


def data_prompts(
    engine: TransformersEngine, name: str, data: Path | None, count: int, seed: int, chunks: int
) -> list[TokenizedPrompt]:
    """Return the prompts of ``count`` questions of a data set; see :func:`load_data_set`."""
    return _prompts(engine, load_data_set(name, data, count, seed, engine.tokenizer).samples, chunks)


def _prompts(engine: TransformersEngine, samples: list[Sample], chunks: int) -> list[TokenizedPrompt]:
    set_header(engine, samples)
    preparer = Preparer(engine, Preparation(k=chunks))
    return [tokenize(preparer.case(sample).prompt, engine.tokenizer, engine.registry) for sample in samples]
