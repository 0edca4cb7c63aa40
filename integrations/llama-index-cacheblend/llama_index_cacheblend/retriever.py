"""Makes retrieved chunks known to the engine: around a retriever, or as the last node postprocessor."""

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
    """Passes a retriever's nodes on, unchanged, registers them with the engine, and reads their stored KV ahead.

    Without an engine it is that of `Settings.llm` at the time of a query; if that is none of ours, registering is left to the
    :class:`CacheBlendSynthesizer` or the LLM.
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
            engine: The model; see above for None.
            prefetch: Whether to read stored KV ahead, in the background.
            callback_manager: None takes that of ``base``.
        """
        self._base, self._engine, self._prefetch = base, engine, prefetch
        super().__init__(callback_manager=callback_manager or base.callback_manager)

    @property
    def base(self) -> BaseRetriever:
        """Return the retriever that does the work."""
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
    """Registers nodes as the other postprocessors left them; put it last.

    Postprocessors that replace or cut a node's text (sentence windows, optimizers) make texts no retriever has seen. Without this
    one they are ordinary prefill.

    Attributes:
        engine: The model; None takes that of `Settings.llm` at the time of a query.
    """

    engine: BlendEngine | None = Field(default=None, exclude=True)

    def __init__(self, engine: BlendEngine | None = None, **kwargs: Any) -> None:
        """Register with ``engine``."""
        super().__init__(**{"engine": engine, **kwargs})

    @classmethod
    def class_name(cls) -> str:
        """Return the name LlamaIndex knows the class by."""
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
        """Refuse to be pickled with a model inside."""
        if self.engine is not None:
            refuse_unpicklable(self.engine, type(self).__name__)
        return super().__getstate__()
