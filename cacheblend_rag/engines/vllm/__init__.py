"""Blends inside vLLM with a KV connector and a worker class, loaded by configuration; vLLM's files stay unchanged."""

from typing import TYPE_CHECKING, Any

from cacheblend_rag.engines.vllm.versions import check_version

if TYPE_CHECKING:
    from cacheblend_rag.engines.vllm.engine import VLLMEngine

__all__ = ["VLLMEngine"]

check_version()


def __getattr__(name: str) -> Any:
    """Import :class:`VLLMEngine`, and with it vLLM, on first use: importing vLLM takes seconds."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from cacheblend_rag.engines.vllm.engine import VLLMEngine

    return VLLMEngine
