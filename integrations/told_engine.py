"""Runs every prompt for real in an engine that is told the words of its answer: no model small enough for tests calls tools."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from threading import Event
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

from cacheblend_rag import BlendSettings, SamplingParams, StreamEvent, TransformersEngine, bundled_corpus


class ToldEngine(TransformersEngine):
    """The bundled model, which says what ``say`` returns for a prompt's text; what it reports of stored KV is its own."""

    def __init__(self, say: Callable[[str, SamplingParams], str], chat_template: str | None = None):
        directory = bundled_corpus().parent / "model"
        tokenizer = AutoTokenizer.from_pretrained(directory)
        tokenizer.chat_template = chat_template or tokenizer.chat_template
        model = AutoModelForCausalLM.from_pretrained(directory, dtype="float32").eval()
        super().__init__(model, tokenizer=tokenizer, device="cpu")
        self.say = say

    def _begun(
        self,
        prompt: Any,
        sampling: SamplingParams | None,
        settings: BlendSettings | None,
        gone: Event | None = None,
    ) -> Iterator[StreamEvent]:
        """Run the prompt as far as its first token."""
        asked = self.request(prompt, sampling, settings)
        text = self.say(self.tokenizer.decode(asked.prompt.token_ids), asked.sampling)
        short = replace(asked.sampling, max_tokens=1, json_schema=None)
        *_, last = super()._begun(replace(asked, sampling=short), None, None, gone)
        assert last.generation is not None
        half = len(text) // 2
        yield StreamEvent(text[:half])
        yield StreamEvent(text[half:], replace(last.generation, text=text, finish_reason="stop"))
