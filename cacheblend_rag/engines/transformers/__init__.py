"""Runs models on transformers."""

from cacheblend_rag.engines.transformers.engine import TransformersEngine

__all__ = ["TransformersEngine"]
