"""Wraps a retriever so that the engine knows the documents it returns."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.retrievers import BaseRetriever, LangSmithRetrieverParams, RetrieverLike
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore
from pydantic import ConfigDict, Field

from cacheblend_rag import BlendEngine, InputError, PrecomputeReport
from cacheblend_rag.frameworks import read_ahead, uses_of
from langchain_cacheblend.documents import BundledEmbeddings, precompute

_RUNS = ("invoke", "ainvoke")
"""Methods that, if a retriever overrides them, do more than call the retriever's search."""


class CacheBlendRetriever(BaseRetriever):
    """Wraps any retriever: returns the same documents, and the engine can find them in the prompt that follows.

    Returned documents are registered with the engine, so that the LLM recognises them by content wherever they stand
    whole, and their stored KV is read ahead. Chunks without stored KV are computed in the prompt and stored for the
    next prompt; :meth:`precompute` computes them beforehand.

    Attributes:
        base_retriever: Any retriever, or other runnable from a question to documents.
        engine: The engine that answers; not closed and never serialised by the retriever.
        k: Most documents to return; None returns as many as the base. ``invoke(question, k=...)`` overrides it.
        prefetch: Whether to read the stored KV of returned documents ahead, in the background.

    Example:
        Wrap an existing retriever::

            retriever = CacheBlendRetriever(base_retriever=your_retriever, engine=engine)
            documents = retriever.invoke("Who is the captain?")
    """

    base_retriever: RetrieverLike
    engine: BlendEngine = Field(exclude=True, repr=False)
    k: int | None = Field(default=None, ge=1)
    prefetch: bool = True

    model_config = ConfigDict(arbitrary_types_allowed=True)

    @classmethod
    def from_documents(
        cls,
        documents: Sequence[Document],
        engine: BlendEngine,
        *,
        embedding: Embeddings | None = None,
        query_encoder: str | Path | None = None,
        k: int = 6,
    ) -> CacheBlendRetriever:
        """Return a retriever over ``documents``, each one chunk (split long documents first), and precompute their KV.

        Args:
            documents: Chunks, for instance from :class:`~langchain_cacheblend.ChunkSplitter`.
            engine: The engine that answers.
            embedding: Embedding of documents and questions; None takes the model that comes with ``cacheblend-rag``.
            query_encoder: Directory that `cacheblend tune-retriever` has made for that model: it embeds the questions.
            k: Most documents to return.

        Raises:
            InputError: Both ``embedding`` and ``query_encoder`` are given; give the query encoder to
                ``BundledEmbeddings`` instead.
        """
        if embedding is not None and query_encoder is not None:
            raise InputError("Give the query encoder to the embedding: BundledEmbeddings(name, query_encoder=DIR).")
        store = InMemoryVectorStore(embedding or BundledEmbeddings(query_encoder=query_encoder))
        store.add_documents(list(documents))
        retriever = cls.from_vectorstore(store, engine, k=k)
        retriever.precompute(documents)
        return retriever

    @classmethod
    def from_vectorstore(
        cls, vectorstore: VectorStore, engine: BlendEngine, *, k: int | None = None, **kwargs: Any
    ) -> CacheBlendRetriever:
        """Return a retriever over a filled vector store; ``kwargs`` are passed to ``as_retriever``."""
        return cls(base_retriever=vectorstore.as_retriever(**kwargs), engine=engine, k=k)

    def precompute(self, documents: Sequence[Document]) -> PrecomputeReport:
        """Compute and store the KV of documents that will be retrieved, unchanged.

        Documents longer than the context window are left out. If the store fails, a warning is issued, and prompts
        compute the missing KV.
        """
        return precompute(self.engine, uses_of(self.engine).register(self.engine, _texts(documents)))

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        passed, base = self._base_arguments(kwargs, "_get_relevant_documents"), self._same_run()
        if base is not None:
            found = base._get_relevant_documents(query, run_manager=run_manager, **_taken(base, passed))
        else:
            found = self.base_retriever.invoke(query, {"callbacks": run_manager.get_child()}, **passed)
        return self._register(found, kwargs)

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        passed, base = self._base_arguments(kwargs, "_aget_relevant_documents"), self._same_run()
        if base is not None:
            found = await base._aget_relevant_documents(query, run_manager=run_manager, **_taken(base, passed))
        else:
            found = await self.base_retriever.ainvoke(query, {"callbacks": run_manager.get_child()}, **passed)
        return await asyncio.to_thread(self._register, found, kwargs)

    def _same_run(self) -> BaseRetriever | None:
        """Return the base if it can run within this retriever's run; two runs would appear twice in callbacks."""
        base = self.base_retriever
        if not isinstance(base, BaseRetriever) or not base._new_arg_supported:
            return None
        return base if all(getattr(type(base), name) is getattr(BaseRetriever, name) for name in _RUNS) else None

    def _get_ls_params(self, **kwargs: Any) -> LangSmithRetrieverParams:
        base = self._same_run()  # with one run for both, the trace shows which store was searched
        return super()._get_ls_params(**kwargs) if base is None else base._get_ls_params(**kwargs)

    def _base_arguments(self, kwargs: dict[str, Any], method: str) -> dict[str, Any]:
        """Return the arguments for the base: all of them, and ``k`` if the base takes it."""
        rest = {name: value for name, value in kwargs.items() if name != "k"}
        k = kwargs.get("k", self.k)
        return rest if k is None or not _takes_k(self.base_retriever, method) else {**rest, "k": k}

    def _register(self, found: Sequence[Document], kwargs: dict[str, Any]) -> list[Document]:
        documents = list(found)[: kwargs.get("k", self.k)]
        chunks = uses_of(self.engine).register(self.engine, _texts(documents))
        if self.prefetch:
            read_ahead(self.engine, chunks)
        return documents


def _taken(base: BaseRetriever, arguments: dict[str, Any]) -> dict[str, Any]:
    return arguments if base._expects_other_args else {}


def _texts(documents: Sequence[Document]) -> list[str]:
    return [document.page_content for document in documents]


def _takes_k(retriever: RetrieverLike, method: str) -> bool:
    # Check the method that will run: a retriever's sync and async methods need not take the same arguments.
    if not isinstance(retriever, BaseRetriever):
        return False
    parameters = inspect.signature(getattr(type(retriever), method)).parameters.values()
    return any(p.name == "k" or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
