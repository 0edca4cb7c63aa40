"""CacheBlend RAG: reuse every chunk's KV cache at any position, recompute the few tokens that matter."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cacheblend_rag.blending.profile import ModelProfile
    from cacheblend_rag.blending.settings import BlendSettings, Reuse
    from cacheblend_rag.demo.bundle import bundled_corpus, bundled_questions
    from cacheblend_rag.engines.base import BlendEngine
    from cacheblend_rag.engines.remote import RemoteEngine
    from cacheblend_rag.engines.request import Request
    from cacheblend_rag.engines.results import (
        Generation,
        PrecomputeReport,
        Score,
        StreamEvent,
        Timings,
        TokenLogprob,
        Usage,
        openai_logprobs,
    )
    from cacheblend_rag.engines.sampling import (
        DEFAULT_MAX_TOKENS,
        SAMPLING_OPTIONS,
        SamplingParams,
        sampling_of,
        with_usual_names,
    )
    from cacheblend_rag.engines.transformers import TransformersEngine
    from cacheblend_rag.engines.vllm import VLLMEngine
    from cacheblend_rag.errors import (
        AlteredChunkError,
        CacheBlendError,
        InputError,
        ModelError,
        PromptTooLongError,
        ServerError,
        StoreError,
        StoreMismatchError,
        UnknownChunkError,
    )
    from cacheblend_rag.frameworks.altered import RetrievalReport, RetrievedFate, explain_miss
    from cacheblend_rag.frameworks.calls import CallReader, CallsRead, call_schema, required_tool
    from cacheblend_rag.frameworks.existing import ExistingEstimate, estimate_existing, precompute_existing
    from cacheblend_rag.frameworks.misses import OnMiss, checked_on_miss, find_retrieved
    from cacheblend_rag.frameworks.retrieved import RetrievalLog
    from cacheblend_rag.frameworks.sharing import EngineName, shared_engine
    from cacheblend_rag.frameworks.uses import ChunkUses, uses_of
    from cacheblend_rag.prompts.chunk import Chunk, chunk_id, make_chunk
    from cacheblend_rag.prompts.prompt import (
        DEFAULT_INSTRUCTION,
        BlendPrompt,
        ChunkRef,
        ChunkSpan,
        TokenizedPrompt,
        chat_prompt,
        chunk_of,
        header_ids,
        rag_header,
        rag_prompt,
        text_prompt,
    )
    from cacheblend_rag.prompts.registry import ChunkRegistry
    from cacheblend_rag.prompts.templates import reads_tools
    from cacheblend_rag.prompts.tokens import encoder_for
    from cacheblend_rag.rag.pipeline import RagPipeline
    from cacheblend_rag.rag.results import Turn
    from cacheblend_rag.retrieval.chunking import DEFAULT_CHUNK_TOKENS, iter_chunks, split_text
    from cacheblend_rag.retrieval.embedding import DEFAULT_EMBEDDING, Embedder
    from cacheblend_rag.retrieval.index import ChunkIndex
    from cacheblend_rag.store import KVStore, open_store
    from cacheblend_rag.store.kv import ModelFingerprint

__version__ = "0.1.0"

_HOMES = {
    "DEFAULT_CHUNK_TOKENS": "retrieval.chunking",
    "DEFAULT_EMBEDDING": "retrieval.embedding",
    "DEFAULT_INSTRUCTION": "prompts.prompt",
    "DEFAULT_MAX_TOKENS": "engines.sampling",
    "SAMPLING_OPTIONS": "engines.sampling",
    "AlteredChunkError": "errors",
    "BlendEngine": "engines.base",
    "BlendPrompt": "prompts.prompt",
    "BlendSettings": "blending.settings",
    "CacheBlendError": "errors",
    "CallReader": "frameworks.calls",
    "CallsRead": "frameworks.calls",
    "Chunk": "prompts.chunk",
    "ChunkIndex": "retrieval.index",
    "ChunkRef": "prompts.prompt",
    "ChunkRegistry": "prompts.registry",
    "ChunkSpan": "prompts.prompt",
    "ChunkUses": "frameworks.uses",
    "Embedder": "retrieval.embedding",
    "EngineName": "frameworks.sharing",
    "ExistingEstimate": "frameworks.existing",
    "Generation": "engines.results",
    "InputError": "errors",
    "KVStore": "store",
    "ModelError": "errors",
    "ModelFingerprint": "store.kv",
    "ModelProfile": "blending.profile",
    "OnMiss": "frameworks.misses",
    "PrecomputeReport": "engines.results",
    "PromptTooLongError": "errors",
    "RagPipeline": "rag.pipeline",
    "RemoteEngine": "engines.remote",
    "Request": "engines.request",
    "RetrievalLog": "frameworks.retrieved",
    "RetrievalReport": "frameworks.altered",
    "RetrievedFate": "frameworks.altered",
    "Reuse": "blending.settings",
    "SamplingParams": "engines.sampling",
    "Score": "engines.results",
    "ServerError": "errors",
    "StoreError": "errors",
    "StoreMismatchError": "errors",
    "StreamEvent": "engines.results",
    "Timings": "engines.results",
    "TokenLogprob": "engines.results",
    "TokenizedPrompt": "prompts.prompt",
    "TransformersEngine": "engines.transformers",
    "Turn": "rag.results",
    "UnknownChunkError": "errors",
    "Usage": "engines.results",
    "VLLMEngine": "engines.vllm",
    "bundled_corpus": "demo.bundle",
    "bundled_questions": "demo.bundle",
    "call_schema": "frameworks.calls",
    "chat_prompt": "prompts.prompt",
    "checked_on_miss": "frameworks.misses",
    "chunk_id": "prompts.chunk",
    "chunk_of": "prompts.prompt",
    "encoder_for": "prompts.tokens",
    "estimate_existing": "frameworks.existing",
    "explain_miss": "frameworks.altered",
    "find_retrieved": "frameworks.misses",
    "header_ids": "prompts.prompt",
    "iter_chunks": "retrieval.chunking",
    "make_chunk": "prompts.chunk",
    "open_store": "store",
    "openai_logprobs": "engines.results",
    "precompute_existing": "frameworks.existing",
    "rag_header": "prompts.prompt",
    "rag_prompt": "prompts.prompt",
    "reads_tools": "prompts.templates",
    "required_tool": "frameworks.calls",
    "sampling_of": "engines.sampling",
    "shared_engine": "frameworks.sharing",
    "split_text": "retrieval.chunking",
    "text_prompt": "prompts.prompt",
    "uses_of": "frameworks.uses",
    "with_usual_names": "engines.sampling",
}

__all__ = [
    "DEFAULT_CHUNK_TOKENS",
    "DEFAULT_EMBEDDING",
    "DEFAULT_INSTRUCTION",
    "DEFAULT_MAX_TOKENS",
    "SAMPLING_OPTIONS",
    "AlteredChunkError",
    "BlendEngine",
    "BlendPrompt",
    "BlendSettings",
    "CacheBlendError",
    "CallReader",
    "CallsRead",
    "Chunk",
    "ChunkIndex",
    "ChunkRef",
    "ChunkRegistry",
    "ChunkSpan",
    "ChunkUses",
    "Embedder",
    "EngineName",
    "ExistingEstimate",
    "Generation",
    "InputError",
    "KVStore",
    "ModelError",
    "ModelFingerprint",
    "ModelProfile",
    "OnMiss",
    "PrecomputeReport",
    "PromptTooLongError",
    "RagPipeline",
    "RemoteEngine",
    "Request",
    "RetrievalLog",
    "RetrievalReport",
    "RetrievedFate",
    "Reuse",
    "SamplingParams",
    "Score",
    "ServerError",
    "StoreError",
    "StoreMismatchError",
    "StreamEvent",
    "Timings",
    "TokenLogprob",
    "TokenizedPrompt",
    "TransformersEngine",
    "Turn",
    "UnknownChunkError",
    "Usage",
    "VLLMEngine",
    "bundled_corpus",
    "bundled_questions",
    "call_schema",
    "chat_prompt",
    "checked_on_miss",
    "chunk_id",
    "chunk_of",
    "encoder_for",
    "estimate_existing",
    "explain_miss",
    "find_retrieved",
    "header_ids",
    "iter_chunks",
    "make_chunk",
    "open_store",
    "openai_logprobs",
    "precompute_existing",
    "rag_header",
    "rag_prompt",
    "reads_tools",
    "required_tool",
    "sampling_of",
    "shared_engine",
    "split_text",
    "text_prompt",
    "uses_of",
    "with_usual_names",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: `cacheblend --help` must not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
