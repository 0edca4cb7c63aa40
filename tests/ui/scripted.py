"""Provides an engine that answers word by word, as a test permits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

from cacheblend_rag.blending.gate import GateReport
from cacheblend_rag.blending.outcome import PromptOutcome, Usage
from cacheblend_rag.blending.profile import ModelProfile
from cacheblend_rag.blending.settings import BlendSettings
from cacheblend_rag.engines.base import Prompt
from cacheblend_rag.engines.results import Generation, StreamEvent, Timings
from cacheblend_rag.engines.sampling import SamplingParams
from tests.fake_engine import FakeEngine


class ScriptedEngine(FakeEngine):
    """Answers with the question and "word1 word2 ..."; each word waits for :meth:`let`, unless the engine is ``free``."""

    def __init__(self, words: int = 6, free: bool = True, **options: Any):
        super().__init__(**options)
        self.words, self.free = words, free
        self.gate, self.profile, self.num_layers = GateReport(True, ""), ModelProfile(), 1
        self.failure: Exception | None = None
        self.asked: list[str] = []
        self.settings: list[BlendSettings | None] = []
        self.says_first: str | None = None
        self._turnstile = threading.Semaphore(0)

    def let(self, words: int) -> None:
        """Release the next ``words`` words."""
        self._turnstile.release(words)

    def stream(
        self, prompt: Prompt, sampling: SamplingParams | None = None, settings: BlendSettings | None = None
    ) -> Iterator[StreamEvent]:
        tokens = self.tokenize(prompt)
        text = self.tokenizer.decode(tokens.token_ids)
        question = text.rpartition("Question: ")[2].partition("\n")[0].strip()
        self.asked.append(text)
        self.settings.append(settings)
        reused = sum(span.end - span.start for span in tokens.spans)
        usage = Usage(len(tokens.token_ids), reused, 0, len(tokens.token_ids) - reused)
        said = [self.says_first or f"About {question}", *(f" word{n}" for n in range(1, self.words + 1))]
        try:
            for word in said:
                if not self.free:
                    self._turnstile.acquire()
                if self.failure is not None:
                    raise self.failure
                yield StreamEvent(word)
            outcome = PromptOutcome("blend", "stored KV", usage)
            yield StreamEvent("", Generation.of(outcome, "".join(said), (1,), "stop", Timings(0.1, 0.2)))
        finally:
            self.closed_streams += 1
