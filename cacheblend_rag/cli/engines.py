"""Opening engines and pipelines with the options of a command."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cacheblend_rag.cli import options
from cacheblend_rag.cli.output import status

if TYPE_CHECKING:
    from cacheblend_rag.engines.transformers import TransformersEngine
    from cacheblend_rag.pipeline import RagPipeline
    from cacheblend_rag.store import KVStore


@dataclass(frozen=True)
class ModelOptions:
    """The options of every command that loads a model."""

    model: str | None = None
    device: str | None = None
    dtype: str | None = None
    threads: int | None = None


def open_engine(chosen: ModelOptions, store: KVStore | None = None) -> TransformersEngine:
    """Load the model of a command."""
    with status("Loading the model"):
        import torch
        from transformers.utils import logging

        from cacheblend_rag.engines.transformers import TransformersEngine
        from cacheblend_rag.engines.transformers.loading import dtype_named

        logging.disable_progress_bar()
        if chosen.threads is not None:
            torch.set_num_threads(chosen.threads)
        dtype = dtype_named(chosen.dtype) if chosen.dtype else None
        return TransformersEngine(chosen.model, device=chosen.device, dtype=dtype, store=store)


@contextmanager
def open_pipeline(
    chosen: ModelOptions,
    directory: Path | None,
    budgets: tuple[str | None, str | None] = (None, None),
    *,
    must_exist: bool = True,
    k: int = 6,
    chunk_tokens: int | None = None,
    overlap: int | None = None,
    embedding: str | None = None,
) -> Iterator[RagPipeline]:
    """Open the store of a command with its model in front; ``budgets`` are those of the RAM and the disk tier."""
    from cacheblend_rag.errors import StoreError
    from cacheblend_rag.index import ChunkIndex
    from cacheblend_rag.store import open_store

    path = options.store_directory(directory)
    ram, disk = (None if text is None else options.nbytes(text) for text in budgets)
    if must_exist and not ChunkIndex.exists(path):
        # Said at once: a wrong path should not cost the loading of a model.
        raise StoreError(f"Nothing is indexed in {path}. Run `cacheblend index FILES --store DIR` first.")
    with open_engine(chosen, open_store(path, ram, disk)) as engine:
        from cacheblend_rag.pipeline import RagPipeline

        with RagPipeline(
            engine, path, k=k, chunk_tokens=chunk_tokens, overlap=overlap, embedding=embedding
        ) as pipeline:
            yield pipeline
