"""Computes the KV of nodes in an `IngestionPipeline`: `CacheBlendPrecompute`."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Sequence
from typing import Any

from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.schema import BaseNode, MetadataMode, TransformComponent

from cacheblend_rag import BlendEngine, InputError, PrecomputeReport
from llama_index_cacheblend.handles import refuse_unpicklable
from llama_index_cacheblend.nodes import precompute_nodes

_log = logging.getLogger(__name__)


class CacheBlendPrecompute(TransformComponent):
    """Computes, stores and registers the KV of every node in a pipeline, and returns the nodes unchanged.

    Put this transform last. It computes the text that the LLM will see, metadata included, and a later metadata
    extractor would change the text. A pipeline that finds its input in its cache skips all transforms; missing KV is
    then computed with the first prompt that needs it.

    Attributes:
        engine: The engine that computes and stores the KV.
        computed_for: Digest of model and header, part of the pipeline's cache key.
        metadata_mode: Form of the nodes in prompts.
        strict: Raise if the KV of a node could not be stored, instead of logging a warning.

    Example:
        Compute KV at the end of a pipeline::

            pipeline = IngestionPipeline(transformations=[SentenceSplitter(), CacheBlendPrecompute(engine)])
            nodes = pipeline.run(documents=documents)
    """

    engine: BlendEngine = Field(exclude=True)
    computed_for: str = ""
    metadata_mode: MetadataMode = MetadataMode.LLM
    strict: bool = False

    _report: PrecomputeReport = PrivateAttr(default_factory=PrecomputeReport)

    def __init__(self, engine: BlendEngine, strict: bool = False, **kwargs: Any) -> None:
        """Compute with ``engine``."""
        super().__init__(**{**kwargs, "engine": engine, "strict": strict, "computed_for": _digest(engine)})

    @classmethod
    def class_name(cls) -> str:
        """Return LlamaIndex's name for the class."""
        return "CacheBlendPrecompute"

    @property
    def report(self) -> PrecomputeReport:
        """Return the report of the last call."""
        return self._report

    def __call__(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """Compute the KV of nodes without stored KV, and return the nodes.

        Raises:
            StoreError: The store cannot be written.
            RuntimeError: With ``strict``, the KV of a node could not be stored.
        """
        self._report = report = precompute_nodes(self.engine, nodes, metadata_mode=self.metadata_mode)
        if report.failed:
            some, why = next(iter(report.failed.items()))
            said = f"The KV of {len(report.failed)} of {len(nodes)} nodes is not stored; chunk {some}: {why}."
            if self.strict:
                raise RuntimeError(said)
            _log.warning("%s They are answered by ordinary prefill.", said)
        return nodes

    async def acall(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """Compute the KV off the event loop; see :meth:`__call__`."""
        return await asyncio.to_thread(self.__call__, nodes, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """Raise InputError if the engine cannot be pickled, or if its store is in this process's RAM."""
        refuse_unpicklable(self.engine, type(self).__name__)
        if self.engine.store is not None and not self.engine.store.lasts:
            raise InputError(
                f"{type(self).__name__} has an engine whose store is in this process's RAM: what another process computes would "
                "be lost. Give the model a store on disk, or use num_workers=1."
            )
        return super().__getstate__()


def _digest(engine: BlendEngine) -> str:
    header = list(getattr(engine, "header_ids", ()))
    return hashlib.sha256(json.dumps([engine.fingerprint.digest, header]).encode()).hexdigest()[:32]
