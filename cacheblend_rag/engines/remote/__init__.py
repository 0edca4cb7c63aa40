"""Provides a blend engine that sends its requests to a `cacheblend serve`."""

from cacheblend_rag.errors import InputError

try:
    import openai  # noqa: F401  (an extra)
except ModuleNotFoundError as error:
    raise InputError('RemoteEngine needs the openai package: pip install "cacheblend-rag[remote]".') from error

from cacheblend_rag.engines.remote.engine import RemoteEngine

__all__ = ["RemoteEngine"]
