"""Builds query and chat engines from documents or an index: `CacheBlendQueryEngine`, `CacheBlendChatEngine`."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any, Self, TypeVar

from llama_index.core import VectorStoreIndex
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.chat_engine import CondensePlusContextChatEngine
from llama_index.core.chat_engine.types import AgentChatResponse, StreamingAgentChatResponse
from llama_index.core.indices.base import BaseIndex
from llama_index.core.ingestion import run_transformations
from llama_index.core.memory import Memory
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import CompactAndRefine
from llama_index.core.schema import Document, TransformComponent
from llama_index.core.settings import Settings

from cacheblend_rag import BlendEngine, InputError
from cacheblend_rag.frameworks import DEFAULT_CHUNK_TOKENS, DEFAULT_INSTRUCTION
from llama_index_cacheblend.defaults import llm_for, other_options
from llama_index_cacheblend.embedding import BundledEmbedding
from llama_index_cacheblend.llm import CacheBlendLLM
from llama_index_cacheblend.nodes import precompute_nodes
from llama_index_cacheblend.prompt_helper import ChunkPreservingPromptHelper
from llama_index_cacheblend.requests import listed
from llama_index_cacheblend.retriever import CacheBlendRetriever
from llama_index_cacheblend.synthesizer import USAGE_KEY, CacheBlendSynthesizer
from llama_index_cacheblend.templates import qa_template

_TOP_K = 6
_Response = TypeVar("_Response", AgentChatResponse, StreamingAgentChatResponse)


class CacheBlendQueryEngine(RetrieverQueryEngine):
    """Answers questions: its retriever registers chunks, and its synthesizer reuses their KV.

    ``response.metadata["cacheblend"]`` reports the reuse of each LLM call.

    Example:
        Index documents and ask a question::

            query_engine = CacheBlendQueryEngine.from_documents(documents, engine=engine)
            response = query_engine.query("Who is the captain?")
    """

    @classmethod
    def from_documents(
        cls,
        documents: Sequence[Document],
        *,
        engine: BlendEngine | None = None,
        llm: CacheBlendLLM | None = None,
        embed_model: BaseEmbedding | None = None,
        transformations: Sequence[TransformComponent] | None = None,
        chunk_size: int = DEFAULT_CHUNK_TOKENS,
        precompute: bool = True,
        show_progress: bool = False,
        **options: Any,
    ) -> Self:
        """Split, precompute and index documents in memory.

        Args:
            documents: Documents to answer from.
            engine: The engine that answers; see :meth:`from_index`.
            llm: The LLM; see :meth:`from_index`.
            embed_model: None takes `Settings.embed_model` if you set one, else :class:`BundledEmbedding`.
            transformations: None splits at sentence ends into chunks of ``chunk_size`` of the model's tokens, without
                overlap.
            chunk_size: Most tokens of a chunk, metadata included.
            precompute: Compute all KV now; otherwise each chunk's KV is computed with the first prompt that needs it.
            show_progress: Show LlamaIndex's progress bars.
            options: Options of :meth:`from_index` (``similarity_top_k``, ``response_mode``, ``max_tokens``...).
        """
        own = llm_for(engine, llm, cls.__name__, options, watch=False)
        if transformations is None:
            transformations = [SentenceSplitter(chunk_size=chunk_size, chunk_overlap=0, tokenizer=own.tokenizer)]
        nodes = run_transformations(list(documents), transformations, show_progress=show_progress)
        if not nodes:
            raise InputError("There is nothing to index: the documents hold no text.")
        if precompute:
            precompute_nodes(own.engine, nodes)
        embedding = embed_model or Settings._embed_model or BundledEmbedding()
        index = VectorStoreIndex(list(nodes), embed_model=embedding, show_progress=show_progress)
        return cls.from_index(index, llm=own, **other_options(options))

    @classmethod
    def from_index(
        cls,
        index: BaseIndex[Any],
        *,
        engine: BlendEngine | None = None,
        llm: CacheBlendLLM | None = None,
        similarity_top_k: int = _TOP_K,
        retriever_kwargs: dict[str, Any] | None = None,
        node_postprocessors: list[BaseNodePostprocessor] | None = None,
        **options: Any,
    ) -> Self:
        """Return a query engine over an existing index.

        The KV of its nodes comes from the engine's store; missing KV is computed with the first prompt that needs it.

        Args:
            index: Any LlamaIndex index.
            engine: The engine that answers; None takes the LLM's, else that of `Settings.llm`.
            llm: The LLM; see :class:`CacheBlendSynthesizer`.
            similarity_top_k: Number of chunks retrieved for a question.
            retriever_kwargs: Arguments of ``index.as_retriever`` (filters, modes...).
            node_postprocessors: LlamaIndex's node postprocessors.
            options: Options of :class:`CacheBlendSynthesizer` (``response_mode``, ``streaming``,
                ``text_qa_template``...), and of the LLM (``max_tokens``, ``ratio``...).
        """
        synthesizer = CacheBlendSynthesizer(engine, llm=llm, **options)
        base = index.as_retriever(**{"similarity_top_k": similarity_top_k, **(retriever_kwargs or {})})
        return cls(
            retriever=CacheBlendRetriever(base, synthesizer.engine),
            response_synthesizer=synthesizer,
            node_postprocessors=node_postprocessors,
        )


class CacheBlendChatEngine(CondensePlusContextChatEngine):
    """Chats over retrieved chunks like LlamaIndex's condense-plus-context engine; prompts never cut through chunks.

    Chunks stand behind the earlier conversation, with the question. So the conversation is a prefix of every later
    prompt, and is not computed again. With a ``context_prompt`` of yours, the chunks stand in the system message, as in
    LlamaIndex.

    Example:
        Chat over an index::

            chat_engine = CacheBlendChatEngine.from_index(index, engine=engine)
            answer = chat_engine.chat("Who is the captain?")
    """

    _chunks_last = False

    @classmethod
    def from_retriever(
        cls,
        retriever: BaseRetriever,
        *,
        engine: BlendEngine | None = None,
        llm: CacheBlendLLM | None = None,
        **options: Any,
    ) -> Self:
        """Return a chat engine over a retriever.

        Args:
            retriever: Any retriever.
            engine: The engine that answers, unless an LLM is given.
            llm: None takes `Settings.llm` if it has this engine or no engine is given, else makes an LLM of ``engine``.
            options: Options of LlamaIndex's `from_defaults`, and of the LLM (``max_tokens``, ``ratio``...), which
                override the LLM's own.

        Raises:
            InputError: No engine is found, the LLM has another engine, or an option does not exist or is out of range.
        """
        own, options = llm_for(engine, llm, cls.__name__, options), other_options(options)
        if unknown := set(options) - set(inspect.signature(cls.from_defaults).parameters):  # from_defaults ignores them
            raise InputError(f"{cls.__name__} takes no {listed(unknown)}.")
        options["memory"] = options.get("memory") or _memory(own, options.get("chat_history"))
        made = cls.from_defaults(CacheBlendRetriever(retriever, own.engine), own, **options)
        assert isinstance(made, cls)
        made._chunks_last = options.get("context_prompt") is None
        return made

    @classmethod
    def from_index(cls, index: BaseIndex[Any], *, similarity_top_k: int = _TOP_K, **options: Any) -> Self:
        """Return a chat engine over an index; ``options`` are the options of :meth:`from_retriever`."""
        return cls.from_retriever(index.as_retriever(similarity_top_k=similarity_top_k), **options)

    def _get_response_synthesizer(self, chat_history: list[ChatMessage], streaming: bool = False) -> CompactAndRefine:
        synthesizer = super()._get_response_synthesizer(chat_history, streaming)
        if self._chunks_last:
            instruction = "\n\n".join([DEFAULT_INSTRUCTION, *([self._system_prompt] if self._system_prompt else [])])
            synthesizer.update_prompts({"text_qa_template": qa_template(instruction, chat_history)})
        if isinstance(self._llm, CacheBlendLLM):
            synthesizer._prompt_helper = ChunkPreservingPromptHelper.of(self._llm)
        return synthesizer

    def _recorded(self, calls: list[dict[str, Any]]) -> Self:
        """Return this chat engine, memory included, with an LLM that appends the `raw` of each call to ``calls``."""
        recorded = copy.copy(self)
        if isinstance(self._llm, CacheBlendLLM):
            recorded._llm = self._llm.holding((), calls)
        return recorded

    def chat(self, message: str, chat_history: list[ChatMessage] | None = None) -> AgentChatResponse:
        """Answer; ``metadata["cacheblend"]`` has the `raw` of each LLM call in order, the condensing call included."""
        calls: list[dict[str, Any]] = []
        answer: AgentChatResponse = super(CacheBlendChatEngine, self._recorded(calls)).chat(message, chat_history)
        return _with_usage(answer, calls)

    async def achat(self, message: str, chat_history: list[ChatMessage] | None = None) -> AgentChatResponse:
        """Answer asynchronously; see :meth:`chat`."""
        calls: list[dict[str, Any]] = []
        answer: AgentChatResponse = await super(CacheBlendChatEngine, self._recorded(calls)).achat(
            message, chat_history
        )
        return _with_usage(answer, calls)

    def stream_chat(self, message: str, chat_history: list[ChatMessage] | None = None) -> StreamingAgentChatResponse:
        """Answer piece by piece; after the stream is read, ``metadata`` holds the same facts as for :meth:`chat`."""
        calls: list[dict[str, Any]] = []
        answer: StreamingAgentChatResponse = super(CacheBlendChatEngine, self._recorded(calls)).stream_chat(
            message, chat_history
        )
        return _with_usage(answer, calls)

    async def astream_chat(
        self, message: str, chat_history: list[ChatMessage] | None = None
    ) -> StreamingAgentChatResponse:
        """Answer piece by piece, asynchronously; see :meth:`stream_chat`."""
        calls: list[dict[str, Any]] = []
        recorded = self._recorded(calls)
        answer: StreamingAgentChatResponse = await super(CacheBlendChatEngine, recorded).astream_chat(
            message, chat_history
        )
        return _with_usage(answer, calls)


def _memory(llm: CacheBlendLLM, history: list[ChatMessage] | None) -> Memory:
    """Return a memory that leaves room for chunks; LlamaIndex's default memory may fill the whole window."""
    limit = (llm.metadata.context_window - llm.metadata.num_output) // 2
    return Memory.from_defaults(
        chat_history=history or [], token_limit=max(1, limit), token_flush_size=max(1, limit // 4)
    )


def _with_usage(response: _Response, calls: list[dict[str, Any]]) -> _Response:
    vars(response)["metadata"] = {USAGE_KEY: calls}  # LlamaIndex's streamed response lacks this field
    return response
