"""Tests the text model."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.exceptions import ContextOverflowError
from langchain_core.load import dumps

from cacheblend_rag import Chunk, InputError, TransformersEngine, make_chunk
from cacheblend_rag.errors import UnknownChunkError
from langchain_cacheblend import CacheBlendLLM

from plain import PlainLLM
from scripted import ScriptedEngine

NOTE = "The harbour of Marlow is very old, and its keeper is Ada Brenmoor."


@pytest.fixture
def llm(scripted: ScriptedEngine) -> CacheBlendLLM:
    return CacheBlendLLM(engine=scripted)


async def test_every_way_to_call_gives_the_same_text(engine: TransformersEngine, plain_llm: PlainLLM) -> None:
    llm = CacheBlendLLM(engine=engine, max_tokens=10)
    want = plain_llm.invoke("Hello")
    assert want
    assert llm.invoke("Hello") == want == await llm.ainvoke("Hello")
    assert "".join(llm.stream("Hello")) == want == "".join([piece async for piece in llm.astream("Hello")])
    assert llm.batch(["Hello", "Hello"]) == [want] * 2 == await llm.abatch(["Hello", "Hello"])


def test_a_batch_reports_each_prompt_and_their_sum(llm: CacheBlendLLM, scripted: ScriptedEngine) -> None:
    scripted.precompute([make_chunk(NOTE, scripted.tokenizer)])
    result = llm.generate([f"{NOTE} Who?", "Who?"])
    details = [g[0].generation_info["usage_metadata"]["input_token_details"]["cache_read"] for g in result.generations]
    assert details[0] > details[1] == 0
    assert result.llm_output["token_usage"]["input_token_details"]["cache_read"] == details[0]
    assert result.llm_output["model_name"] == "scripted"
    assert [g[0].generation_info["cacheblend"]["mode"] for g in result.generations] == ["blend", "prefill"]


def test_chunks_are_found_by_name_or_by_content(llm: CacheBlendLLM, scripted: ScriptedEngine) -> None:
    inner, outer = (make_chunk(text, scripted.tokenizer) for text in (NOTE, f"Note one. {NOTE}"))
    scripted.precompute([inner, outer])
    for arguments, found in (({}, outer), ({"chunk_ids": [inner.id]}, inner)):
        llm.invoke(f"{outer.text} Who?", **arguments)
        assert [s for s in scripted.prompts[-1].segments if isinstance(s, Chunk)] == [found]
    with pytest.raises(UnknownChunkError, match="nowhere"):
        llm.invoke("x", chunk_ids=["nowhere"])


def test_streams_end_with_the_report_and_call_callbacks(llm: CacheBlendLLM) -> None:
    class Handler(BaseCallbackHandler):
        tokens = ""
        info: Any = None

        def on_llm_new_token(self, token: str, **kwargs: Any) -> None:
            self.tokens += token

        def on_llm_end(self, response: Any, **kwargs: Any) -> None:
            self.info = response.generations[0][0].generation_info

    handler = Handler()
    text = "".join(llm.stream("Who is it?", config={"callbacks": [handler]}))
    assert text == handler.tokens == "Answer to: Who is it?"
    assert handler.info["finish_reason"] == "stop" and handler.info["usage_metadata"]["output_tokens"] > 0


async def test_a_stream_left_early_ends_the_engines_work(llm: CacheBlendLLM, scripted: ScriptedEngine) -> None:
    stream = llm.stream("Tell me a long story.")
    next(stream)
    stream.close()
    assert scripted.closed_streams == 1
    later = llm.astream("Tell me a long story.")
    await anext(later)
    await later.aclose()
    for _ in range(1000):
        if scripted.closed_streams == 2:
            break
        await asyncio.sleep(0.01)
    assert scripted.closed_streams == 2


def test_bad_arguments_are_refused(llm: CacheBlendLLM, engine: TransformersEngine) -> None:
    with pytest.raises(InputError, match="temprature"):
        llm.invoke("x", temprature=1)
    if not engine.supports_json_schema:
        with pytest.raises(InputError, match="guided decoding"):
            CacheBlendLLM(engine=engine).invoke("x", json_schema={"type": "object"})
    with pytest.raises(ContextOverflowError):
        CacheBlendLLM(engine=engine).invoke("word " * 9000)


def test_stop_strings_token_counts_and_serialisation(llm: CacheBlendLLM, scripted: ScriptedEngine) -> None:
    assert llm.invoke("x", stop=["to:"]) == "Answer "
    assert llm.get_num_tokens("the captain") == len(
        scripted.tokenizer("the captain", add_special_tokens=False).input_ids
    )
    scripted.token = "secret-7f3a"
    written = [dumps(llm), repr(llm), str(llm.asdict() if hasattr(llm, "asdict") else llm.dict())]
    assert not any("secret" in text or "ScriptedEngine" in text for text in written)
