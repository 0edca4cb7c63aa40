"""Provides an engine without a model: the engine stores KV of zeros and answers with fixed words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from cacheblend_rag.blending.gate import GateReport
from cacheblend_rag.blending.outcome import PromptOutcome, Usage
from cacheblend_rag.blending.profile import ModelProfile
from cacheblend_rag.blending.settings import BlendSettings
from cacheblend_rag.engines.base import BlendEngine, Prompt
from cacheblend_rag.engines.results import Generation, PrecomputeReport, StreamEvent, Timings
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.spans import RequestSpans
from cacheblend_rag.prompts.chunk import Chunk
from cacheblend_rag.prompts.prompt import TokenizedPrompt, header_ids, rag_header
from cacheblend_rag.prompts.registry import ChunkRegistry
from cacheblend_rag.store import KVStore, MemoryStore
from cacheblend_rag.store.kv import ChunkKV, LayerKV, ModelFingerprint, kv_key
from tests.conftest import tokenizer_named


class FakeEngine(BlendEngine):
    gate = GateReport(True)
    num_layers = 1
    profile = ModelProfile(calibrated={"why": "made up"})

    def __init__(self, store: KVStore | None = None, name: str = "fake", tokenizer: Any = None, window: int = 100_000):
        self.tokenizer = tokenizer or tokenizer_named("byte_level")
        self.fingerprint = ModelFingerprint((name * 32)[:32], name)
        self.context_window = window
        self.registry = ChunkRegistry()
        self.store = store or MemoryStore(1 << 30)
        self.header_ids = header_ids(self.tokenizer, rag_header(self.tokenizer))
        self.says: tuple[str, ...] = (" two", " words ")
        self.computed: list[str] = []
        self.prompts: list[TokenizedPrompt] = []
        self.closed_streams = 0

    def key(self, chunk: Chunk) -> Any:
        return kv_key(self.fingerprint, self.header_ids, chunk.token_ids)

    def precompute(self, chunks: Sequence[Chunk], progress: Callable[[int], None] | None = None) -> PrecomputeReport:
        self.registry.add(chunks)
        new = [chunk for chunk in chunks if not self.store.contains(self.key(chunk))]
        for chunk in new:
            layer = LayerKV(*(torch.zeros(1, len(chunk.token_ids), 2) for _ in range(2)))
            self.store.put(self.key(chunk), ChunkKV([layer], len(self.header_ids)))
            self.computed.append(chunk.text)
        if progress is not None:
            progress(len(chunks))
        return PrecomputeReport(len(new), len(chunks) - len(new), sum(len(c.token_ids) for c in new))

    def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        settings: BlendSettings | None = None,
    ) -> Iterator[StreamEvent]:
        tokens = self.tokenize(prompt)
        self.prompts.append(tokens)
        reused = sum(span.end - span.start for span in tokens.spans)
        usage = Usage(len(tokens.token_ids), reused, 0, len(tokens.token_ids) - reused, 2)
        try:
            with RequestSpans(self.namespace.name):
                yield from map(StreamEvent, self.says[:-1])
                outcome, took = PromptOutcome("blend", "stored KV", usage), Timings(0.1, 0.2)
                done = Generation.of(outcome, "".join(self.says), (1, 2), "stop", took)
                yield StreamEvent(self.says[-1], done)
        finally:
            self.closed_streams += 1

    def close(self) -> None:
        self.store.close()
