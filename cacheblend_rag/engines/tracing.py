"""Records what an engine does, into a file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cacheblend_rag.blending.trace import Trace
from cacheblend_rag.engines.base import BlendEngine
from cacheblend_rag.errors import InputError


@contextmanager
def traced(engine: BlendEngine, file: Path | None) -> Iterator[None]:
    """Write to ``file`` when each layer was loaded and computed of what runs inside; nothing without a file.

    Raises:
        InputError: This engine records nothing, or the file cannot be written.
    """
    if file is None:
        yield
        return
    if not engine.supports_trace:
        raise InputError(
            "--trace is for models that run here, on --engine transformers or vllm: a server records nothing. Leave out --server."
        )
    trace = Trace()
    trace.write(file)  # what cannot be written is told before the work, not after it
    engine.trace = trace
    try:
        yield
    finally:
        engine.trace = None
    trace.write(file)
