"""Tests the report on retrieved chunks: formatters escape, cut and re-flow chunks, and the answer's metadata show it."""

from __future__ import annotations

import asyncio
import html
import json
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableParallel, RunnablePassthrough

from cacheblend_rag import BlendEngine, InputError, TransformersEngine, chunk_id
from cacheblend_rag.errors import AlteredChunkError
from langchain_cacheblend import CacheBlendLLM, CacheBlendRetriever, CacheBlendVectorStore, ChatCacheBlend
from langchain_cacheblend.runs import RETRIEVALS

from scripted import ScriptedEngine

PROMPT = ChatPromptTemplate.from_messages([("human", "{context}\n\nQuestion: {question}")])


def note(number: int, subject: str = "bell") -> str:
    return (
        f'Entry {number}: the "{subject}" of harbour {number} was cast in {1800 + number} by two brothers & their aunt.\n'
        f"It cracked in the winter of {1850 + number}, when the sexton of parish {number} rang it for a wedding in the frost.\n"
        f"The parish of number {number} has kept the pieces in its crypt ever since, and shows them on Sundays."
    )


class Fixed(BaseRetriever):
    """Returns the same documents for every question."""

    texts: list[str]

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        return [Document(page_content=text) for text in self.texts]


def joined(documents: list[Document]) -> str:
    return "\n\n".join(document.page_content for document in documents)


def as_json(documents: list[Document]) -> str:
    return json.dumps([document.page_content for document in documents])


def re_flowed(documents: list[Document]) -> str:
    return "\n\n".join(d.page_content.replace(" the ", "\nthe ") for d in documents)


def chain(
    engine: BlendEngine, retriever: Runnable[str, list[Document]], form: Callable[..., str], **options: Any
) -> Any:
    inputs = RunnableParallel(context=retriever | form, question=RunnablePassthrough())
    return inputs | PROMPT | ChatCacheBlend(engine=engine, max_tokens=2, **options)


def of(engine: BlendEngine, texts: list[str]) -> CacheBlendRetriever:
    return CacheBlendRetriever(base_retriever=Fixed(texts=texts), engine=engine)


def report(answer: Any) -> dict[str, Any]:
    found: dict[str, Any] = answer.response_metadata["cacheblend"]["retrieved"]
    return found


def statuses(answer: Any) -> list[str]:
    return [each["status"] for each in report(answer)["chunks"]]


def test_whole_chunks_in_a_prompt_are_matched(scripted: ScriptedEngine) -> None:
    texts = [note(n) for n in range(3)]
    retriever = of(scripted, texts)
    first = chain(scripted, retriever, joined).invoke("When?")
    assert statuses(first) == ["not_stored"] * 3
    again = chain(scripted, retriever, joined).invoke("When?")
    assert report(again)["summary"] == "3 of 3 retrieved chunks reused"
    assert [each["id"] for each in report(again)["chunks"]] == [chunk_id(text) for text in texts]


def test_a_chunk_that_is_not_reused_is_reported_and_logged(
    scripted: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    texts = [note(n) for n in range(4)]
    retriever = of(scripted, texts)

    def form(documents: list[Document]) -> str:
        return joined([*documents[:1], Document(page_content=re_flowed(documents[1:3]))])

    answer = chain(scripted, retriever, form).invoke("When?")
    assert statuses(answer) == ["not_stored", "not_reused", "not_reused", "not_reused"]
    assert report(answer)["summary"] == "0 of 4 retrieved chunks reused, 1 not stored yet"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"3 of 4 retrieved chunks cannot be reused, the first of them {chunk_id(texts[1])}" in record.getMessage()
    assert "\n" not in record.getMessage()


@pytest.mark.parametrize(
    "form",
    [
        lambda documents: documents[0].page_content[:180],
        lambda documents: "\n> ".join(documents[0].page_content.splitlines()),
        lambda documents: html.escape(documents[0].page_content),
        lambda documents: " ".join(documents[0].page_content.split()),
    ],
    ids=["cut", "quoted", "html", "whitespace"],
)
def test_a_cut_or_changed_chunk_is_not_reused(scripted: ScriptedEngine, form: Callable[..., str]) -> None:
    assert statuses(chain(scripted, of(scripted, [note(1)]), form).invoke("When?")) == ["not_reused"]


def test_on_miss_decides_between_silence_and_an_error(
    scripted: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    text = note(1)
    retriever = of(scripted, [text])
    assert statuses(chain(scripted, retriever, re_flowed, on_miss="ignore").invoke("When?")) == ["not_reused"]
    assert not caplog.records
    with pytest.raises(AlteredChunkError, match=chunk_id(text)) as error:
        chain(scripted, retriever, re_flowed, on_miss="error").invoke("When?")
    assert error.value.chunk_id == chunk_id(text)
    asked = len(scripted.requests)
    strict = ChatCacheBlend(engine=scripted, on_miss="error")
    with pytest.raises(AlteredChunkError):
        (of(scripted, [text]) | re_flowed | strict).invoke("When?")
    assert len(scripted.requests) == asked  # nothing was computed
    assert strict.invoke(text + " When?", on_miss="ignore").content
    with pytest.raises(InputError, match="'ignore', 'warn', 'error'"):
        ChatCacheBlend(engine=scripted, on_miss="panic")


def test_a_named_policy_that_falls_back_may_be_an_error() -> None:
    with TransformersEngine("bundled", ranking="off", prefix_cache=0) as unranked:
        text = "\n\n".join(d.page_content for d in of(unranked, [note(1), note(2)]).invoke("")) + " When?"
        unranked.precompute(list(unranked.registry))
        strict = ChatCacheBlend(engine=unranked, on_miss="error", max_tokens=2)
        with pytest.raises(InputError, match=r"static fell back to hkvd .* not all chunks are ranked.*on_miss='warn'"):
            strict.invoke(text, policy="static")
        with pytest.raises(InputError, match="static fell back to hkvd"):
            list(strict.stream(text, policy="static"))
        chosen = [
            model.invoke(text, **how).response_metadata["cacheblend"]["policy"]
            for model, how in (
                (strict, {}),
                (strict, {"policy": "hkvd"}),
                (strict, {"quality": "full"}),
                (strict, {"policy": "static", "ratio": 0.0}),  # no token is chosen
                (strict, {"policy": "static", "ratio": 1.0}),
                (ChatCacheBlend(engine=unranked, max_tokens=2), {"policy": "static"}),
            )
        ]
    assert chosen == ["hkvd", "hkvd", None, "static", "static", "hkvd"]


@pytest.mark.parametrize(
    "form",
    [
        as_json,
        lambda documents: json.dumps([d.page_content for d in documents], ensure_ascii=False),
    ],
    ids=["json", "json-utf8"],
)
def test_escaped_chunks_are_reused_from_the_second_prompt_on(engine: BlendEngine, form: Callable[..., str]) -> None:
    texts = [note(n, "bell of the café") for n in range(3)]
    asked = chain(engine, of(engine, texts), form, ratio=1.0)
    first = asked.invoke("When was it cast?")
    assert statuses(first) == ["not_stored"] * 3
    engine.flush()
    again = chain(engine, of(engine, texts), form, ratio=0.0).invoke("Who cast it?")
    assert statuses(again) == ["reused"] * 3
    details = again.usage_metadata["input_token_details"]
    assert details["cache_read"] > 0.7 * again.usage_metadata["input_tokens"]
    # At ratio 1 the answer equals an ordinary prefill's: the tokens are the prompt's.
    blended = asked.invoke("Who cast it?")
    plain = chain(engine, of(engine, texts), form, quality="full").invoke("Who cast it?")
    assert (blended.content, blended.usage_metadata["input_tokens"]) == (
        plain.content,
        plain.usage_metadata["input_tokens"],
    )
    engine.forget([chunk.id for chunk in engine.registry if "café" in chunk.text or "caf" in chunk.text])


def test_concurrent_requests_do_not_see_each_others_chunks(scripted: ScriptedEngine) -> None:
    gate = threading.Barrier(4)

    def ask(number: int) -> list[str]:
        def form(documents: list[Document]) -> str:
            gate.wait()  # all have retrieved before one is answered
            return joined(documents)

        answer = chain(scripted, of(scripted, [note(number)]), form).invoke("When?")
        return [each["id"] for each in report(answer)["chunks"]]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, range(4))) == [[chunk_id(note(number))] for number in range(4)]


async def test_concurrent_async_requests_do_not_see_each_others_chunks(scripted: ScriptedEngine) -> None:
    async def ask(number: int) -> Any:
        return await chain(scripted, of(scripted, [note(number)]), joined).ainvoke("When?")

    answers = await asyncio.gather(*map(ask, range(5)))
    assert [[each["id"] for each in report(a)["chunks"]] for a in answers] == [[chunk_id(note(n))] for n in range(5)]
    batch = await chain(scripted, of(scripted, [note(1)]), joined).abatch(["When?", "Who?"])
    assert [report(a)["retrieved"] for a in batch] == [1, 1]


def test_finished_runs_are_forgotten(scripted: ScriptedEngine) -> None:
    def broken(documents: list[Document]) -> str:
        raise RuntimeError("no")

    open_before = len(RETRIEVALS._parents)
    for _ in range(3):
        chain(scripted, of(scripted, [note(1)]), joined).invoke("When?")
        list(chain(scripted, of(scripted, [note(1)]), joined).stream("When?"))
        with pytest.raises(RuntimeError):
            chain(scripted, of(scripted, [note(1)]), broken).invoke("When?")
    assert len(RETRIEVALS._parents) == open_before


def test_streams_texts_and_callbacks_carry_the_report(scripted: ScriptedEngine) -> None:
    class Seen(BaseCallbackHandler):
        def on_llm_end(self, response: Any, **kwargs: Any) -> None:
            self.message = response.generations[0][0].message

    seen, retriever = Seen(), of(scripted, [note(1)])
    whole = None
    for piece in chain(scripted, retriever, joined).stream("When?", {"callbacks": [seen]}):
        whole = piece if whole is None else whole + piece
    assert report(whole)["retrieved"] == report(seen.message)["retrieved"] == 1

    class Infos(BaseCallbackHandler):
        def on_llm_end(self, response: Any, **kwargs: Any) -> None:
            self.info = response.generations[0][0].generation_info

    infos = Infos()
    text_chain = (
        RunnableParallel(context=retriever | joined) | (lambda x: x["context"]) | CacheBlendLLM(engine=scripted)
    )
    (text_chain | StrOutputParser()).invoke("When?", {"callbacks": [infos]})
    assert [each["id"] for each in infos.info["cacheblend"]["retrieved"]["chunks"]] == [chunk_id(note(1))]


async def test_a_stream_belongs_to_the_run_that_started_it(scripted: ScriptedEngine) -> None:
    """LangChain gives streams of chat models no run, and `invoke` streams if a callback listens."""

    async def of_async(asked: Any) -> None:
        async for _ in asked.astream("When?"):
            pass

    asking: list[tuple[dict[str, bool], Callable[[Any], Any]]] = [
        ({}, lambda asked: list(asked.stream("When?"))),
        ({}, of_async),
        ({"streaming": True}, lambda asked: asked.invoke("When?")),
        ({"streaming": True}, lambda asked: asked.ainvoke("When?")),
    ]
    for number, (options, ask) in enumerate(asking):
        retriever = of(scripted, [note(number, "gong")])  # retrieved for the first time
        with pytest.raises(AlteredChunkError):
            found = ask(chain(scripted, retriever, re_flowed, on_miss="error", **options))
            if asyncio.iscoroutine(found):
                await found
    assert not scripted.requests


def test_a_retriever_and_a_model_called_in_succession_report_the_chunks_in_the_prompt(scripted: ScriptedEngine) -> None:
    texts = [note(n, "organ") for n in range(11, 14)]
    documents = of(scripted, texts).invoke("When?")
    llm = ChatCacheBlend(engine=scripted, on_miss="error")
    answer = llm.invoke(f"{as_json(documents[:1])} {re_flowed(documents[1:])}")
    # Chunks absent from the prompt may have been retrieved for a different one.
    assert statuses(answer) == ["not_stored"]
    assert statuses(ChatCacheBlend(engine=ScriptedEngine()).invoke(joined(documents))) == []


def test_chunks_cut_by_a_compressor_count_as_retrieved(scripted: ScriptedEngine) -> None:
    inner = of(scripted, [note(1)])

    class Cutting(BaseRetriever):
        def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
            found = inner.invoke(query, {"callbacks": run_manager.get_child()})
            return [Document(page_content=d.page_content[:120]) for d in found]

    outer = CacheBlendRetriever(base_retriever=Cutting(), engine=scripted)
    answer = chain(scripted, outer, joined).invoke("When?")
    assert [(c["id"], c["status"]) for c in report(answer)["chunks"]] == [
        (chunk_id(note(1)[:120].strip()), "not_stored")
    ]


def test_the_retriever_made_by_the_vector_store_is_tracked(engine: BlendEngine, embedding: Any) -> None:
    from langchain_core.vectorstores import InMemoryVectorStore

    store = CacheBlendVectorStore(InMemoryVectorStore(embedding), engine)
    store.add_texts([note(n, "sundial") for n in range(3)])
    answer = chain(engine, store.as_retriever(search_kwargs={"k": 2}), re_flowed, on_miss="ignore").invoke("sundial")
    assert statuses(answer) == ["not_reused"] * 2
    store.delete()


def test_deleting_a_document_deletes_the_kv_of_its_json_forms(embedding: Any) -> None:
    from langchain_core.vectorstores import InMemoryVectorStore

    with TransformersEngine() as engine:
        store = CacheBlendVectorStore(InMemoryVectorStore(embedding), engine)
        ids = store.add_texts([note(1), note(2)])
        asked = chain(engine, store.as_retriever(), as_json)
        asked.invoke("When?")
        engine.flush()
        assert asked.invoke("When?").usage_metadata["input_token_details"]["cache_read"] > 50
        text = json.dumps([note(1), note(2)])
        store.delete(ids)
        assert len(engine.registry) == 0
        answer = ChatCacheBlend(engine=engine, max_tokens=2).invoke(text)
        assert answer.usage_metadata["input_token_details"]["cache_read"] == 0
        for chunk_text in (json.dumps(note(1))[1:-1], note(1)):
            assert engine.entries is not None
            assert not engine.entries.contains(tuple(engine.tokenize(chunk_text).token_ids))
