"""Turns nodes into chunks: what the LLM will see of a node is what is computed, stored and found again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore

from cacheblend_rag import BlendEngine, Chunk, InputError, PrecomputeReport, chunk_id, make_chunk
from cacheblend_rag.frameworks import uses_of


def node_text(node: BaseNode | NodeWithScore) -> str:
    """Return what a synthesizer or chat engine puts into a prompt for ``node``: text and LLM metadata, stripped."""
    return _bare(node).get_content(metadata_mode=MetadataMode.LLM).strip()


def node_forms(node: BaseNode | NodeWithScore) -> tuple[str, ...]:
    """Return what prompts may hold of ``node``: :func:`node_text`, then its text without metadata where that differs."""
    forms = (node_text(node), _bare(node).get_content(metadata_mode=MetadataMode.NONE).strip())
    return tuple(form for form in dict.fromkeys(forms) if form)


def register_nodes(engine: BlendEngine, nodes: Iterable[BaseNode | NodeWithScore]) -> list[Chunk]:
    """Make the texts of ``nodes`` known to ``engine``, so that prompts that hold them reuse their KV.

    Nothing is computed: KV that the store lacks is computed with the first prompt and written back after it. A node whose text
    was made known without its metadata stays known so: where its metadata stands before it, that is ordinary text.

    Returns:
        The chunks, in the order of the nodes; nodes without text (images, or text that is not valid Unicode) have none.
    """
    return register_forms(engine, map(node_forms, nodes))


def register_forms(engine: BlendEngine, nodes: Iterable[tuple[str, ...]]) -> list[Chunk]:
    """Register nodes by :func:`node_forms`; see :func:`register_nodes`. Texts the engine knows are not tokenised again."""

    def chosen(forms: tuple[str, ...]) -> str:
        return next((form for form in forms if chunk_id(form) in engine.registry), forms[0])

    return uses_of(engine).register(engine, [chosen(forms) for forms in nodes if forms])


def precompute_nodes(
    engine: BlendEngine,
    nodes: Sequence[BaseNode | NodeWithScore],
    progress: Callable[[int], None] | None = None,
    metadata_mode: MetadataMode = MetadataMode.LLM,
) -> PrecomputeReport:
    """Compute and store the KV of ``nodes`` (those already stored are skipped).

    Args:
        engine: The model.
        nodes: Nodes as they will be retrieved, metadata included.
        progress: Called with the number of chunks finished since its last call.
        metadata_mode: How prompts will show them. A node in another form than the one computed is computed with its first prompt.

    Returns:
        What was done. Nodes longer than the context window are among the failed: no prompt can hold them.

    Raises:
        StoreError: The store cannot be written.
    """
    texts = [_bare(node).get_content(metadata_mode=metadata_mode).strip() for node in nodes]
    chunks = uses_of(engine).register(engine, texts)
    report = engine.precompute(chunks, progress)
    fitting = {chunk.text for chunk in chunks}
    return replace(report, failed={**report.failed, **_too_long(engine, [t for t in texts if t and t not in fitting])})


def _too_long(engine: BlendEngine, texts: Sequence[str]) -> dict[str, str]:
    room = engine.context_window - len(getattr(engine, "header_ids", ()))
    failed = {}
    for text in texts:
        with suppress(InputError):  # not valid Unicode: no chunk at all
            chunk = make_chunk(text, engine.tokenizer)
            failed[chunk.id] = f"it has {len(chunk.token_ids)} tokens, and the context window leaves {room}"
    return failed


def _bare(node: BaseNode | NodeWithScore) -> BaseNode:
    return node.node if isinstance(node, NodeWithScore) else node
