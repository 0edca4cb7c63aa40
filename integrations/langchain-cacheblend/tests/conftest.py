"""One engine, one embedding model and one indexed corpus for all tests of a session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from langchain_core.documents import Document
from transformers import AutoModelForCausalLM, AutoTokenizer

from cacheblend_rag import BlendEngine, TransformersEngine, bundled_corpus
from langchain_cacheblend import BundledEmbeddings, CacheBlendRetriever, ChunkSplitter

from fixtures import _blends, one_engine, real_gain  # noqa: F401
from plain import BUNDLED, PlainChat, PlainLLM
from scripted import ScriptedEngine
from taught import teach, transcript
from tested_engine import engine_of

MAX_TOKENS = 10


@pytest.fixture(scope="session")
def engine() -> Iterator[BlendEngine]:
    """The bundled model, on the engine that ``CACHEBLEND_TEST_ENGINE`` names."""
    with engine_of() as engine:
        yield engine


@pytest.fixture(scope="session")
def taught_engine(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Iterator[BlendEngine]:
    """Return a model trained to repeat the scripted engine's answers; one process trains it for all."""
    shared = tmp_path_factory.getbasetemp()
    shared = shared if worker_id == "master" else shared.parent
    directory = shared / "taught"
    with FileLock(f"{directory}.lock"):
        if not directory.exists():
            teach(transcript(shared / "transcript.jsonl"), shared / "learning")
            (shared / "learning").rename(directory)
    with engine_of(str(directory)) as engine:
        yield engine


@pytest.fixture(scope="session")
def sources() -> list[Document]:
    """Return the beginning of each document of the corpus."""
    files = sorted(Path(bundled_corpus()).iterdir())
    return [Document(page_content=file.read_text()[:4000], metadata={"source": file.name}) for file in files]


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
    """Load the bundled model and its tokenizer by transformers."""
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
