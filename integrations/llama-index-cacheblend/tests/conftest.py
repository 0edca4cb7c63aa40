"""One bundled model for all tests, and the demo corpus as LlamaIndex nodes."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Callable, Iterator
from functools import partial

import llama_index.core
import pytest
from fixtures import _blends, one_engine, real_gain  # noqa: F401
from llama_index.core import Document, Settings, VectorStoreIndex
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import BaseNode
from plain import PlainLLM
from tested_engine import engine_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from cacheblend_rag import BlendEngine, bundled_corpus
from cacheblend_rag.frameworks import encoder_for
from llama_index_cacheblend import BundledEmbedding, precompute_nodes

pytest.register_assert_rewrite("llm_contract_answers", "llm_contract_running")


@pytest.fixture(scope="session")
def engine() -> Iterator[BlendEngine]:
    """The bundled model, on the engine that ``CACHEBLEND_TEST_ENGINE`` names."""
    with engine_of() as engine:
        yield engine


@pytest.fixture(scope="session")
def plain() -> Callable[..., PlainLLM]:
    """Make an LLM of the same weights, loaded by transformers without this library."""
    directory = bundled_corpus().parent / "model"
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="float32").eval()
    return partial(PlainLLM, model, AutoTokenizer.from_pretrained(directory))


@pytest.fixture(scope="session")
def embedding() -> BundledEmbedding:
    return BundledEmbedding(device="cpu")


@pytest.fixture(scope="session")
def documents() -> list[Document]:
    """Return the first part of two documents of the corpus."""
    return [
        Document(text=path.read_text(encoding="utf-8")[:6000], metadata={"file_name": path.name})
        for path in sorted(bundled_corpus().iterdir())[:2]
    ]


@pytest.fixture(scope="session")
def nodes(engine: BlendEngine, documents: list[Document]) -> list[BaseNode]:
    splitter = SentenceSplitter(
        chunk_size=200, chunk_overlap=0, tokenizer=encoder_for(engine.tokenizer).document, include_prev_next_rel=True
    )
    nodes = splitter.get_nodes_from_documents(documents)
    precompute_nodes(engine, nodes)
    return nodes


@pytest.fixture(scope="session")
def index(nodes: list[BaseNode], embedding: BundledEmbedding) -> VectorStoreIndex:
    return VectorStoreIndex(nodes, embed_model=embedding)


@pytest.fixture(autouse=True)
def untouched_globals() -> Iterator[None]:
    """Reset LlamaIndex's global settings: every test starts and ends without any."""
    names = ("_llm", "_embed_model", "_prompt_helper", "_chat_prompt_helper", "_callback_manager", "_node_parser")
    saved = {name: getattr(Settings, name) for name in names if hasattr(Settings, name)}
    tokenizer, handlers = llama_index.core.global_tokenizer, list(get_dispatcher().event_handlers)
    yield
    for name, value in saved.items():
        setattr(Settings, name, value)
    llama_index.core.global_tokenizer = tokenizer
    get_dispatcher().event_handlers[:] = handlers
