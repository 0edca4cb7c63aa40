"""The LLM contract: metadata, and answers to chats, completions and prompts."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatResponse, CompletionResponse, MessageRole
from llama_index.core.llms import LLM
from llama_index.core.output_parsers import PydanticOutputParser
from llama_index.core.prompts import PromptTemplate
from llm_contract_base import ARGS, ODD, PROMPTS, TALK, USER, ContractBase, Ship, events_of


class AnswersContract(ContractBase):
    # Metadata

    def test_metadata_is_usable(self, llm: LLM) -> None:
        meta = llm.metadata
        assert meta.context_window > 0
        assert isinstance(meta.is_chat_model, bool)
        assert meta.system_role == MessageRole.SYSTEM
        if self.claims_model_name:
            assert 0 < meta.num_output < meta.context_window
            assert meta.model_name not in ("", "unknown")

    def test_an_llm_has_a_distinct_class_name(self, llm: LLM) -> None:
        assert llm.class_name() not in ("base_component", "custom_llm", "base_llm", "LLM")

    def test_an_llm_serialises_to_json(self, llm: LLM) -> None:
        for data in (json.loads(llm.to_json()), json.loads(json.dumps(llm.to_dict()))):
            assert data["class_name"] == llm.class_name()

    def test_constructor_options_are_stored(self) -> None:
        assert self.make(system_prompt="Be brief.").system_prompt == "Be brief."

    def test_copies_give_the_same_answer(self, llm: LLM) -> None:
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

    async def test_async_streamed_chat_agrees_with_chat(self, llm: LLM) -> None:
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
    async def test_prompt_templates_get_the_same_answer_in_all_four_ways(self, llm: LLM, kind: str) -> None:
        prompt = PROMPTS[kind]
        want = llm.predict(prompt, **ARGS)
        assert isinstance(want, str)
        assert "".join(llm.stream(prompt, **ARGS)) == want
        assert await llm.apredict(prompt, **ARGS) == want
        assert "".join([piece async for piece in await llm.astream(prompt, **ARGS)]) == want

    def test_a_prediction_equals_the_chat_of_its_messages(self, llm: LLM) -> None:
        if llm.metadata.is_chat_model and self.chat_is_chat:
            want = llm.chat(PROMPTS["chat"].format_messages(**ARGS)).message.content
            assert llm.predict(PROMPTS["chat"], **ARGS) == want

    def test_the_system_prompt_reaches_the_model(self) -> None:
        seen: list[Any] = []
        llm = self.make(system_prompt="Speak like a sailor.")
        with events_of(llm, seen):
            llm.predict(PROMPTS["text"], **ARGS)
        asked = [getattr(event, "messages", None) or getattr(event, "prompt", "") for event in seen]
        assert any("Speak like a sailor." in str(text) for text in asked)

    def test_an_output_parser_sees_prompt_and_answer(self, llm: LLM) -> None:
        with pytest.raises(ValueError, match=r"(?i)json|extract"):
            parsing = PromptTemplate("A ship: {x}", output_parser=PydanticOutputParser(output_cls=Ship))
            llm.output_parser = PydanticOutputParser(output_cls=Ship)
            llm.predict(parsing, x="now")
