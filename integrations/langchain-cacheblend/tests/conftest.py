"""One engine, one embedding model and one indexed corpus for all tests of a session."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.documents import Document
from transformers import AutoModelForCausalLM, AutoTokenizer

from cacheblend_rag import BlendEngine, RemoteEngine, TransformersEngine, bundled_corpus
from langchain_cacheblend import BundledEmbeddings, CacheBlendRetriever, ChunkSplitter

from plain import BUNDLED, PlainChat, PlainLLM
from scripted import ScriptedEngine

MAX_TOKENS = 10


@pytest.fixture(scope="session")
def engine() -> Iterator[BlendEngine]:
    """The bundled model: on transformers, or with ``CACHEBLEND_TEST_ENGINE`` on vLLM ("vllm") or a server (its address)."""
    where = os.environ.get("CACHEBLEND_TEST_ENGINE", "")
    if where.startswith("http"):
        made: BlendEngine = RemoteEngine(where)
    elif where == "vllm":
        from cacheblend_rag import VLLMEngine

        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        made = VLLMEngine()
    else:
        made = TransformersEngine()
    with made as engine:
        yield engine


@pytest.fixture(scope="session")
def sources() -> list[Document]:
    """The first part of each document of the corpus."""
    files = sorted(Path(bundled_corpus()).iterdir())
    return [Document(page_content=file.read_text()[:6000], metadata={"source": file.name}) for file in files]


@pytest.fixture(scope="session")
def chunks(engine: BlendEngine, sources: list[Document]) -> list[Document]:
    return ChunkSplitter(engine, 160).split_documents(sources)


@pytest.fixture(scope="session")
def embedding() -> BundledEmbeddings:
    return BundledEmbeddings()


@pytest.fixture(scope="session")
def retriever(engine: TransformersEngine, chunks: list[Document], embedding: BundledEmbeddings) -> CacheBlendRetriever:
    return CacheBlendRetriever.from_documents(chunks, engine, embedding=embedding, k=4)


@pytest.fixture(scope="session")
def weights() -> dict[str, Any]:
    """The bundled model and its tokenizer as transformers loads them."""
    model = AutoModelForCausalLM.from_pretrained(BUNDLED, dtype="float32").eval()
    return {"model": model, "tokenizer": AutoTokenizer.from_pretrained(BUNDLED), "max_tokens": MAX_TOKENS}


@pytest.fixture(scope="session")
def plain_chat(weights: dict[str, Any]) -> PlainChat:
    return PlainChat(**weights)


@pytest.fixture(scope="session")
def plain_llm(weights: dict[str, Any]) -> PlainLLM:
    return PlainLLM(**weights)


@pytest.fixture
def scripted() -> ScriptedEngine:
    return ScriptedEngine()
