"""Registers retrieved chunks with the engine: around a retriever, or as the last node postprocessor."""

from __future__ import annotations

import asyncio
from typing import Any

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.bridge.pydantic import Field
from llama_index.core.callbacks.base import CallbackManager
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.prompts.mixin import PromptMixinType
from llama_index.core.schema import NodeWithScore, QueryBundle

from cacheblend_rag import BlendEngine
from cacheblend_rag.frameworks import read_ahead
from llama_index_cacheblend.handles import engine_in_settings, refuse_unpicklable
from llama_index_cacheblend.nodes import register_nodes
from llama_index_cacheblend.watch import note_instead


class CacheBlendRetriever(BaseRetriever):
    """Returns a retriever's nodes unchanged, registers them with the engine, and reads their stored KV ahead.

    Without an engine, a query takes the engine of `Settings.llm`. If that LLM is not a CacheBlendLLM, the
    :class:`CacheBlendSynthesizer` or the LLM registers the nodes.

    Example:
        Wrap an index's retriever::

            retriever = CacheBlendRetriever(index.as_retriever(), engine)
            nodes = retriever.retrieve("Who is the captain?")
    """

    def __init__(
        self,
        base: BaseRetriever,
        engine: BlendEngine | None = None,
        *,
        prefetch: bool = True,
        callback_manager: CallbackManager | None = None,
    ) -> None:
        """Wrap ``base``.

        Args:
            base: Any retriever.
            engine: The engine that answers; None takes the engine of `Settings.llm` at each query.
            prefetch: Whether to read stored KV ahead, in the background.
            callback_manager: LlamaIndex's callback manager; None takes the base's.
        """
        self._base, self._engine, self._prefetch = base, engine, prefetch
        super().__init__(callback_manager=callback_manager or base.callback_manager)

    @property
    def base(self) -> BaseRetriever:
        """Return the wrapped retriever."""
        return self._base

    def _get_prompt_modules(self) -> PromptMixinType:
        return {"base": self._base}

    def _register(self, nodes: list[NodeWithScore]) -> list[NodeWithScore]:
        engine = self._engine or engine_in_settings()
        if engine is not None:
            chunks = register_nodes(engine, nodes)
            if self._prefetch:
                read_ahead(engine, chunks)
        return nodes

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return self._register(self._base.retrieve(query_bundle))

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return await asyncio.to_thread(self._register, await self._base.aretrieve(query_bundle))


class CacheBlendPostprocessor(BaseNodePostprocessor):
    """Registers nodes as the other postprocessors left them; put this postprocessor last.

    Postprocessors that replace or cut a node's text (sentence windows, optimizers) make texts that no retriever has
    returned. Without this postprocessor such texts are prefilled.

    Attributes:
        engine: The engine that answers; None takes the engine of `Settings.llm` at each query.

    Example:
        Register the nodes that other postprocessors have cut::

            postprocessors = [your_postprocessor, CacheBlendPostprocessor(engine)]
            query_engine = index.as_query_engine(node_postprocessors=postprocessors)
    """

    engine: BlendEngine | None = Field(default=None, exclude=True)

    def __init__(self, engine: BlendEngine | None = None, **kwargs: Any) -> None:
        """Register with ``engine``."""
        super().__init__(**{"engine": engine, **kwargs})

    @classmethod
    def class_name(cls) -> str:
        """Return LlamaIndex's name for the class."""
        return "CacheBlendPostprocessor"

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        engine = self.engine or engine_in_settings()
        if engine is not None:
            register_nodes(engine, nodes)
        note_instead(nodes)
        return nodes

    def __getstate__(self) -> dict[str, Any]:
        """Raise InputError if the engine cannot be pickled."""
        if self.engine is not None:
            refuse_unpicklable(self.engine, type(self).__name__)
        return super().__getstate__()
