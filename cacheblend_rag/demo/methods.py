"""Names the four methods that the demo compares, and answers a prompt by each method."""

from __future__ import annotations

from collections.abc import Iterator

from cacheblend_rag.blending.settings import BLEND, FULL_RECOMPUTE, FULL_REUSE, PREFIX_CACHING
from cacheblend_rag.engines.base import BlendEngine, Prompt
from cacheblend_rag.engines.results import Generation
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.thoughts import generate_answer

METHODS = {
    "full recompute": FULL_RECOMPUTE,
    "prefix caching": PREFIX_CACHING,
    "full KV reuse": FULL_REUSE,
    "blend": BLEND,
}
"""Methods that the demo compares, as settings of one engine."""


def answer_by_each_method(
    engine: BlendEngine, prompt: Prompt, sampling: SamplingParams
) -> Iterator[tuple[str, Generation]]:
    """Answer one prompt by every method of :data:`METHODS`, in order; raises as :meth:`BlendEngine.generate` does."""
    for name, settings in METHODS.items():
        engine.reset_prefix_cache()  # otherwise a method would reuse the prefix cache of the method before
        yield name, generate_answer(engine, prompt, sampling, settings)
