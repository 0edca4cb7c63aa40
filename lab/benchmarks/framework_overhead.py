"""Measures LangChain's overhead on an engine call: ``python lab/benchmarks/framework_overhead.py [chunks] [calls]``.

The engine answers at once and only tokenises the prompt. The benchmark calls the engine directly with the finished
prompt, and through ``ChatCacheBlend`` with messages, in which six chunks of 512 tokens must be found by content among
all registered chunks. The two calls take turns, and the difference is the overhead.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from cacheblend_rag import (
    BlendEngine,
    BlendPrompt,
    BlendSettings,
    Chunk,
    Generation,
    PrecomputeReport,
    PromptOutcome,
    SamplingParams,
    StreamEvent,
    Timings,
    Usage,
    bundled_corpus,
    chat_prompt,
    chunk_id,
)
from cacheblend_rag.blending.profile import ModelProfile
from cacheblend_rag.frameworks import ChunkRegistry
from cacheblend_rag.prompts.prompt import TokenizedPrompt
from cacheblend_rag.store.kv import ModelFingerprint

SIX, CHUNK_TOKENS = 6, 512
QUESTION = "Who runs the company that built the harbour?"


class InstantEngine(BlendEngine):
    """Tokenises its prompt and answers with one word."""

    def __init__(self) -> None:
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(bundled_corpus().parent / "model")
        self.fingerprint = ModelFingerprint("0" * 32, "instant")
        self.context_window = 1 << 20
        self.registry, self.profile, self.num_layers = ChunkRegistry(), ModelProfile(), 8

    def precompute(self, chunks: Sequence[Chunk], progress: Callable[[int], None] | None = None) -> PrecomputeReport:
        self.registry.add(chunks)
        return PrecomputeReport(computed=len(chunks))

    def stream(
        self,
        prompt: BlendPrompt | TokenizedPrompt | str,
        sampling: SamplingParams | None = None,
        settings: BlendSettings | None = None,
    ) -> Iterator[StreamEvent]:
        begin = time.perf_counter()
        tokens = self.request(prompt, sampling, settings).prompt
        size, reused = len(tokens.token_ids), sum(span.end - span.start for span in tokens.spans)
        usage = Usage(size, reused, 0, size - reused, 1)
        took = time.perf_counter() - begin
        outcome = PromptOutcome("blend", "instant", usage)
        yield StreamEvent("Ada", Generation.of(outcome, "Ada", (1,), "stop", Timings(took, took)))

    def close(self) -> None:
        pass


def engine_with(count: int) -> tuple[InstantEngine, list[Chunk]]:
    """Return an engine with ``count`` registered chunks, and the six chunks for the prompt."""
    engine = InstantEngine()
    draw = random.Random(0)
    words = bundled_corpus().joinpath("handbook.md").read_text().split()
    vocabulary = sorted(
        {word for word in words if len(engine.tokenizer(f" {word}", add_special_tokens=False).input_ids) == 1}
    )
    bodies = {" ".join(draw.choices(vocabulary, k=CHUNK_TOKENS)) for _ in range(SIX)}
    six = [
        Chunk(chunk_id(body), body, tuple(engine.tokenizer(body, add_special_tokens=False).input_ids))
        for body in sorted(bodies)
    ]
    others = (" ".join(draw.choices(vocabulary, k=80)) for _ in range(count - SIX))
    engine.registry.add([*six, *(Chunk(chunk_id(body), body, ()) for body in others)])
    return engine, six


def differences(direct: Callable[[], Any], through: Callable[[], Any], calls: int) -> tuple[list[float], list[float]]:
    """Return the milliseconds of each call of ``direct`` and of ``through``, in turns, without the first five calls."""
    pairs = []
    for _ in range(calls + 5):
        begin = time.perf_counter()
        direct()
        middle = time.perf_counter()
        through()
        pairs.append((1e3 * (middle - begin), 1e3 * (time.perf_counter() - middle)))
    kept = pairs[5:]
    return [a for a, _ in kept], [b for _, b in kept]


def report(name: str, direct: list[float], through: list[float]) -> None:
    added = sorted(b - a for a, b in zip(direct, through, strict=True))
    print(
        f"{name:<28} direct {statistics.median(direct):6.2f} ms   through {statistics.median(through):6.2f} ms   "
        f"added {statistics.median(added):6.2f} ms (90% of calls below {added[int(0.9 * len(added))]:.2f})"
    )


def main(count: int = 100_000, calls: int = 200) -> None:
    from langchain_cacheblend import CacheBlendLLM, ChatCacheBlend, create_blended_documents_chain
    from langchain_core.documents import Document
    from langchain_core.prompts import ChatPromptTemplate

    engine, six = engine_with(count)
    context = "\n\n".join(chunk.text for chunk in six)
    messages = [("system", "Answer from the notes."), ("human", f"{context}\n\nQuestion: {QUESTION}")]
    plain = [{"role": "system", "content": messages[0][1]}, {"role": "user", "content": messages[1][1]}]
    prompt = chat_prompt(engine.tokenizer, plain, engine.registry)
    assert [s for s in prompt.segments if isinstance(s, Chunk)] == six
    print(
        f"{count} chunks registered, {SIX} of {CHUNK_TOKENS} tokens in the prompt ({len(context)} characters), {calls} calls"
    )

    chat, text = ChatCacheBlend(engine=engine, max_tokens=8), CacheBlendLLM(engine=engine, max_tokens=8)
    template = ChatPromptTemplate.from_messages(
        [("system", "Answer from the notes."), ("human", "{context}\n\nQuestion: {q}")]
    )
    blocks = create_blended_documents_chain(chat, template)
    documents = {"context": [Document(page_content=chunk.text) for chunk in six], "q": QUESTION}
    rendered = "".join(s if isinstance(s, str) else s.text for s in prompt.segments)  # type: ignore[union-attr]

    def direct() -> Any:
        return engine.generate(prompt, SamplingParams(max_tokens=8))

    report("content match alone", *differences(lambda: None, lambda: engine.registry.find(context), calls))
    report("ChatCacheBlend.invoke", *differences(direct, lambda: chat.invoke(messages), calls))
    report("ChatCacheBlend.stream", *differences(direct, lambda: list(chat.stream(messages)), calls))
    report("CacheBlendLLM.invoke", *differences(direct, lambda: text.invoke(rendered), calls))
    report("blended documents chain", *differences(direct, lambda: blocks.invoke(documents), calls))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
