"""Prints generated prompts about the bundled model's fictional world, for calibrating the bundled model.

python -m cacheblend_lab.fiction --count 40 > prompts.jsonl
cacheblend doctor --calibrate --model bundled --prompts prompts.jsonl
"""

from __future__ import annotations

import argparse
import json
from random import Random
from typing import Any, Final

from cacheblend_lab.datasets import demo_samples
from cacheblend_lab.samples import Sample
from cacheblend_rag.console.output import echo
from cacheblend_rag.engines.models import BUNDLED_MODEL
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.retrieval.chunking import DEFAULT_CHUNK_TOKENS

_CHUNKS: Final = 4
_ROOM: Final = 256
_SEED: Final = 4711
_QUESTIONS_PER_CONTEXT: Final = 8
_SHUFFLED: Final = 0.5


def calibration_rows(
    tokenizer: Any, count: int, context_window: int, most: int = DEFAULT_CHUNK_TOKENS
) -> list[dict[str, Any]]:
    """Return ``count`` rows of a question, its chunks and its answers; each row has its own documents.

    About half of the rows have their chunks in random order, as a retriever may return them; the others in document
    order.
    """
    size = max(1, min(most, (context_window - _ROOM) // _CHUNKS))
    contexts: dict[str, list[Sample]] = {}
    for sample in demo_samples(tokenizer, count * _QUESTIONS_PER_CONTEXT, _SEED, chunks=_CHUNKS, chunk_tokens=size):
        contexts.setdefault(sample.group, []).append(sample)
    # One question per context, with the kinds in turn: more questions on one context would add little.
    chosen = [found[number % len(found)] for number, found in enumerate(contexts.values())][:count]
    rng = Random(_SEED)
    orders = [rng.sample(each.texts, len(each.texts)) if rng.random() < _SHUFFLED else each.texts for each in chosen]
    return [
        {"question": each.question, "chunks": list(texts), "answers": list(each.answers)}
        for each, texts in zip(chosen, orders, strict=True)
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=40, help="number of prompts (default: 40)")
    options = parser.parse_args()
    with TransformersEngine(BUNDLED_MODEL) as engine:
        for row in calibration_rows(engine.tokenizer, options.count, engine.context_window):
            echo(json.dumps(row, ensure_ascii=False))
