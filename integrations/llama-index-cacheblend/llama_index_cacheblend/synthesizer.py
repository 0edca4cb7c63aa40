"""Tells LlamaIndex's response synthesizers exactly which chunks their prompts hold: `CacheBlendSynthesizer`."""

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
"""Key of a response's `metadata` under which the `raw` of each LLM call is found, in order."""


class _Prepared(NamedTuple):
    """A synthesizer for some nodes alone, and where the usage of its calls will be."""

    synthesizer: BaseSynthesizer
    calls: list[dict[str, Any]]


class CacheBlendSynthesizer(BaseSynthesizer):
    """Synthesizes as LlamaIndex does (compact, refine, tree_summarize, accumulate...), with the nodes' KV.

    A synthesizer passes strings to its LLM; this one knows the nodes they come from. Their chunks are looked for before any other
    registered chunk, prompts are packed without cutting through them, and ``response.metadata["cacheblend"]`` says what each LLM
    call reused (of a streamed response: once it has been read).
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
            engine: The model; None takes the LLM's, else that of `Settings.llm`.
            llm: An LLM of that engine; None takes `Settings.llm` where it has that engine, else one with the defaults.
            response_mode: One of LlamaIndex's.
            text_qa_template: None takes :func:`qa_template`, not LlamaIndex's, which puts other text before the first chunk.
            summary_template: For `tree_summarize`; None takes :func:`qa_template`, too.
            prompt_helper: None takes :class:`ChunkPreservingPromptHelper`.
            callback_manager: LlamaIndex's.
            streaming: Whether responses are streamed.
            options: What else LlamaIndex's `get_response_synthesizer` takes (``refine_template``, ``output_cls``...), and
                options of the LLM (``max_tokens``, ``ratio``...), which go before its own.

        Raises:
            InputError: No engine, an LLM of another engine, or an option of the LLM out of range.
        """
        # The nodes are registered here, so nothing need be overheard.
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
        """Return the model."""
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
        """Async twin of :meth:`synthesize`; nodes are tokenised off the event loop."""
        prepared = await asyncio.to_thread(self._prepare, nodes)
        response = await prepared.synthesizer.asynthesize(query, nodes, additional_source_nodes, **response_kwargs)
        return _with_usage(response, prepared.calls)

    def get_response(self, query_str: str, text_chunks: Sequence[str], **response_kwargs: Any) -> RESPONSE_TEXT_TYPE:
        """Answer from strings, as every synthesizer; their chunks are found by content alone."""
        return self._prototype.get_response(query_str, text_chunks, **response_kwargs)

    async def aget_response(
        self, query_str: str, text_chunks: Sequence[str], **response_kwargs: Any
    ) -> RESPONSE_TEXT_TYPE:
        """Async twin of :meth:`get_response`."""
        return await self._prototype.aget_response(query_str, text_chunks, **response_kwargs)


def _with_usage(response: RESPONSE_TYPE, calls: list[dict[str, Any]]) -> RESPONSE_TYPE:
    if response.metadata is not None:
        response.metadata[USAGE_KEY] = calls
    return response
