"""An LLM of the same weights without any reuse: transformers' own `generate` on the chat template's text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from llama_index.core.base.llms.types import ChatMessage, CompletionResponse, CompletionResponseGen, LLMMetadata
from llama_index.core.llms import CustomLLM
from pydantic import PrivateAttr

from cacheblend_rag import BlendEngine, text_prompt


class PlainLLM(CustomLLM):
    """Greedy decoding of the chat template's text, tokenised in one go.

    With ``apart``, the chunks that engine knows are tokenised apart from what surrounds them: a template that puts a chunk
    behind a space ("Context: {chunk}") would otherwise give the model one token less than a prompt made of chunks has.
    """

    max_tokens: int = 16
    _model: Any = PrivateAttr()
    _tokenizer: Any = PrivateAttr()
    _apart: BlendEngine | None = PrivateAttr()

    def __init__(self, model: Any, tokenizer: Any, apart: BlendEngine | None = None, **data: Any):
        super().__init__(messages_to_prompt=self._render, **data)
        self._model, self._tokenizer, self._apart = model, tokenizer, apart

    def _render(self, messages: Sequence[ChatMessage]) -> str:
        plain = [{"role": m.role.value, "content": m.content or ""} for m in messages]
        return str(self._tokenizer.apply_chat_template(plain, add_generation_prompt=True, tokenize=False))

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata(context_window=8192, num_output=self.max_tokens, is_chat_model=True, model_name="plain")

    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        if not formatted:
            prompt = self._render([ChatMessage(role="user", content=prompt)])
        if self._apart is None:
            ids = self._tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
        else:
            # This process knows the chunks: a RemoteEngine leaves the search of a plain string to its server.
            found = text_prompt(self._tokenizer, prompt, self._apart.registry)
            ids = torch.tensor([self._apart.tokenize(found).token_ids])
        with torch.no_grad():
            out = self._model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=self.max_tokens, do_sample=False
            )
        return CompletionResponse(text=self._tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))

    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        whole = self.complete(prompt, formatted)
        return iter([CompletionResponse(text=whole.text, delta=whole.text)])  # type: ignore[return-value]
