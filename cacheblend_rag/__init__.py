"""CacheBlend RAG: reuse every chunk's KV cache at any position, recompute the few tokens that matter."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cacheblend_rag.blending.settings import BlendSettings
    from cacheblend_rag.engines.base import BlendEngine
    from cacheblend_rag.engines.remote import RemoteEngine
    from cacheblend_rag.engines.results import Generation
    from cacheblend_rag.engines.sampling import SamplingParams
    from cacheblend_rag.engines.transformers import TransformersEngine
    from cacheblend_rag.errors import CacheBlendError
    from cacheblend_rag.prompts.chunk import Chunk
    from cacheblend_rag.prompts.prompt import BlendPrompt, ChunkRef
    from cacheblend_rag.rag.pipeline import RagPipeline
    from cacheblend_rag.retrieval.index import ChunkIndex
    from cacheblend_rag.store import KVStore, open_store

__version__ = "0.1.0"

_HOMES = {
    "BlendEngine": "engines.base",
    "BlendPrompt": "prompts.prompt",
    "BlendSettings": "blending.settings",
    "CacheBlendError": "errors",
    "Chunk": "prompts.chunk",
    "ChunkIndex": "retrieval.index",
    "ChunkRef": "prompts.prompt",
    "Generation": "engines.results",
    "KVStore": "store",
    "RagPipeline": "rag.pipeline",
    "RemoteEngine": "engines.remote",
    "SamplingParams": "engines.sampling",
    "TransformersEngine": "engines.transformers",
    "open_store": "store",
}

__all__ = [
    "BlendEngine",
    "BlendPrompt",
    "BlendSettings",
    "CacheBlendError",
    "Chunk",
    "ChunkIndex",
    "ChunkRef",
    "Generation",
    "KVStore",
    "RagPipeline",
    "RemoteEngine",
    "SamplingParams",
    "TransformersEngine",
    "open_store",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: `cacheblend --help` must not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
