"""Chains as people build them, on the bundled model.

Each shape is built three times: around a plain model of the same weights with a retriever that is not wrapped; with ratio
1.0, whose answer must be the plain one's; and with ratio 0.15, where at least 90% of the tokens of the chunks in the final
prompt must come from stored KV (used as it is, or recomputed by the policy's choice).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, hook_config
from langchain_classic.chains import (
    ConversationalRetrievalChain,
    RetrievalQA,
    create_history_aware_retriever,
    create_retrieval_chain,
)
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_classic.chains.combine_documents.refine import RefineDocumentsChain
from langchain_classic.chains.llm import LLMChain
from langchain_classic.retrievers import ContextualCompressionRetriever, EnsembleRetriever, MultiQueryRetriever
from langchain_classic.retrievers.document_compressors import CrossEncoderReranker, DocumentCompressorPipeline
from langchain_classic.retrievers.parent_document_retriever import ParentDocumentRetriever
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.cross_encoders import BaseCrossEncoder
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder, PromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough
from langchain_core.stores import InMemoryStore
from langchain_core.tools import create_retriever_tool
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_text_splitters import CharacterTextSplitter

from cacheblend_rag import TransformersEngine, bundled_questions
from langchain_cacheblend import (
    BundledEmbeddings,
    CacheBlendLLM,
    CacheBlendRetriever,
    CacheBlendVectorStore,
    ChatCacheBlend,
    ChunkSplitter,
    create_blended_documents_chain,
)

from plain import PlainChat, PlainLLM

QUESTION = "Which company does the handbook name first?"
PROMPT = ChatPromptTemplate.from_messages(
    [("system", "Answer from the notes."), ("human", "{context}\n\nQuestion: {input}")]
)
HISTORY = [HumanMessage("Who founded the bakery?"), AIMessage("Sonia Halston.")]
MAX_TOKENS = 10


class Parts:
    """Holds the parts of a shape: a model, and a wrapper of a base retriever (none for the plain chain)."""

    def __init__(self, llm: Any, wrap: Callable[[Any], Any], base: BaseRetriever, embedding: BundledEmbeddings):
        self.llm, self.wrap, self.base, self.embedding = llm, wrap, base, embedding

    @property
    def retriever(self) -> Any:
        return self.wrap(self.base)


def stuff(retriever: Any, llm: Any) -> Runnable[Any, Any]:
    chain = create_retrieval_chain(retriever, create_stuff_documents_chain(llm, PROMPT))
    return RunnableLambda(lambda question: {"input": question}) | chain | RunnableLambda(lambda out: out["answer"])


def lcel_join(p: Parts) -> Runnable[Any, Any]:
    def join(documents: list[Document]) -> str:
        return "\n\n".join(f"Source: {d.metadata['source']}\n{d.page_content}" for d in documents)

    return {"context": p.retriever | join, "input": RunnablePassthrough()} | PROMPT | p.llm | StrOutputParser()


def history_aware(p: Parts) -> Runnable[Any, Any]:
    rephrase = ChatPromptTemplate.from_messages([MessagesPlaceholder("chat_history"), ("human", "{input}")])
    answer = ChatPromptTemplate.from_messages(
        [("system", "Answer from the notes.\n\n{context}"), MessagesPlaceholder("chat_history"), ("human", "{input}")]
    )
    retriever = create_history_aware_retriever(p.llm, p.retriever, rephrase)
    chain = create_retrieval_chain(retriever, create_stuff_documents_chain(p.llm, answer))
    given = RunnableLambda(lambda question: {"input": question, "chat_history": HISTORY})
    return given | chain | RunnableLambda(lambda out: out["answer"])


class RetrieveFirst(AgentMiddleware):
    """Looks every question up, then lets the model answer without tools: an agent for models without tool calls."""

    @hook_config(can_jump_to=["tools"])
    def before_model(self, state: Any, runtime: Any) -> dict[str, Any] | None:
        if isinstance(state["messages"][-1], HumanMessage):
            call = {"name": "search_notes", "args": {"query": state["messages"][-1].text}, "id": "first"}
            return {"messages": [AIMessage("", tool_calls=[call])], "jump_to": "tools"}
        return None

    def wrap_model_call(self, request: Any, handler: Any) -> Any:
        return handler(request.override(tools=[]))


def agent(p: Parts, response_format: Any = "content_and_artifact") -> Runnable[Any, Any]:
    tool = create_retriever_tool(p.retriever, "search_notes", "Looks up notes.", response_format=response_format)
    made = create_agent(p.llm, [tool], system_prompt="Answer from the notes.", middleware=[RetrieveFirst()])
    ask = RunnableLambda(lambda question: {"messages": [HumanMessage(question)]})
    return ask | made | RunnableLambda(lambda state: state["messages"][-1].text)


def agent_without_artifact(p: Parts) -> Runnable[Any, Any]:
    return agent(p, "content")


def multi_query(p: Parts) -> Runnable[Any, Any]:
    return stuff(MultiQueryRetriever.from_llm(p.retriever, p.llm, include_original=True), p.llm)


def ensemble(p: Parts) -> Runnable[Any, Any]:
    store = p.base.vectorstore  # type: ignore[attr-defined]
    other = store.as_retriever(search_type="mmr", search_kwargs={"k": 3})
    return stuff(EnsembleRetriever(retrievers=[p.retriever, p.wrap(other)], weights=[0.5, 0.5]), p.llm)


class ByEmbedding(BaseCrossEncoder):
    """Scores a passage by the similarity of its embedding to the question's."""

    def __init__(self, embedding: BundledEmbeddings):
        self.embedding = embedding

    def score(self, text_pairs: list[tuple[str, str]]) -> list[float]:
        passages = np.array(self.embedding.embed_documents([passage for _, passage in text_pairs]))
        return list(passages @ np.array(self.embedding.embed_query(text_pairs[0][0])))


def keep_best(embedding: BundledEmbeddings) -> CrossEncoderReranker:
    return CrossEncoderReranker(model=ByEmbedding(embedding), top_n=3)


def compression(p: Parts) -> Runnable[Any, Any]:
    keep = DocumentCompressorPipeline(transformers=[keep_best(p.embedding)])
    return stuff(ContextualCompressionRetriever(base_compressor=keep, base_retriever=p.retriever), p.llm)


def wrapped_outside(p: Parts) -> Runnable[Any, Any]:
    keep = keep_best(p.embedding)
    return stuff(p.wrap(ContextualCompressionRetriever(base_compressor=keep, base_retriever=p.base)), p.llm)


def parent_document(p: Parts) -> Runnable[Any, Any]:
    splitter = CharacterTextSplitter(separator=". ", chunk_size=150, chunk_overlap=0)
    parents = ParentDocumentRetriever(
        vectorstore=InMemoryVectorStore(p.embedding), docstore=InMemoryStore(), child_splitter=splitter
    )
    documents = p.base.vectorstore.similarity_search(QUESTION, k=6)  # type: ignore[attr-defined]
    parents.add_documents(documents)
    retriever = p.wrap(parents)
    if isinstance(retriever, CacheBlendRetriever):
        retriever.precompute(documents)
    return stuff(retriever, p.llm)


def blended_documents(p: Parts) -> Runnable[Any, Any]:
    make = create_stuff_documents_chain if isinstance(p.llm, PlainChat) else create_blended_documents_chain
    chain = create_retrieval_chain(p.retriever, make(p.llm, PROMPT))  # type: ignore[operator]
    return RunnableLambda(lambda question: {"input": question}) | chain | RunnableLambda(lambda out: out["answer"])


def refine(p: Parts) -> Runnable[Any, Any]:
    first = PromptTemplate.from_template("{page_content}\n\nQuestion: Who?")
    again = PromptTemplate.from_template("So far: {so_far}\n\n{page_content}\n\nQuestion: Who?")
    chain = RefineDocumentsChain(
        initial_llm_chain=LLMChain(llm=p.llm, prompt=first),
        refine_llm_chain=LLMChain(llm=p.llm, prompt=again),
        document_variable_name="page_content",
        initial_response_name="so_far",
    )
    found = p.retriever | RunnableLambda(lambda documents: {"input_documents": documents})
    return found | chain | RunnableLambda(lambda out: out["output_text"])


def retrieval_qa(p: Parts) -> Runnable[Any, Any]:
    made = RetrievalQA.from_chain_type(p.llm, chain_type="stuff", retriever=p.retriever)
    return RunnableLambda(lambda question: {"query": question}) | made | RunnableLambda(lambda out: out["result"])


def conversational_retrieval(p: Parts) -> Runnable[Any, Any]:
    made = ConversationalRetrievalChain.from_llm(p.llm, p.retriever)
    given = RunnableLambda(lambda question: {"question": question, "chat_history": HISTORY})
    return given | made | RunnableLambda(lambda out: out["answer"])


SHAPES = {
    "stuff": lambda p: stuff(p.retriever, p.llm),
    "lcel_join": lcel_join,
    "history_aware": history_aware,
    "agent": agent,
    "agent_without_artifact": agent_without_artifact,
    "multi_query": multi_query,
    "ensemble": ensemble,
    "compression": compression,
    "wrapped_outside": wrapped_outside,
    "parent_document": parent_document,
    "blended_documents": blended_documents,
    "refine": refine,
    "retrieval_qa": retrieval_qa,
    "conversational_retrieval": conversational_retrieval,
}


class LastCall(BaseCallbackHandler):
    """Records the model's last prompt, and its usage."""

    text = ""
    message: Any = None
    generation: Any = None

    def on_chat_model_start(self, serialized: Any, messages: Any, **kwargs: Any) -> None:
        self.text = "\n".join(str(m.text) for m in messages[0])

    def on_llm_start(self, serialized: Any, prompts: Any, **kwargs: Any) -> None:
        self.text = prompts[0]

    def on_llm_end(self, response: Any, **kwargs: Any) -> None:
        self.generation = response.generations[0][0]

    def usage(self) -> dict[str, Any]:
        message = getattr(self.generation, "message", None)
        return message.usage_metadata if message is not None else self.generation.generation_info["usage_metadata"]

    def reason(self) -> str:
        return str(self.generation.message.response_metadata["cacheblend"]["reason"])


@pytest.fixture(scope="module")
def base(chunks: list[Document], embedding: BundledEmbeddings) -> BaseRetriever:
    store = InMemoryVectorStore(embedding)
    store.add_documents(chunks)
    return store.as_retriever(search_kwargs={"k": 4})


@pytest.fixture
def shape(base: BaseRetriever, embedding: BundledEmbeddings, engine: TransformersEngine) -> Callable[..., Any]:
    def build(make: Any, llm: Any) -> Any:
        plain = isinstance(llm, PlainChat | PlainLLM)
        wrap = (lambda r: r) if plain else (lambda r: CacheBlendRetriever(base_retriever=r, engine=engine))
        return make(Parts(llm, wrap, base, embedding))

    return build


def served(call: LastCall, engine: TransformersEngine, chunks: list[Document]) -> float:
    """Return the share of the tokens of whole chunks in the prompt that came from stored KV."""
    texts = {d.page_content for d in chunks if d.page_content in call.text}
    tokens = sum(call.text.count(t) * len(engine.tokenizer(t, add_special_tokens=False).input_ids) for t in texts)
    assert tokens > 100, "no chunk reached the model whole"
    details = call.usage()["input_token_details"]
    return (details["cache_read"] + details["recomputed"] - len(engine.header_ids)) / tokens


@pytest.mark.parametrize("name", SHAPES)
def test_a_chain_gives_the_plain_models_answer_and_reuses_its_chunks(
    name: str,
    shape: Callable[..., Any],
    engine: TransformersEngine,
    retriever: CacheBlendRetriever,
    plain_chat: PlainChat,
    chunks: list[Document],
) -> None:
    want = shape(SHAPES[name], plain_chat).invoke(QUESTION)
    exact = ChatCacheBlend(engine=engine, max_tokens=MAX_TOKENS, ratio=1.0)
    assert want
    assert shape(SHAPES[name], exact).invoke(QUESTION) == want
    call = LastCall()
    blended = ChatCacheBlend(engine=engine, max_tokens=MAX_TOKENS, ratio=0.15)
    shape(SHAPES[name], blended).invoke(QUESTION, config={"callbacks": [call]})
    assert served(call, engine, chunks) >= 0.9


def test_the_text_model_gives_the_plain_models_answer_and_reuses_its_chunks(
    shape: Callable[..., Any],
    engine: TransformersEngine,
    retriever: CacheBlendRetriever,
    plain_llm: PlainLLM,
    chunks: list[Document],
) -> None:
    def text(p: Parts) -> Any:
        prompt = PromptTemplate.from_template("Answer from the notes.\n\n{context}\n\nQuestion: {input}\nAnswer:")
        chain = create_retrieval_chain(p.retriever, create_stuff_documents_chain(p.llm, prompt))
        return RunnableLambda(lambda question: {"input": question}) | chain | RunnableLambda(lambda out: out["answer"])

    want = shape(text, plain_llm).invoke(QUESTION)
    assert want == shape(text, CacheBlendLLM(engine=engine, max_tokens=MAX_TOKENS, ratio=1.0)).invoke(QUESTION)
    call = LastCall()
    llm = CacheBlendLLM(engine=engine, max_tokens=MAX_TOKENS, ratio=0.15)
    shape(text, llm).invoke(QUESTION, config={"callbacks": [call]})
    assert served(call, engine, chunks) >= 0.9


def test_the_answer_is_right_and_the_reason_given_if_a_compressor_cuts_the_chunks(
    shape: Callable[..., Any], engine: TransformersEngine, retriever: CacheBlendRetriever, plain_chat: PlainChat
) -> None:
    def cutting(p: Parts) -> Any:
        cut = DocumentCompressorPipeline(
            transformers=[CharacterTextSplitter(separator=". ", chunk_size=150, chunk_overlap=0, keep_separator=False)]
        )
        return stuff(ContextualCompressionRetriever(base_compressor=cut, base_retriever=p.retriever), p.llm)

    call = LastCall()
    blended = ChatCacheBlend(engine=engine, max_tokens=MAX_TOKENS, ratio=0.15)
    answer = shape(cutting, blended).invoke(QUESTION, config={"callbacks": [call]})
    assert answer == shape(cutting, plain_chat).invoke(QUESTION)
    assert call.usage()["input_token_details"]["cache_read"] == 0
    assert "no known chunk" in call.reason()


def test_a_cut_chunk_is_reused_once_the_wrapped_retriever_sees_it_cut(
    base: BaseRetriever, engine: TransformersEngine, plain_chat: PlainChat
) -> None:
    cut = CharacterTextSplitter(separator=". ", chunk_size=500, chunk_overlap=0, keep_separator=False)
    cutting = ContextualCompressionRetriever(
        base_compressor=DocumentCompressorPipeline(transformers=[cut]), base_retriever=base
    )
    outside = CacheBlendRetriever(base_retriever=cutting, engine=engine)
    call = LastCall()
    chain = stuff(outside, ChatCacheBlend(engine=engine, max_tokens=MAX_TOKENS))
    for expected in ("cache_creation", "cache_read"):
        chain.invoke("Who is the oldest captain?", config={"callbacks": [call]})
        details = call.usage()["input_token_details"]
        assert details[expected] > 100
        engine.flush()  # vLLM writes missing chunks back behind the answer
    assert details["cache_creation"] == 0


def test_an_agents_artifact_names_the_chunks_of_an_unwrapped_retriever(
    sources: list[Document], engine: TransformersEngine, embedding: BundledEmbeddings
) -> None:
    store = InMemoryVectorStore(embedding)
    store.add_documents(ChunkSplitter(engine, 72).split_documents(sources[1:2]))
    parts = Parts(ChatCacheBlend(engine=engine, max_tokens=4), lambda r: r, store.as_retriever(), embedding)
    call = LastCall()
    for kind, expected in (("content", "none"), ("content_and_artifact", "cache_creation"), ("content", "cache_read")):
        engine.reset_prefix_cache()
        agent(parts, kind).invoke(QUESTION, config={"callbacks": [call]})
        engine.flush()
        details = {"none": 1000, **call.usage()["input_token_details"]}
        assert details[expected] > 100
        assert (details["cache_read"] > 100) == (expected == "cache_read")


def test_a_vector_store_in_front_lets_any_chain_reuse_chunks(
    sources: list[Document], engine: TransformersEngine, embedding: BundledEmbeddings, plain_chat: PlainChat
) -> None:
    pieces = ChunkSplitter(engine, 96).split_documents(sources[:1])
    store = CacheBlendVectorStore(base=InMemoryVectorStore(embedding), engine=engine)
    store.add_documents(pieces)
    retriever = store.as_retriever(search_kwargs={"k": 4})
    call = LastCall()
    stuff(retriever, ChatCacheBlend(engine=engine, max_tokens=4)).invoke(QUESTION, config={"callbacks": [call]})
    assert served(call, engine, pieces) >= 0.9
    exact = stuff(retriever, ChatCacheBlend(engine=engine, max_tokens=MAX_TOKENS, ratio=1.0)).invoke(QUESTION)
    assert exact == stuff(store.base.as_retriever(search_kwargs={"k": 4}), plain_chat).invoke(QUESTION)


async def test_chains_stream_in_pieces_and_report_events(shape: Callable[..., Any], engine: TransformersEngine) -> None:
    chain = shape(SHAPES["lcel_join"], ChatCacheBlend(engine=engine, max_tokens=MAX_TOKENS, ratio=1.0))
    whole = chain.invoke(QUESTION)
    assert "".join(chain.stream(QUESTION)) == whole
    assert "".join([piece async for piece in chain.astream(QUESTION)]) == whole
    engine.reset_prefix_cache()
    events = [event async for event in chain.astream_events(QUESTION, version="v2")]
    tokens = [event["data"]["chunk"].text for event in events if event["event"] == "on_chat_model_stream"]
    assert "".join(tokens) == whole
    (end,) = [event for event in events if event["event"] == "on_chat_model_end"]
    assert end["data"]["output"].usage_metadata["input_token_details"]["recomputed"] > 0
    assert any(event["event"] == "on_retriever_end" for event in events)


async def test_concurrent_questions_get_the_same_answers_as_successive_ones(
    shape: Callable[..., Any], engine: TransformersEngine, retriever: CacheBlendRetriever
) -> None:
    chain = shape(SHAPES["lcel_join"], ChatCacheBlend(engine=engine, max_tokens=MAX_TOKENS))
    questions = [asked.question for asked in bundled_questions()]
    one_by_one = [await chain.ainvoke(question) for question in questions]
    assert len(questions) == 20
    assert await asyncio.gather(*map(chain.ainvoke, questions)) == one_by_one
