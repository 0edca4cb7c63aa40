"""The text model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseLLM
from langchain_core.language_models.base import LangSmithParams
from langchain_core.messages.ai import UsageMetadata, add_usage
from langchain_core.outputs import Generation as LangChainGeneration
from langchain_core.outputs import GenerationChunk, LLMResult

from cacheblend_rag import Generation, Request, text_prompt
from langchain_cacheblend.requests import EngineFields, langchain_errors, usage_metadata


class CacheBlendLLM(EngineFields, BaseLLM):
    """The text twin of :class:`ChatCacheBlend`: the prompt goes to the model as it is, without a chat template.

    Chunks named by ``chunk_ids=`` are looked for first, then all registered ones, by content.
    """

    @property
    def _llm_type(self) -> str:
        return "cacheblend"

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        return super()._get_ls_params(stop=stop if stop is not None else self.stop, **kwargs)

    def _request(self, text: str, stop: Sequence[str] | None, kwargs: dict[str, Any]) -> Request:
        prompt = text_prompt(self.engine.tokenizer, text, self.engine.registry, chunk_ids=kwargs.get("chunk_ids") or ())
        return self.request(prompt, stop, kwargs, ("chunk_ids",))

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        with langchain_errors():
            requests = [self._request(prompt, stop, kwargs) for prompt in prompts]
            return self._result([self._answer(request) for request in requests], requests)

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        with langchain_errors():
            requests = [await asyncio.to_thread(self._request, prompt, stop, kwargs) for prompt in prompts]
            return self._result(await asyncio.gather(*map(self._aanswer, requests)), requests)

    def _result(self, answers: Sequence[Generation], requests: Sequence[Request]) -> LLMResult:
        generations, total = [], None
        for done, request in zip(answers, requests, strict=True):
            generations.append([LangChainGeneration(text=done.text, generation_info=self._info(done, request))])
            total = add_usage(total, usage_metadata(done, request))
        return LLMResult(
            generations=generations, llm_output={"model_name": self.model_name, "token_usage": _counts(total)}
        )

    def _info(self, done: Generation, request: Request) -> dict[str, Any]:
        return {**self.answer_metadata(done), "usage_metadata": usage_metadata(done, request)}

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        with langchain_errors():
            request = self._request(prompt, stop, kwargs)
            with self._events(request) as events:
                for event in events:
                    chunk = self._chunk(event.text, event.generation, request)
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
            request = await asyncio.to_thread(self._request, prompt, stop, kwargs)
            async with self._aevents(request) as events:
                async for event in events:
                    chunk = self._chunk(event.text, event.generation, request)
                    if run_manager is not None:
                        await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk

    def _chunk(self, text: str, done: Generation | None, request: Request) -> GenerationChunk:
        return GenerationChunk(text=text, generation_info=self._info(done, request) if done is not None else None)


def _counts(usage: UsageMetadata | None) -> dict[str, Any]:
    return dict(usage) if usage is not None else {}
