"""LlamaIndex nodes as chunks: what the LLM will see of a node is what is computed, stored and found again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore

from cacheblend_rag import BlendEngine, Chunk, InputError, PrecomputeReport, chunk_of


def node_text(node: BaseNode | NodeWithScore) -> str:
    """Return what a synthesizer or chat engine puts into a prompt for ``node``: text and LLM metadata, stripped."""
    if isinstance(node, NodeWithScore):
        node = node.node
    return node.get_content(metadata_mode=MetadataMode.LLM).strip()


def register_nodes(engine: BlendEngine, nodes: Iterable[BaseNode | NodeWithScore]) -> list[Chunk]:
    """Make the texts of ``nodes`` known to ``engine``, so that prompts that hold them reuse their KV.

    Nothing is computed: KV that the store lacks is computed with the first prompt and written back after it.

    Returns:
        The chunks, in the order of the nodes; nodes without text (images, or text that is not valid Unicode) have none.
    """
    return register_texts(engine, (node_text(node) for node in nodes))


def register_texts(engine: BlendEngine, texts: Iterable[str]) -> list[Chunk]:
    """Register chunk texts; see :func:`register_nodes`. Texts the engine knows already are not tokenised again."""
    chunks = []
    for text in texts:
        try:
            chunk = chunk_of(text, engine.tokenizer, engine.registry)
        except InputError:  # not valid Unicode: it reaches the model, if at all, as ordinary text
            continue
        if chunk is not None:
            chunks.append(chunk)
    fresh = [chunk for chunk in chunks if chunk.id not in engine.registry]
    if fresh:
        engine.registry.add(fresh)
    return chunks


def precompute_nodes(
    engine: BlendEngine, nodes: Sequence[BaseNode | NodeWithScore], progress: Callable[[int], None] | None = None
) -> PrecomputeReport:
    """Compute and store the KV of ``nodes`` (those already stored are skipped).

    Args:
        engine: The model.
        nodes: Nodes as they will be retrieved, metadata included.
        progress: Called with the number of chunks finished since its last call.

    Returns:
        What was done. Nodes longer than the context window are among the failed: no prompt can hold them.

    Raises:
        StoreError: The store cannot be written.
    """
    chunks = register_nodes(engine, nodes)
    room = engine.context_window - len(getattr(engine, "header_ids", ()))
    fitting = [chunk for chunk in chunks if len(chunk.token_ids) <= room]
    report = engine.precompute(fitting, progress)
    too_long = {
        chunk.id: f"it has {len(chunk.token_ids)} tokens, and the context window leaves {room}"
        for chunk in chunks
        if len(chunk.token_ids) > room
    }
    return replace(report, failed={**report.failed, **too_long})
