"""An engine without a model: it gives a fixed answer, and records its requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from cacheblend_rag import (
    BlendEngine,
    BlendPrompt,
    BlendSettings,
    Chunk,
    ChunkOutcome,
    Generation,
    PrecomputeReport,
    PromptOutcome,
    SamplingParams,
    StreamEvent,
    Timings,
    Usage,
)
from cacheblend_rag.blending.profile import ModelProfile
from cacheblend_rag.frameworks import ChunkRegistry, Request
from cacheblend_rag.prompts.prompt import TokenizedPrompt
from cacheblend_rag.store.kv import ModelFingerprint


class ScriptedEngine(BlendEngine):
    supports_json_schema = True

    def __init__(self, tokenizer: Any, answer: str = "fine", window: int = 8192):
        self.tokenizer, self.context_window, self.answer = tokenizer, window, answer
        self.fingerprint = ModelFingerprint("5c" * 16, "scripted")
        self.num_layers, self.profile = 8, ModelProfile()
        self.registry = ChunkRegistry()
        self.header_ids: tuple[int, ...] = ()
        self.asked: list[Request] = []
        self.tokenized: list[BlendPrompt] = []
        self._sources: dict[tuple[int, ...], BlendPrompt] = {}
        self.computed: list[Chunk] = []
        self.prefetched: list[str] = []
        self.failures: dict[str, str] = {}

    def precompute(self, chunks: Sequence[Chunk], progress: Callable[[int], None] | None = None) -> PrecomputeReport:
        self.registry.add(chunks)
        self.computed += chunks
        return PrecomputeReport(len(chunks), 0, sum(len(c.token_ids) for c in chunks), 0.0, self.failures)

    def prefetch(self, chunk_ids: Any) -> None:
        self.prefetched += chunk_ids

    def tokenize(self, prompt: BlendPrompt | TokenizedPrompt | str) -> TokenizedPrompt:
        tokens = super().tokenize(prompt)
        if isinstance(prompt, BlendPrompt):
            self.tokenized.append(prompt)
            self._sources[tokens.token_ids] = prompt
        return tokens

    def stream(
        self,
        prompt: BlendPrompt | TokenizedPrompt | str | Request,
        sampling: SamplingParams | None = None,
        settings: BlendSettings | None = None,
    ) -> Iterator[StreamEvent]:
        assert isinstance(prompt, Request)
        self.asked.append(self.request(prompt, sampling, settings))
        tokens = self.asked[-1].prompt
        reused = sum(span.end - span.start for span in tokens.spans)
        usage = Usage(len(tokens.token_ids), reused, 0, len(tokens.token_ids) - reused, 2)
        chunks = (ChunkOutcome(s.chunk.id, s.start, s.end - s.start, "reused") for s in tokens.spans)
        outcome = PromptOutcome("blend", "scripted", usage, tuple(chunks))
        done = Generation.of(outcome, self.answer, (1, 2), "stop", Timings(0.1, 0.2))
        half = len(self.answer) // 2
        return (event for event in (StreamEvent(self.answer[:half]), StreamEvent(self.answer[half:], done)))

    def close(self) -> None:
        pass

    def chunks_asked(self) -> list[str]:
        """Return the texts of the chunks in the last prompt."""
        return [span.chunk.text for span in self.asked[-1].prompt.spans]

    def text_asked(self) -> str:
        """Return the last prompt as text."""
        return "".join(
            s.text if isinstance(s, Chunk) else str(s) for s in self._sources[self.asked[-1].prompt.token_ids].segments
        )
