"""The LLM contract: callbacks, instrumentation, calls side by side, and the features an LLM may claim."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.callbacks import (
    CallbackManager,
    CBEventType,
    EventPayload,
    LlamaDebugHandler,
    TokenCountingHandler,
)
from llama_index.core.llms import LLM
from llama_index.core.prompts import PromptTemplate
from llm_contract_base import TALK, USER, ContractBase, Ship, arun, events_of, run


class RunningContract(ContractBase):
    # Callbacks and instrumentation

    @pytest.mark.parametrize("method", ["chat", "stream_chat", "complete", "stream_complete"])
    def test_callbacks_are_paired_and_get_the_response(self, method: str) -> None:
        debug = LlamaDebugHandler(print_trace_on_end=False)
        llm = self.make(callback_manager=CallbackManager([debug]))
        run(llm, method)
        pairs = debug.get_event_pairs(CBEventType.LLM)
        assert len(pairs) == 1 or not self.claims_one_event_per_call
        start, end = pairs[0]
        assert {EventPayload.MESSAGES, EventPayload.PROMPT} & set(start.payload)
        response = end.payload.get(EventPayload.RESPONSE) or end.payload.get(EventPayload.COMPLETION)
        assert response is not None

    @pytest.mark.parametrize("method", ["achat", "astream_chat", "acomplete", "astream_complete"])
    async def test_async_callbacks_are_paired(self, method: str) -> None:
        debug = LlamaDebugHandler(print_trace_on_end=False)
        llm = self.make(callback_manager=CallbackManager([debug]))
        await arun(llm, method)
        pairs = debug.get_event_pairs(CBEventType.LLM)
        assert pairs and all(len(pair) == 2 for pair in pairs)

    @pytest.mark.parametrize("method", ["chat", "stream_chat", "complete", "stream_complete"])
    def test_instrumentation_sees_start_and_end(self, llm: LLM, method: str) -> None:
        names: list[Any] = []
        with events_of(llm, names):
            run(llm, method)
        kind = "LLMChat" if "chat" in method else "LLMCompletion"
        found = [event.class_name() for event in names]
        assert f"{kind}StartEvent" in found and f"{kind}EndEvent" in found
        if "stream" in method:
            assert f"{kind}InProgressEvent" in found

    # Concurrency

    async def test_calls_side_by_side_do_not_mix(self, llm: LLM) -> None:
        chats = [[ChatMessage(role="user", content=f"Question: What is {n}?")] for n in range(4)]
        want = [llm.chat(chat).message.content for chat in chats]
        got = await asyncio.gather(*(llm.achat(chat) for chat in chats))
        assert [r.message.content for r in got] == want
        with ThreadPoolExecutor(4) as pool:
            assert [r.message.content for r in pool.map(llm.chat, chats)] == want

    async def test_the_event_loop_stays_free(self, llm: LLM) -> None:
        if not self.claims_free_event_loop:
            pytest.skip("computes on the event loop")
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        for method in ("achat", "acomplete"):
            ticks = 0
            ticker = asyncio.create_task(tick())
            await arun(llm, method)
            ticker.cancel()
            assert ticks > 2, method

    def test_a_stream_left_early_leaves_the_llm_usable(self, llm: LLM) -> None:
        want = llm.chat(TALK).message.content
        for make in (lambda: llm.stream_chat(TALK), lambda: llm.stream_complete("Question: Who?")):
            stream = make()
            next(iter(stream))
            stream.close()
        assert llm.chat(TALK).message.content == want

    async def test_an_async_stream_left_early_leaves_the_llm_usable(self, llm: LLM) -> None:
        want = llm.chat(TALK).message.content
        stream = await llm.astream_chat(TALK)
        await stream.__anext__()
        await stream.aclose()
        assert (await llm.achat(TALK)).message.content == want

    async def test_a_cancelled_call_leaves_the_llm_usable(self, llm: LLM) -> None:
        task = asyncio.create_task(llm.achat(TALK))
        await asyncio.sleep(0)
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            pass
        else:
            assert not self.claims_free_event_loop
        assert (await llm.achat(TALK)).message.content

    # Optional features

    def test_usage_is_reported_and_adds_up(self, llm: LLM) -> None:
        if not self.claims_usage:
            pytest.skip("reports no usage")
        finals = [llm.chat(TALK), list(llm.stream_chat(TALK))[-1], list(llm.stream_complete("Question: Who?"))[-1]]
        for response in finals:
            usage = response.raw["usage"]
            assert usage["prompt_tokens"] > 0 and usage["completion_tokens"] > 0
            assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]

    def test_usage_comes_once_in_a_stream(self, llm: LLM) -> None:
        if not self.claims_usage:
            pytest.skip("reports no usage")
        assert [piece.raw is not None for piece in llm.stream_chat(TALK)].count(True) == 1

    def test_the_token_counting_handler_agrees_with_the_model(self) -> None:
        if not self.claims_usage:
            pytest.skip("reports no usage")
        counter = TokenCountingHandler()
        llm = self.make(callback_manager=CallbackManager([counter]))
        usage = llm.chat(TALK).raw["usage"]
        assert counter.prompt_llm_token_count == usage["prompt_tokens"]
        assert counter.completion_llm_token_count == usage["completion_tokens"]

    def test_sampling_can_be_set_for_the_llm_and_for_a_call(self, llm: LLM) -> None:
        if not self.claims_sampling:
            pytest.skip("has no sampling")
        assert llm.chat(USER, max_tokens=1).raw["usage"]["completion_tokens"] == 1
        assert self.make(max_tokens=2).chat(USER).raw["usage"]["completion_tokens"] <= 2
        hot = {"temperature": 2.0, "max_tokens": 12}
        one, same, other = (llm.chat(USER, seed=seed, **hot).message.content for seed in (1, 1, 2))
        assert one == same != other
        assert llm.chat(USER, temperature=2.0, top_p=1e-6, seed=1).message.content == llm.chat(USER).message.content

    def test_stop_strings_end_the_answer(self, llm: LLM) -> None:
        if not self.claims_sampling:
            pytest.skip("has no stop strings")
        text = llm.complete("Question: Who is it?").text
        assert len(text) > 3
        for stop in (text[2], [text[1:3]]):
            first = stop if isinstance(stop, str) else stop[0]
            assert llm.complete("Question: Who is it?", stop=stop).text == text[: text.index(first)]

    def test_unsupported_requests_are_refused_with_a_reason(self, llm: LLM) -> None:
        if not self.claims_refusals:
            pytest.skip("takes anything")
        from llama_index.core.base.llms.types import ImageBlock

        with pytest.raises(Exception, match="image"):
            llm.chat([ChatMessage(role="user", blocks=[ImageBlock(image=b"x")])])
        with pytest.raises(Exception, match="logit_bias"):
            llm.chat(USER, logit_bias={})
        with pytest.raises(Exception, match="context window"):
            llm.chat(USER, max_tokens=llm.metadata.context_window)
        with pytest.raises(Exception, match="context window"):
            list(llm.stream_chat(USER, max_tokens=llm.metadata.context_window))

    def test_structured_prediction_returns_an_object_or_an_error_with_a_reason(self, llm: LLM) -> None:
        prompt = PromptTemplate("A ship of {year}")
        try:
            assert isinstance(llm.structured_predict(Ship, prompt, year=1911), Ship)
        except (ValueError, TypeError) as error:
            assert str(error)
