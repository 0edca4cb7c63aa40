"""Answers prompts with a Hugging Face causal LM on CPU or GPU, blended through its own forward: the default engine."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import ClassVar

from cacheblend_rag.blending.settings import BlendSettings
from cacheblend_rag.engines.base import Prompt, Request
from cacheblend_rag.engines.results import Score, StreamEvent
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.spans import RequestSpans
from cacheblend_rag.engines.transformers import guidance
from cacheblend_rag.engines.transformers.owner import ModelOwner
from cacheblend_rag.engines.transformers.run import PromptRun


class TransformersEngine(ModelOwner):
    """Answers prompts of text and chunks with a transformers model.

    Requests from several threads share the model: their forwards take turns, token by token.
    """

    supports_json_schema: ClassVar[bool] = guidance.INSTALLED
    without_json_schema: ClassVar[str] = 'install llguidance ("cacheblend-rag[guided]"), or leave json_schema out'
    supports_scoring: ClassVar[bool] = True
    supports_trace: ClassVar[bool] = True

    def stream(
        self, prompt: Prompt, sampling: SamplingParams | None = None, settings: BlendSettings | None = None
    ) -> Iterator[StreamEvent]:
        """See :class:`BlendEngine`."""
        begin = time.perf_counter()
        request = self.request(prompt, sampling, settings)
        schema, guide = request.sampling.schema(), None
        if schema is not None:
            guide = guidance.Guide(schema, self.tokenizer, self.subject().vocab_size, self.end_tokens)
        return self._stream(request, guide, begin)

    def _stream(self, request: Request, guide: guidance.Guide | None, begin: float) -> Iterator[StreamEvent]:
        # What is written back once the answer is there belongs to no span of the request.
        with PromptRun(self, request) as run, RequestSpans(self.trace, self.namespace.name) as spans:
            run.prefill(spans.trace)
            last = yield from run.answer(guide, begin)
            assert last.generation is not None
            spans.answered(last.generation)
            yield last

    def score(
        self, prompt: Prompt, completions: Sequence[Sequence[int]], settings: BlendSettings | None = None
    ) -> list[Score]:
        """See :class:`BlendEngine`; a model that is not blended runs the prompt anew for each completion."""
        request = self.scoring_request(prompt, completions, settings)
        # The state of a recurrent layer cannot go back to where the prompt ended.
        together = [completions] if self.gate.passed else [[each] for each in completions]
        return [score for each in together for score in self._score(request, each)]

    def _score(self, request: Request, completions: Sequence[Sequence[int]]) -> list[Score]:
        with PromptRun(self, request) as run:
            run.prefill(None)
            return run.score(completions)
