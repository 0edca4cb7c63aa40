"""Plain models of the same weights: transformers alone, the prompt tokenised whole. Nothing of the library is used."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import torch
from langchain_core.language_models import BaseChatModel
from langchain_core.language_models.llms import LLM
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult

BUNDLED = str(files("cacheblend_rag") / "demo" / "model")
ROLES = {"human": "user", "ai": "assistant", "system": "system", "tool": "tool"}


def complete(model: Any, tokenizer: Any, ids: list[int], max_tokens: int) -> str:
    with torch.inference_mode():
        out = model.generate(torch.tensor([ids]), max_new_tokens=max_tokens, do_sample=False)
    return str(tokenizer.decode(out[0][len(ids) :], skip_special_tokens=True))


class PlainChat(BaseChatModel):
    model: Any
    tokenizer: Any
    max_tokens: int

    @property
    def _llm_type(self) -> str:
        return "plain"

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self

    def _generate(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> ChatResult:
        plain = [{"role": ROLES[m.type], "content": str(m.text)} for m in messages]
        text = self.tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
        ids = self.tokenizer(text, add_special_tokens=False).input_ids
        message = AIMessage(complete(self.model, self.tokenizer, ids, self.max_tokens))
        return ChatResult(generations=[ChatGeneration(message=message)])


class PlainLLM(LLM):
    model: Any
    tokenizer: Any
    max_tokens: int

    @property
    def _llm_type(self) -> str:
        return "plain-text"

    def _call(self, prompt: str, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> str:
        ids = self.tokenizer(prompt).input_ids
        return complete(self.model, self.tokenizer, ids, self.max_tokens)
