"""Gives LlamaIndex's response synthesizers the exact chunks of their prompts: `CacheBlendSynthesizer`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

from llama_index.core.base.response.schema import RESPONSE_TYPE
from llama_index.core.callbacks.base import CallbackManager
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.response_synthesizers import BaseSynthesizer, ResponseMode, get_response_synthesizer
from llama_index.core.schema import NodeWithScore, QueryType
from llama_index.core.types import RESPONSE_TEXT_TYPE

from cacheblend_rag import BlendEngine
from llama_index_cacheblend.defaults import llm_for, other_options
from llama_index_cacheblend.llm import CacheBlendLLM
from llama_index_cacheblend.nodes import register_nodes
from llama_index_cacheblend.prompt_helper import ChunkPreservingPromptHelper
from llama_index_cacheblend.templates import qa_template
from llama_index_cacheblend.watch import note_instead

USAGE_KEY = "cacheblend"
"""Key of a response's `metadata` for the `raw` of each LLM call, in order."""


class _Prepared(NamedTuple):
    """Holds a synthesizer for some nodes only, and the list that its calls append their usage to."""

    synthesizer: BaseSynthesizer
    calls: list[dict[str, Any]]


class CacheBlendSynthesizer(BaseSynthesizer):
    """Synthesizes as LlamaIndex does (compact, refine, tree_summarize, accumulate...), with the nodes' KV.

    Other synthesizers pass only strings to their LLM; this synthesizer also names the chunks of its nodes. The LLM
    searches for these chunks before any other registered chunk, and prompts are packed without cutting through them.
    ``response.metadata["cacheblend"]`` reports the reuse of each LLM call (in a streamed response, after the stream has
    been read).

    Example:
        Build a query engine from a retriever and this synthesizer::

            synthesizer = CacheBlendSynthesizer(engine, response_mode="tree_summarize")
            query_engine = RetrieverQueryEngine.from_args(index.as_retriever(), response_synthesizer=synthesizer)
    """

    def __init__(
        self,
        engine: BlendEngine | None = None,
        *,
        llm: CacheBlendLLM | None = None,
        response_mode: ResponseMode | str = ResponseMode.COMPACT,
        text_qa_template: BasePromptTemplate | None = None,
        summary_template: BasePromptTemplate | None = None,
        prompt_helper: Any = None,
        callback_manager: CallbackManager | None = None,
        streaming: bool = False,
        **options: Any,
    ) -> None:
        """Set up a synthesizer.

        Args:
            engine: The engine that answers; None takes the LLM's, else that of `Settings.llm`.
            llm: An LLM with this engine; None takes `Settings.llm` if it has this engine, else a new LLM with default
                options.
            response_mode: One of LlamaIndex's response modes.
            text_qa_template: None takes :func:`qa_template` and not LlamaIndex's, which puts other text before the
                first chunk.
            summary_template: For `tree_summarize`; None takes :func:`qa_template`, too.
            prompt_helper: None takes :class:`ChunkPreservingPromptHelper`.
            callback_manager: LlamaIndex's callback manager.
            streaming: Whether responses are streamed.
            options: Other arguments of LlamaIndex's `get_response_synthesizer` (``refine_template``,
                ``output_cls``...), and options of the LLM (``max_tokens``, ``ratio``...), which override the LLM's own.

        Raises:
            InputError: No engine is found, the LLM has another engine, or an option of the LLM is out of range.
        """
        # The synthesizer registers the nodes, so the LLM need not watch retrievers.
        self._own = llm_for(engine, llm, type(self).__name__, options, watch=False)
        options = other_options(options)
        helper = prompt_helper or ChunkPreservingPromptHelper.of(self._own)
        self._options: dict[str, Any] = {
            "response_mode": ResponseMode(response_mode),
            "text_qa_template": text_qa_template or qa_template(),
            "summary_template": summary_template or qa_template(),
            "prompt_helper": helper,
            "callback_manager": callback_manager,
            "streaming": streaming,
            **options,
        }
        super().__init__(
            llm=self._own,
            callback_manager=callback_manager,
            prompt_helper=helper,
            streaming=streaming,
            output_cls=options.get("output_cls"),
        )
        self._prototype = get_response_synthesizer(llm=self._own, **self._options)

    @property
    def engine(self) -> BlendEngine:
        """Return the engine that answers."""
        return self._own.engine

    def _get_prompts(self) -> dict[str, Any]:
        return dict(self._prototype._get_prompts())

    def _update_prompts(self, prompts: dict[str, Any]) -> None:
        self._prototype._update_prompts(prompts)

    def _prepare(self, nodes: Sequence[NodeWithScore]) -> _Prepared:
        calls: list[dict[str, Any]] = []
        note_instead(nodes)
        llm = self._own.holding(register_nodes(self.engine, nodes), calls)
        inner = get_response_synthesizer(llm=llm, **{**self._options, "callback_manager": self._callback_manager})
        inner._update_prompts(self._prototype._get_prompts())
        return _Prepared(inner, calls)

    def synthesize(
        self,
        query: QueryType,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TYPE:
        """Answer from ``nodes``."""
        prepared = self._prepare(nodes)
        response = prepared.synthesizer.synthesize(query, nodes, additional_source_nodes, **response_kwargs)
        return _with_usage(response, prepared.calls)

    async def asynthesize(
        self,
        query: QueryType,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TYPE:
        """Answer asynchronously; see :meth:`synthesize`. Nodes are tokenised off the event loop."""
        prepared = await asyncio.to_thread(self._prepare, nodes)
        response = await prepared.synthesizer.asynthesize(query, nodes, additional_source_nodes, **response_kwargs)
        return _with_usage(response, prepared.calls)

    def get_response(self, query_str: str, text_chunks: Sequence[str], **response_kwargs: Any) -> RESPONSE_TEXT_TYPE:
        """Answer from strings, as every synthesizer does; chunks are found by content alone."""
        return self._prototype.get_response(query_str, text_chunks, **response_kwargs)

    async def aget_response(
        self, query_str: str, text_chunks: Sequence[str], **response_kwargs: Any
    ) -> RESPONSE_TEXT_TYPE:
        """Answer asynchronously; see :meth:`get_response`."""
        return await self._prototype.aget_response(query_str, text_chunks, **response_kwargs)


def _with_usage(response: RESPONSE_TYPE, calls: list[dict[str, Any]]) -> RESPONSE_TYPE:
    if response.metadata is not None:
        response.metadata[USAGE_KEY] = calls
    return response
