"""Defines the text model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any
from uuid import UUID

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseLLM
from langchain_core.language_models.base import LangSmithParams
from langchain_core.messages.ai import UsageMetadata, add_usage
from langchain_core.outputs import Generation as LangChainGeneration
from langchain_core.outputs import GenerationChunk, LLMResult

from cacheblend_rag import BlendPrompt, Generation, text_prompt
from cacheblend_rag.frameworks import Asked
from langchain_cacheblend.requests import EngineFields, langchain_errors, usage_metadata
from langchain_cacheblend.runs import run_of

_NOT_OPTIONS = ("stop", "callbacks", "tags", "metadata", "run_name", "run_id")
_options: ContextVar[Mapping[str, Any]] = ContextVar("options of the call", default=MappingProxyType({}))


class CacheBlendLLM(EngineFields, BaseLLM):
    """Completes text; sends the prompt to the model as it is, without the chat template of :class:`ChatCacheBlend`.

    The prompt is searched first for the chunks named by ``chunk_ids=``, then for all registered chunks, by content.

    Example:
        Complete a prompt that contains a registered chunk::

            llm = CacheBlendLLM(engine=engine, max_tokens=64)
            print(llm.invoke(chunk.text + " Question: Who is the captain? Answer:"))
    """

    @property
    def _llm_type(self) -> str:
        return "cacheblend"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """Return all parameters that determine the answer, the call's too: LangChain keys its cache by them alone."""
        return {**super()._identifying_params, **_options.get()}

    def generate(self, prompts: list[str], *args: Any, **kwargs: Any) -> LLMResult:
        """Return LangChain's result for ``prompts``; see :class:`BaseLLM`."""
        with _identified_by(kwargs):
            return super().generate(prompts, *args, **kwargs)

    async def agenerate(self, prompts: list[str], *args: Any, **kwargs: Any) -> LLMResult:
        """Generate asynchronously; see :meth:`generate`."""
        with _identified_by(kwargs):
            return await super().agenerate(prompts, *args, **kwargs)

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        return super()._get_ls_params(stop=stop if stop is not None else self.stop, **kwargs)

    def _request(self, text: str, run: UUID | None, stop: Sequence[str] | None, kwargs: dict[str, Any]) -> Asked:
        ids = kwargs.get("chunk_ids") or ()

        def build() -> BlendPrompt:
            return text_prompt(self.engine.tokenizer, text, self.engine.registry, chunk_ids=ids)

        return self.request(build, run, stop, kwargs, ("chunk_ids",))

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        with langchain_errors():
            asked = [self._request(prompt, run_of(run_manager), stop, kwargs) for prompt in prompts]
            return self._result([each.answer() for each in asked], asked)

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        with langchain_errors():
            run = run_of(run_manager)
            asked = [await asyncio.to_thread(self._request, prompt, run, stop, kwargs) for prompt in prompts]
            return self._result(await asyncio.gather(*(each.aanswer() for each in asked)), asked)

    def _result(self, answers: Sequence[Generation], asked: Sequence[Asked]) -> LLMResult:
        generations, total = [], None
        for done, each in zip(answers, asked, strict=True):
            generations.append([LangChainGeneration(text=done.text, generation_info=self._info(done, each))])
            total = add_usage(total, usage_metadata(done, each.request))
        return LLMResult(
            generations=generations, llm_output={"model_name": self.model_name, "token_usage": _counts(total)}
        )

    def _info(self, done: Generation, asked: Asked) -> dict[str, Any]:
        return {**self.answer_metadata(done, asked), "usage_metadata": usage_metadata(done, asked.request)}

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        with langchain_errors():
            asked = self._request(prompt, run_of(run_manager), stop, kwargs)
            with asked.events() as events:
                for event in events:
                    chunk = self._chunk(event.text, event.generation, asked)
                    if run_manager is not None:
                        run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk

    async def _astream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[GenerationChunk]:
        with langchain_errors():
            asked = await asyncio.to_thread(self._request, prompt, run_of(run_manager), stop, kwargs)
            async with asked.aevents() as events:
                async for event in events:
                    chunk = self._chunk(event.text, event.generation, asked)
                    if run_manager is not None:
                        await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk

    def _chunk(self, text: str, done: Generation | None, asked: Asked) -> GenerationChunk:
        return GenerationChunk(text=text, generation_info=self._info(done, asked) if done is not None else None)


@contextmanager
def _identified_by(kwargs: Mapping[str, Any]) -> Iterator[None]:
    token = _options.set({name: value for name, value in kwargs.items() if name not in _NOT_OPTIONS})
    try:
        yield
    finally:
        _options.reset(token)


def _counts(usage: UsageMetadata | None) -> dict[str, Any]:
    return dict(usage) if usage is not None else {}
