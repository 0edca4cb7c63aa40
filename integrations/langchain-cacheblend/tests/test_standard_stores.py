"""LangChain's standard tests of retrievers and vector stores."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore
from langchain_tests.integration_tests import RetrieversIntegrationTests, VectorStoreIntegrationTests

from cacheblend_rag import TransformersEngine
from langchain_cacheblend import BundledEmbeddings, CacheBlendRetriever, CacheBlendVectorStore

from scripted import ScriptedEngine


class TestRetriever(RetrieversIntegrationTests):
    @pytest.fixture(autouse=True)
    def _base(self, engine: TransformersEngine, chunks: list[Document], embedding: BundledEmbeddings) -> None:
        store = InMemoryVectorStore(embedding)
        store.add_documents(chunks[:8])
        self.params = {"base_retriever": store.as_retriever(), "engine": engine}

    @property
    def retriever_constructor(self) -> type[CacheBlendRetriever]:
        return CacheBlendRetriever

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        return self.params

    @property
    def retriever_query_example(self) -> str:
        return "Who founded the company?"


class TestVectorStore(VectorStoreIntegrationTests):
    @pytest.fixture
    def vectorstore(self, engine: TransformersEngine) -> VectorStore:
        return CacheBlendVectorStore(base=InMemoryVectorStore(self.get_embeddings()), engine=engine)


class TestVectorStoreWithoutModel(VectorStoreIntegrationTests):
    @pytest.fixture
    def vectorstore(self, scripted: ScriptedEngine) -> VectorStore:
        return CacheBlendVectorStore(base=InMemoryVectorStore(self.get_embeddings()), engine=scripted)
