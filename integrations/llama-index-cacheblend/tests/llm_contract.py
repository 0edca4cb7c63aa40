"""What every LlamaIndex LLM must do. A test module subclasses `LLMContract`, says how to make one, and which features it claims.

Run against LlamaIndex's MockLLM as well as ours, so that the suite itself is checked: what fails there is a wrong expectation.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse, MessageRole, TextBlock
from llama_index.core.callbacks import (
    CallbackManager,
    CBEventType,
    EventPayload,
    LlamaDebugHandler,
    TokenCountingHandler,
)
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.llms import LLM
from llama_index.core.output_parsers import PydanticOutputParser
from llama_index.core.prompts import ChatPromptTemplate, PromptTemplate
from pydantic import BaseModel

USER = [ChatMessage(role="user", content="Question: Who is the captain of the Lonely Tide?")]
TALK = [
    ChatMessage(role="system", content="Answer from the notes."),
    ChatMessage(role="user", content="Question: Who sails?"),
    ChatMessage(role="assistant", content="Celia Ulvik"),
    ChatMessage(role="user", content="Question: On which ship?"),
]
ODD = {
    "unicode": [ChatMessage(role="user", content="Où est le café? 港はどこ 🚢 \u202e")],
    "two user messages in a row": [USER[0], ChatMessage(role="user", content="And when?")],
    "assistant last": TALK[:3],
    "several text blocks": [ChatMessage(role="user", blocks=[TextBlock(text="One."), TextBlock(text="Two.")])],
    "braces": [ChatMessage(role="user", content="{query_str} {0} {{x}} %s")],
    "an empty assistant turn": [USER[0], ChatMessage(role="assistant", content=""), USER[0]],
}
PROMPTS = {
    "text": PromptTemplate("Notes: {notes}\n\nQuestion: {query_str}"),
    "chat": ChatPromptTemplate(
        [
            ChatMessage(role=MessageRole.SYSTEM, content="Answer from {notes}."),
            ChatMessage(role=MessageRole.USER, content="Question: {query_str}"),
        ]
    ),
}
ARGS = {"notes": "The Lonely Tide sails.", "query_str": "Who sails?"}


class Ship(BaseModel):
    name: str
    year: int


class LLMContract:
    claims_cumulative_streams = True
    claims_usage = True
    claims_sampling = True
    claims_model_name = True
    claims_free_event_loop = True
    claims_refusals = True
    claims_one_event_per_call = True
    chat_is_chat = True

    def make(self, **options: Any) -> LLM:
        raise NotImplementedError

    @pytest.fixture
    def llm(self) -> LLM:
        return self.make()

    # What it is

    def test_metadata_is_usable(self, llm: LLM) -> None:
        meta = llm.metadata
        assert meta.context_window > 0
        assert isinstance(meta.is_chat_model, bool)
        assert meta.system_role == MessageRole.SYSTEM
        if self.claims_model_name:
            assert 0 < meta.num_output < meta.context_window
            assert meta.model_name not in ("", "unknown")

    def test_it_has_a_class_name_of_its_own(self, llm: LLM) -> None:
        assert llm.class_name() not in ("base_component", "custom_llm", "base_llm", "LLM")

    def test_it_serialises_to_json(self, llm: LLM) -> None:
        for data in (json.loads(llm.to_json()), json.loads(json.dumps(llm.to_dict()))):
            assert data["class_name"] == llm.class_name()

    def test_options_are_kept(self) -> None:
        assert self.make(system_prompt="Be brief.").system_prompt == "Be brief."

    def test_copies_answer_alike(self, llm: LLM) -> None:
        want = llm.chat(USER).message.content
        assert llm.model_copy().chat(USER).message.content == want
        assert copy.deepcopy(llm).chat(USER).message.content == want

    # Chat

    def test_chat_answers_as_the_assistant(self, llm: LLM) -> None:
        response = llm.chat(USER)
        assert isinstance(response, ChatResponse)
        assert response.message.role == MessageRole.ASSISTANT
        assert isinstance(response.message.content, str)
        assert response.message.content

    def test_a_conversation_is_answered(self, llm: LLM) -> None:
        assert isinstance(llm.chat(TALK).message.content, str)

    @pytest.mark.parametrize("kind", list(ODD))
    def test_odd_messages_are_answered(self, llm: LLM, kind: str) -> None:
        assert isinstance(llm.chat(ODD[kind]).message.content, str)
        assert "".join(r.delta or "" for r in llm.stream_chat(ODD[kind])) == llm.chat(ODD[kind]).message.content

    def test_messages_are_left_as_they_were(self, llm: LLM) -> None:
        before = [m.model_dump() for m in TALK]
        llm.chat(TALK)
        list(llm.stream_chat(TALK))
        assert [m.model_dump() for m in TALK] == before

    def test_chat_is_repeatable(self, llm: LLM) -> None:
        assert llm.chat(TALK).message.content == llm.chat(TALK).message.content

    def test_streamed_chat_adds_up(self, llm: LLM) -> None:
        pieces = list(llm.stream_chat(TALK))
        assert all(piece.message.role == MessageRole.ASSISTANT for piece in pieces)
        assert "".join(piece.delta or "" for piece in pieces) == llm.chat(TALK).message.content
        if self.claims_cumulative_streams:
            assert len(pieces) > 1
            so_far = ""
            for piece in pieces:
                so_far += piece.delta or ""
                assert (piece.message.content or "") == so_far

    async def test_async_chat_agrees(self, llm: LLM) -> None:
        assert (await llm.achat(TALK)).message.content == llm.chat(TALK).message.content

    async def test_async_streamed_chat_agrees(self, llm: LLM) -> None:
        pieces = [piece async for piece in await llm.astream_chat(TALK)]
        assert "".join(piece.delta or "" for piece in pieces) == llm.chat(TALK).message.content

    # Completion

    def test_completion_answers(self, llm: LLM) -> None:
        response = llm.complete("Question: Who sails?")
        assert isinstance(response, CompletionResponse)
        assert response.text
        assert str(response) == response.text

    @pytest.mark.parametrize("formatted", [True, False])
    async def test_all_four_completions_agree(self, llm: LLM, formatted: bool) -> None:
        prompt = "The ship is called the Lonely"
        want = llm.complete(prompt, formatted=formatted).text
        assert "".join(r.delta or "" for r in llm.stream_complete(prompt, formatted=formatted)) == want
        assert (await llm.acomplete(prompt, formatted=formatted)).text == want
        pieces = [r async for r in await llm.astream_complete(prompt, formatted=formatted)]
        assert "".join(r.delta or "" for r in pieces) == want

    # Prompts

    @pytest.mark.parametrize("kind", list(PROMPTS))
    async def test_prompt_templates_are_answered_alike_in_all_four_ways(self, llm: LLM, kind: str) -> None:
        prompt = PROMPTS[kind]
        want = llm.predict(prompt, **ARGS)
        assert isinstance(want, str)
        assert "".join(llm.stream(prompt, **ARGS)) == want
        assert await llm.apredict(prompt, **ARGS) == want
        assert "".join([piece async for piece in await llm.astream(prompt, **ARGS)]) == want

    def test_a_prediction_is_the_chat_of_its_messages(self, llm: LLM) -> None:
        if llm.metadata.is_chat_model and self.chat_is_chat:
            want = llm.chat(PROMPTS["chat"].format_messages(**ARGS)).message.content
            assert llm.predict(PROMPTS["chat"], **ARGS) == want

    def test_the_system_prompt_reaches_the_model(self) -> None:
        seen: list[Any] = []
        llm = self.make(system_prompt="Speak like a sailor.")
        with _events(llm, seen):
            llm.predict(PROMPTS["text"], **ARGS)
        asked = [getattr(event, "messages", None) or getattr(event, "prompt", "") for event in seen]
        assert any("Speak like a sailor." in str(text) for text in asked)

    def test_an_output_parser_sees_prompt_and_answer(self, llm: LLM) -> None:
        with pytest.raises(ValueError, match=r"(?i)json|extract"):
            parsing = PromptTemplate("A ship: {x}", output_parser=PydanticOutputParser(output_cls=Ship))
            llm.output_parser = PydanticOutputParser(output_cls=Ship)
            llm.predict(parsing, x="now")

    # Callbacks and instrumentation

    @pytest.mark.parametrize("method", ["chat", "stream_chat", "complete", "stream_complete"])
    def test_callbacks_are_paired_and_get_the_response(self, method: str) -> None:
        debug = LlamaDebugHandler(print_trace_on_end=False)
        llm = self.make(callback_manager=CallbackManager([debug]))
        _run(llm, method)
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
        await _arun(llm, method)
        pairs = debug.get_event_pairs(CBEventType.LLM)
        assert pairs and all(len(pair) == 2 for pair in pairs)

    @pytest.mark.parametrize("method", ["chat", "stream_chat", "complete", "stream_complete"])
    def test_instrumentation_sees_start_and_end(self, llm: LLM, method: str) -> None:
        names: list[Any] = []
        with _events(llm, names):
            _run(llm, method)
        kind = "LLMChat" if "chat" in method else "LLMCompletion"
        found = [event.class_name() for event in names]
        assert f"{kind}StartEvent" in found and f"{kind}EndEvent" in found
        if "stream" in method:
            assert f"{kind}InProgressEvent" in found

    # Side by side

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
            await _arun(llm, method)
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

    # What may be claimed

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

    def test_the_token_counting_handler_counts_what_the_model_counted(self) -> None:
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
        hot = {"temperature": 3.0, "max_tokens": 12}
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

    def test_what_cannot_be_done_is_refused_in_words(self, llm: LLM) -> None:
        if not self.claims_refusals:
            pytest.skip("takes anything")
        from llama_index.core.base.llms.types import ImageBlock

        with pytest.raises(Exception, match="image"):
            llm.chat([ChatMessage(role="user", blocks=[ImageBlock(image=b"x")])])
        with pytest.raises(Exception, match="frequency_penalty"):
            llm.chat(USER, frequency_penalty=1.0)
        with pytest.raises(Exception, match="context window"):
            llm.chat(USER, max_tokens=llm.metadata.context_window)
        with pytest.raises(Exception, match="context window"):
            list(llm.stream_chat(USER, max_tokens=llm.metadata.context_window))

    def test_structured_prediction_gives_an_object_or_says_why_not(self, llm: LLM) -> None:
        prompt = PromptTemplate("A ship of {year}")
        try:
            assert isinstance(llm.structured_predict(Ship, prompt, year=1911), Ship)
        except (ValueError, TypeError) as error:
            assert str(error)


class _Recorder(BaseEventHandler):
    seen: Any

    def handle(self, event: Any, **kwargs: Any) -> None:
        self.seen.append(event)


class _events:
    def __init__(self, llm: LLM, seen: list[Any]):
        self.handler = _Recorder(seen=[])
        self.out = seen

    def __enter__(self) -> None:
        get_dispatcher().event_handlers.append(self.handler)

    def __exit__(self, *exc: object) -> None:
        get_dispatcher().event_handlers.remove(self.handler)
        self.out.extend(self.handler.seen)


def _run(llm: LLM, method: str) -> None:
    out = getattr(llm, method)(USER if "chat" in method else "Question: Who?")
    if isinstance(out, Iterator):
        list(out)


async def _arun(llm: LLM, method: str) -> None:
    out = await getattr(llm, method)(USER if "chat" in method else "Question: Who?")
    if "stream" in method:
        async for _ in out:
            pass
