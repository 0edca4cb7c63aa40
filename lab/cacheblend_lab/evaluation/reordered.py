"""Reorders a prompt's chunks so that a prefix cache hits, with and without a blend of the other chunks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace

import xxhash

from cacheblend_lab.evaluation.method import InTurn, Reply, generate_reply
from cacheblend_lab.reorder import DEFAULT_BUDGET, ReorderedPrompts
from cacheblend_lab.samples import EvalCase
from cacheblend_rag.blending.settings import FULL_RECOMPUTE, PREFIX_CACHING, BlendSettings
from cacheblend_rag.engines.base import BlendEngine
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.thoughts import generate_answer
from cacheblend_rag.errors import ModelError
from cacheblend_rag.prompts.chunk import Chunk, chunk_id
from cacheblend_rag.prompts.prompt import BlendPrompt, rag_prompt
from cacheblend_rag.prompts.templates import SEPARATOR


class ReorderMethod(InTurn):
    """Answers with chunks in an order that an ordinary prefix cache hits, alone or with the other chunks blended.

    The cached prefix is computed in its context, without being timed, put into the prompt as one exact span, and
    deleted after the answer. Tokens and times are therefore those of a prefill behind exactly this prefix. Without a
    blend, loading the prefix is free, as for ``prefix``. The header alone, without a chunk behind it, is not reused.

    A blended prompt leaves approximate KV, which must not serve as an exact prefix. The tokens that it adds to the
    prefix cache are therefore computed again after the answer (:attr:`Reply.background_tokens`).
    """

    def __init__(self, name: str, label: str, blend: BlendSettings | None, budget: int = DEFAULT_BUDGET):
        """Blend uncached chunks with ``blend``; None computes them. The prefix cache holds ``budget`` tokens."""
        self.name, self.label, self.key = name, label, name
        self._blend, self._budget = blend, budget
        self._planned: dict[str, tuple[list[Chunk], int]] = {}

    def begin(self, cases: Sequence[EvalCase]) -> None:
        prompts = ReorderedPrompts(self._budget)
        for case in cases:
            chunks = prompts.order(case.chunks)
            self._planned[case.sample.id] = chunks, prompts.count_cached(chunks)
            prompts.serve(chunks)
        history = [[case.sample.id, [chunk.id for chunk in case.chunks]] for case in cases]
        digest = xxhash.xxh3_128_hexdigest(json.dumps(history).encode())
        self.key = f"{self.name} {None if self._blend is None else sorted(asdict(self._blend).items())} {self._budget} {digest}"

    def reply(self, engine: BlendEngine, case: EvalCase) -> Reply:
        chunks, count = self._planned[case.sample.id]
        prompt = rag_prompt(engine.tokenizer, chunks, case.sample.question, case.sample.instruction)
        settings, free = (PREFIX_CACHING, True) if self._blend is None else (self._blend, False)
        if count == 0 and self._blend is None:  # the store holds the first chunk, the prefix cache does not
            settings = FULL_RECOMPUTE
        engine.precompute_first(chunks[:1])  # reordering may have changed the first chunk
        with _cached_prefix(engine, prompt, count) as with_prefix:
            reply = generate_reply(engine, with_prefix, case.max_tokens, settings, free)
        want = generate_answer(engine, prompt, SamplingParams(case.max_tokens), FULL_RECOMPUTE)
        spans = engine.tokenize(prompt).spans
        # A blend's first chunk is exact, cached or not.
        behind = 0 if self._blend is None else spans[-1].end - spans[max(count, 1) - 1].end
        return replace(reply, chunks=chunks, reordered_full=want.text.strip(), background_tokens=behind)


@contextmanager
def _cached_prefix(engine: BlendEngine, prompt: BlendPrompt, count: int) -> Iterator[BlendPrompt]:
    """Yield the prompt with its first ``count`` chunks, and the text between them, as one chunk with stored KV.

    Raises:
        ModelError: The template has changed the chunks, or the prefix does not fit the engine's store.
    """
    if count < 2:
        yield prompt  # the store already holds a single chunk behind the header
        return
    spans = engine.tokenize(prompt).spans
    places = [at for at, segment in enumerate(prompt.segments) if isinstance(segment, Chunk)]
    if len(spans) < count or spans[0].start != len(engine.header_ids) or places[0] != 1:
        raise ModelError(
            "The prompt does not begin with its header and chunks; a prefix cache cannot be measured on it."
        )
    text = SEPARATOR.join(span.chunk.text for span in spans[:count])
    ids = engine.tokenize(prompt).token_ids[spans[0].start : spans[count - 1].end]
    joined = Chunk(chunk_id(text), text, ids)
    failed = (engine.precompute([joined]) + engine.precompute_first([joined])).failed
    if failed:
        raise ModelError(f"The prefix of {len(ids)} tokens cannot be kept: {failed[joined.id]}.")
    try:
        yield BlendPrompt((prompt.segments[0], joined, *prompt.segments[places[count - 1] + 1 :]))
    finally:
        engine.forget([joined.id])
