"""Blends inside vLLM by a KV connector and a worker class, loaded by configuration; no file of vLLM is changed."""

from cacheblend_rag.engines.vllm.versions import check_version

check_version()

from cacheblend_rag.engines.vllm.engine import VLLMEngine  # noqa: E402  (a wrong vLLM is named before it fails to import)

__all__ = ["VLLMEngine"]
