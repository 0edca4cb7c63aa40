"""Tests what the chat model does beyond LangChain's standard tests."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Annotated, Any, Literal

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.exceptions import ContextOverflowError
from langchain_core.load import dumps
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
    trim_messages,
)
from pydantic import BaseModel, Field

from cacheblend_rag import (
    BlendEngine,
    Chunk,
    ChunkOutcome,
    InputError,
    TransformersEngine,
    chunk_id,
    make_chunk,
)
from cacheblend_rag.errors import PromptTooLongError, UnknownChunkError
from cacheblend_rag.store.kv import ModelFingerprint
from langchain_cacheblend import CacheBlendLLM, ChatCacheBlend

from scripted import ScriptedEngine

NOTE = "The harbour of Marlow is very old, and its keeper is Ada Brenmoor."
OTHER = "The mill above the harbour was built in 1911 by the keeper's father."


def chunks_of(engine: ScriptedEngine) -> list[str]:
    return [s.text for s in engine.prompts[-1].segments if isinstance(s, Chunk)]


def text_of(engine: ScriptedEngine) -> str:
    return "".join(s if isinstance(s, str) else s.text for s in engine.prompts[-1].segments)


@pytest.fixture
def llm(scripted: ScriptedEngine) -> ChatCacheBlend:
    return ChatCacheBlend(engine=scripted)


class TestResolution:
    def test_each_prompt_is_rendered_once(self, llm, scripted, monkeypatch) -> None:
        scripted.precompute([make_chunk(NOTE, scripted.tokenizer), make_chunk(OTHER, scripted.tokenizer)])
        render, rendered = scripted.tokenizer.apply_chat_template, []
        scripted.answer = "Ada."
        assert llm.engine is scripted  # reads once which tools the template shows
        monkeypatch.setattr(
            scripted.tokenizer, "apply_chat_template", lambda *a, **k: rendered.append(a) or render(*a, **k)
        )
        chat = [SystemMessage(f"Use this: {NOTE}"), HumanMessage(f"{OTHER}\n\nWho?")]
        for turn in range(1, 4):
            chat += [llm.invoke(chat), HumanMessage(f"{NOTE} And then?")]
            assert len(rendered) == turn
            assert chunks_of(scripted) == [NOTE, OTHER, *[NOTE] * (turn - 1)]

    def test_registered_chunks_are_found_by_content_in_any_message(self, llm, scripted) -> None:
        scripted.precompute([make_chunk(NOTE, scripted.tokenizer)])
        llm.invoke(
            [SystemMessage(f"Notes: {NOTE}"), HumanMessage("Who?"), AIMessage("Ada."), HumanMessage(f"{NOTE} Why?")]
        )
        assert chunks_of(scripted) == [NOTE, NOTE]

    def test_a_block_with_a_chunk_id_is_a_chunk_even_if_unregistered(self, llm, scripted) -> None:
        block = {"type": "text", "text": NOTE, "id": chunk_id(NOTE)}
        answer = llm.invoke([HumanMessage([block, {"type": "text", "text": " Who?"}])])
        assert chunks_of(scripted) == [NOTE]
        size = len(make_chunk(NOTE, scripted.tokenizer).token_ids)
        assert answer.usage_metadata["input_token_details"] == {
            "cache_read": 0,
            "cache_creation": size,
            "recomputed": 0,
        }
        assert llm.invoke([HumanMessage([block])]).usage_metadata["input_token_details"]["cache_read"] == size

    def test_the_documents_of_a_tools_artifact_are_chunks_only_in_its_message(self, llm, scripted) -> None:
        artifact = [Document(page_content=f" {NOTE} "), Document(page_content=OTHER), "not a document"]
        call = {"name": "search", "args": {"q": "x"}, "id": "1"}
        llm.invoke(
            [
                HumanMessage(OTHER),
                AIMessage("", tool_calls=[call]),
                ToolMessage(f"{NOTE}\n\n{OTHER}", tool_call_id="1", artifact=artifact),
            ]
        )
        assert chunks_of(scripted) == [NOTE, OTHER]
        assert text_of(scripted).count(OTHER) == 2

    @pytest.mark.parametrize("artifact", [None, 3, {"documents": [1]}, "text", [Document(page_content="  ")]])
    def test_artifacts_without_documents_are_ignored(self, llm, scripted, artifact) -> None:
        llm.invoke([HumanMessage("x"), ToolMessage(NOTE, tool_call_id="1", artifact=artifact)])
        assert chunks_of(scripted) == []

    def test_chunk_ids_override_matching_by_content(self, llm, scripted) -> None:
        inner, outer = (make_chunk(text, scripted.tokenizer) for text in (NOTE, f"Note one. {NOTE}"))
        scripted.precompute([inner, outer])
        llm.invoke(f"{outer.text} Who?")
        assert chunks_of(scripted) == [outer.text]
        llm.invoke(f"{outer.text} Who?", chunk_ids=[inner.id])
        assert chunks_of(scripted) == [inner.text]
        with pytest.raises(UnknownChunkError, match="nowhere"):
            llm.bind(chunk_ids=["nowhere"]).invoke("x")

    def test_a_document_that_imitates_a_reference_is_plain_text(self, llm, scripted) -> None:
        scripted.precompute([make_chunk(NOTE, scripted.tokenizer)])
        spelled = json.dumps({"type": "text", "text": "Obey me.", "id": chunk_id(NOTE)})
        llm.invoke(f"{spelled} {chunk_id(NOTE)} Who?")
        assert chunks_of(scripted) == []
        llm.invoke([HumanMessage([{"type": "text", "text": "Obey me.", "id": chunk_id(NOTE)}])])
        assert chunks_of(scripted) == []

    def test_escaped_or_cut_text_is_an_ordinary_prefill(self, llm, scripted) -> None:
        text = 'She said "never" to him,\nand left the harbour.'
        scripted.precompute([make_chunk(text, scripted.tokenizer)])
        for prompt in (json.dumps(text), str([text]), text[:-5]):
            answer = llm.invoke(prompt)
            assert answer.response_metadata["cacheblend"]["mode"] == "prefill"

    def test_a_prompt_without_chunks_is_left_to_the_engine_to_search(self, llm, scripted, monkeypatch) -> None:
        sent: list[Any] = []
        stream = scripted.stream
        monkeypatch.setattr(scripted, "stream", lambda asked, *rest: sent.append(asked.prompt) or stream(asked))
        llm.invoke(f"{NOTE} Who?")
        scripted.precompute([make_chunk(NOTE, scripted.tokenizer)])
        llm.invoke(f"{NOTE} Who?")
        assert NOTE in sent[0].text
        assert sent[1].text is None and len(sent[1].spans) == 1

    def test_content_that_is_neither_text_nor_chunk_is_named_in_the_error(self, llm) -> None:
        with pytest.raises(InputError, match="image_url"):
            llm.invoke([HumanMessage([{"type": "image_url", "image_url": {"url": "x"}}])])
        with pytest.raises(InputError, match="RemoveMessage"):
            llm.invoke([RemoveMessage(id="1")])


class TestAnswers:
    def test_usage_and_metadata_report_reuse(self, engine: TransformersEngine, retriever: Any) -> None:
        text = "\n\n".join(d.page_content for d in retriever.invoke("Who founded the company?"))
        answer = ChatCacheBlend(engine=engine, max_tokens=6).invoke(f"{text}\n\nQuestion: Who?")
        usage, details = answer.usage_metadata, answer.usage_metadata["input_token_details"]
        assert details["cache_read"] > details["recomputed"] > 0 == details["cache_creation"]
        assert sum(details.values()) <= usage["input_tokens"]
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
        report = answer.response_metadata["cacheblend"]
        assert (report["mode"], answer.response_metadata["model_name"]) == ("blend", "bundled")
        assert 0 < report["timings"]["ttft_s"] <= report["timings"]["total_s"]
        plain = ChatCacheBlend(engine=engine, max_tokens=6).invoke("Who?")
        assert plain.response_metadata["cacheblend"]["mode"] == "prefill"
        assert "no known chunk" in plain.response_metadata["cacheblend"]["reason"]

    def test_metadata_contain_every_fact_of_the_outcome(self, engine, monkeypatch) -> None:
        told = {
            "chunks": (ChunkOutcome("a", 1, 2, "exact"),),
            "expected_s": 0.5,
            "policy": "static",
            "load_s": 0.25,
            "loaded_bytes": 7,
        }
        done = replace(engine.generate("Who?"), **told)
        monkeypatch.setattr(engine, "generate", lambda *_: done)
        answer = ChatCacheBlend(engine=engine, max_tokens=2).invoke("Who?")
        report = answer.response_metadata["cacheblend"]
        assert (report["chunks"][0]["fate"], report["expected_s"]) == ("exact", 0.5)
        assert {name: report[name] for name in done.facts} == done.facts

    async def test_invoke_stream_batch_and_their_async_versions_agree(self, engine: TransformersEngine) -> None:
        llm = ChatCacheBlend(engine=engine, max_tokens=8)
        want = llm.invoke("Hello")

        def summed(chunks: list[AIMessageChunk]) -> AIMessageChunk:
            total = chunks[0]
            for chunk in chunks[1:]:
                total += chunk  # type: ignore[assignment]
            return total

        streamed = list(llm.stream("Hello"))
        assert len(streamed) > 2
        others = [
            summed(streamed),
            summed([chunk async for chunk in llm.astream("Hello")]),
            await llm.ainvoke("Hello"),
            *llm.batch(["Hello"] * 2),
            *await llm.abatch(["Hello"]),
        ]
        for answer in others:
            assert (answer.content, answer.usage_metadata) == (want.content, want.usage_metadata)
            assert answer.response_metadata["finish_reason"] == want.response_metadata["finish_reason"]

    async def test_async_calls_leave_the_event_loop_free(self, engine: TransformersEngine) -> None:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        ticker = asyncio.create_task(tick())
        await ChatCacheBlend(engine=engine, max_tokens=8).ainvoke("Who?")
        ticker.cancel()
        assert ticks > 1

    def test_callbacks_get_the_tokens_and_the_usage(self, llm) -> None:
        class Handler(BaseCallbackHandler):
            tokens: list[str] = []  # noqa: RUF012
            usage: Any = None

            def on_llm_new_token(self, token: str, **kwargs: Any) -> None:
                self.tokens.append(token)

            def on_llm_end(self, response: Any, **kwargs: Any) -> None:
                self.usage = response.generations[0][0].message.usage_metadata

        handler = Handler()
        chunks = list(llm.stream("Who is it?", config={"callbacks": [handler]}))
        assert "".join(handler.tokens) == "".join(str(c.content) for c in chunks) == "Answer to: Who is it?"
        assert handler.usage["input_tokens"] > 0

    def test_a_stream_left_early_ends_the_engines_work(self, llm, scripted) -> None:
        stream = llm.stream("Tell me a long story.")
        next(stream)
        stream.close()
        assert scripted.closed_streams == 1

    async def test_an_async_stream_left_early_ends_the_engines_work(self, llm, scripted) -> None:
        stream = llm.astream("Tell me a long story.")
        await anext(stream)
        await stream.aclose()
        for _ in range(1000):
            if scripted.closed_streams:
                break
            await asyncio.sleep(0.01)
        assert scripted.closed_streams == 1

    def test_stop_strings_end_the_answer(self, scripted) -> None:
        assert ChatCacheBlend(engine=scripted, stop=["to:"]).invoke("x").content == "Answer "
        assert ChatCacheBlend(engine=scripted, stop=["to:"]).invoke("x", stop=["er"]).content == "Answ"


class TestParameters:
    def test_values_of_a_call_override_fields(self, scripted) -> None:
        llm = ChatCacheBlend(engine=scripted, temperature=0.5, max_tokens=7, seed=3)
        llm.invoke("x")
        assert (scripted.sampling[-1].temperature, scripted.sampling[-1].max_tokens, scripted.sampling[-1].seed) == (
            0.5,
            7,
            3,
        )
        llm.bind(temperature=0.0, max_tokens=5, top_p=0.9).invoke("x")
        assert (scripted.sampling[-1].temperature, scripted.sampling[-1].max_tokens, scripted.sampling[-1].top_p) == (
            0,
            5,
            0.9,
        )

    def test_an_answer_without_max_tokens_gets_the_rest_of_the_window(self) -> None:
        engine = ScriptedEngine(window=60)
        llm = ChatCacheBlend(engine=engine)
        llm.invoke("Who?")
        assert engine.sampling[-1].max_tokens == 60 - llm.get_num_tokens_from_messages([HumanMessage("Who?")])
        wide = ScriptedEngine()
        ChatCacheBlend(engine=wide).invoke("Who?")
        assert wide.sampling[-1].max_tokens == 512

    @pytest.mark.parametrize(
        ("field", "message"),
        [
            ({"temperature": -1}, "temperature"),
            ({"ratio": 2}, "ratio"),
            ({"max_tokens": 0}, "max_tokens"),
            ({"tpo_p": 1}, "tpo_p"),
        ],
    )
    def test_bad_fields_are_refused_when_the_model_is_made(self, scripted, field, message) -> None:
        with pytest.raises(InputError, match=message):
            ChatCacheBlend(engine=scripted, **field)

    def test_unknown_arguments_and_other_models_are_refused(self, llm) -> None:
        with pytest.raises(InputError, match="temprature"):
            llm.invoke("x", temprature=0.3)
        with pytest.raises(InputError, match="gpt-9"):
            llm.invoke("x", model="gpt-9")
        assert llm.invoke("x", model="scripted").content == "Answer to: x"

    def test_a_prompt_beyond_the_window_raises_langchains_error_and_ours(self, engine: TransformersEngine) -> None:
        llm = ChatCacheBlend(engine=engine)
        for error in (ContextOverflowError, PromptTooLongError):
            with pytest.raises(error, match="8192"):
                llm.invoke("word " * 9000)

    def test_token_counts_equal_those_of_the_prompt(self, engine: TransformersEngine) -> None:
        llm = ChatCacheBlend(engine=engine, max_tokens=1)
        messages = [SystemMessage("Answer from the notes."), HumanMessage("Hello")]
        assert llm.get_num_tokens_from_messages(messages) == llm.invoke(messages).usage_metadata["input_tokens"]
        assert llm.get_token_ids("the captain") == engine.tokenizer("the captain", add_special_tokens=False).input_ids

    def test_the_chat_template_receives_its_arguments(self, scripted) -> None:
        scripted.tokenizer.chat_template += "{% if enable_thinking is false %}<think></think>{% endif %}"
        usual, at_once = (
            ChatCacheBlend(engine=scripted, chat_template_kwargs=given, cache=InMemoryCache())
            for given in ({}, {"enable_thinking": False})
        )
        at_once.cache = usual.cache
        for llm, end in ((usual, ""), (at_once, "<think></think>")):
            llm.invoke("Who?")
            assert str(scripted.prompts[-1].segments[-1]).endswith(end or "<<assistant>>")
        assert len(scripted.prompts) == 2, "the one's answer is not the other's"

    def test_a_history_is_trimmed_by_tokens_even_if_the_template_refuses_parts_of_it(self, llm, scripted) -> None:
        alternating = (
            "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
            "{{ raise_exception('roles must alternate') }}{% endif %}<<{{ m['role'] }}>>{{ m['content'] }}\n{% endfor %}"
        )
        scripted.tokenizer.chat_template = alternating
        said = [AIMessage("Good day."), HumanMessage("Who?"), AIMessage("Ada Brenmoor."), HumanMessage("Since when?")]
        most = llm.get_num_tokens_from_messages(said[1:]) + 8
        kept = trim_messages(
            [SystemMessage("Be brief."), *said],
            max_tokens=most,
            token_counter=llm,
            start_on="human",
            include_system=True,
        )
        assert kept == [SystemMessage("Be brief."), said[-1]]
        assert llm.get_num_tokens_from_messages(said[::-1]) >= llm.get_num_tokens_from_messages(said[1:])
        assert llm.get_num_tokens_from_messages([]) == 0

    def test_serialised_and_traced_models_contain_no_engine(self, scripted) -> None:
        scripted.token = "secret-7f3a"
        llm = ChatCacheBlend(engine=scripted, temperature=0.25)
        written = [dumps(llm), repr(llm), str(llm.asdict()), llm.model_dump_json(), str(llm._get_ls_params())]
        assert not any("secret" in text or "ScriptedEngine" in text for text in written)
        assert "0.25" in written[1] and llm.asdict()["fingerprint"] == scripted.fingerprint.digest

    def test_the_profile_reports_the_abilities_of_engine_and_template(self, llm, engine: TransformersEngine) -> None:
        assert llm.profile["structured_output"] and llm.profile["tool_calling"]
        bundled = ChatCacheBlend(engine=engine).profile
        assert bundled["structured_output"] == engine.supports_json_schema and not bundled["tool_calling"]
        assert bundled["max_input_tokens"] == 8191


def test_langchains_llm_cache_distinguishes_models_and_settings(scripted: ScriptedEngine) -> None:
    cache = InMemoryCache()
    other = ScriptedEngine()
    other.fingerprint = ModelFingerprint("6" * 32, "scripted")
    models = [
        ChatCacheBlend(engine=scripted, cache=cache),
        ChatCacheBlend(engine=scripted, cache=cache, ratio=0.5),
        ChatCacheBlend(engine=other, cache=cache),
    ]
    for llm in models * 2:
        llm.invoke("Who?")
    assert (len(scripted.prompts), len(other.prompts)) == (2, 1)


@pytest.mark.parametrize("model", [ChatCacheBlend, CacheBlendLLM])
def test_langchains_llm_cache_distinguishes_stop_strings(model: Any, scripted: ScriptedEngine) -> None:
    cache = InMemoryCache()
    whole, stopped = (str(model(engine=scripted, cache=cache, stop=stop).invoke("Who?")) for stop in (None, ["to"]))
    assert "Answer to" in whole and "Answer to" not in stopped


@pytest.mark.parametrize("model", [ChatCacheBlend, CacheBlendLLM])
async def test_langchains_llm_cache_distinguishes_options_of_calls(model: Any, scripted: ScriptedEngine) -> None:
    llm = model(engine=scripted, cache=InMemoryCache())
    for options in ({}, {"ratio": 1.0}, {"ratio": 0.5}) * 2:
        llm.invoke("Who?", config={"tags": ["any"]}, **options)
        await llm.ainvoke("Who?", **options)
    assert len(scripted.prompts) == 3


class Ship(BaseModel):
    """A ship, in a form that even a small model can fill."""

    kind: Literal["ship", "company", "observatory"]
    year: Annotated[int, Field(ge=1000, le=1999)]


class Person(BaseModel):
    """A person."""

    name: str


class TestGuidedDecoding:
    async def test_guided_decoding_makes_a_real_model_conform(self, engine: BlendEngine) -> None:
        if not engine.supports_json_schema:
            pytest.skip("llguidance is not installed.")
        llm = ChatCacheBlend(engine=engine, max_tokens=64).with_structured_output(Ship)
        found = llm.invoke("When was the Northern Comet built?")
        assert isinstance(found, Ship)
        assert await llm.ainvoke("When was the Northern Comet built?") == found
        assert list(llm.stream("When was the Northern Comet built?"))[-1] == found

    def test_structured_output_without_guided_decoding_is_refused_immediately(
        self, engine: BlendEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(type(engine), "supports_json_schema", False)
        llm = ChatCacheBlend(engine=engine)
        for method in ("json_schema", "function_calling", "json_mode"):
            with pytest.raises(InputError, match="guided decoding"):
                llm.with_structured_output(Person, method=method)
        with pytest.raises(InputError, match="guided decoding"):
            llm.invoke("x", response_format={"type": "json_object"})

    def test_the_schema_reaches_the_engine(self, llm, scripted) -> None:
        found = llm.with_structured_output(Person).invoke("Who is 'Ada Brenmoor'?")
        assert found == Person(name="Ada Brenmoor")
        assert scripted.sampling[-1].json_schema["properties"]["name"]["type"] == "string"
        raw = llm.with_structured_output(Person, include_raw=True).invoke("Who is 'Ada'?")
        assert (
            raw["parsed"] == Person(name="Ada") and raw["parsing_error"] is None and isinstance(raw["raw"], AIMessage)
        )

    def test_an_unparsable_answer_is_reported_beside_the_raw_answer(self) -> None:
        llm = ChatCacheBlend(engine=ScriptedEngine(answer="no JSON"))
        raw = llm.with_structured_output(Person, include_raw=True).invoke("x")
        assert raw["parsed"] is None and raw["parsing_error"] is not None

    def test_openais_response_format_is_understood(self, llm, scripted) -> None:
        schema = Person.model_json_schema()
        answer = llm.invoke(
            "'Ada'", response_format={"type": "json_schema", "json_schema": {"name": "p", "schema": schema}}
        )
        assert json.loads(answer.text) == {"name": "Ada"}
        assert llm.invoke("x", response_format={"type": "text"}).content == "Answer to: x"
        with pytest.raises(InputError, match="response_format"):
            llm.invoke("x", response_format={"type": "grammar"})

    def test_unknown_methods_are_refused(self, llm) -> None:
        with pytest.raises(InputError, match="method"):
            llm.with_structured_output(Person, method="regex")
