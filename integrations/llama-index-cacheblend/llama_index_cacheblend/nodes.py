"""Turns nodes into chunks: a chunk's text is the node's text in the LLM's prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore

from cacheblend_rag import BlendEngine, Chunk, InputError, PrecomputeReport, chunk_id, make_chunk
from cacheblend_rag.frameworks import uses_of


def node_text(node: BaseNode | NodeWithScore) -> str:
    """Return the text of ``node`` in a synthesizer's or chat engine's prompt: text and LLM metadata, stripped.

    Example:
        Print the text of a retrieved node in a prompt::

            node = index.as_retriever().retrieve("Who is the captain?")[0]
            print(node_text(node))
    """
    return _bare(node).get_content(metadata_mode=MetadataMode.LLM).strip()


def node_forms(node: BaseNode | NodeWithScore) -> tuple[str, ...]:
    """Return the texts of ``node`` in prompts: :func:`node_text`, and its text without metadata if different."""
    forms = (node_text(node), _bare(node).get_content(metadata_mode=MetadataMode.NONE).strip())
    return tuple(form for form in dict.fromkeys(forms) if form)


def register_nodes(engine: BlendEngine, nodes: Iterable[BaseNode | NodeWithScore]) -> list[Chunk]:
    """Register the texts of ``nodes`` with ``engine``, so that prompts that contain them reuse their KV.

    Nothing is computed: missing KV is computed with the first prompt and stored after that prompt. A node registered
    without its metadata stays registered in this form; in prompts, its metadata is then ordinary text.

    Returns:
        The chunks, in the order of the nodes; nodes without text (images, or text that is not valid Unicode) have none.

    Example:
        Register nodes, then name them in a call::

            chunks = register_nodes(engine, nodes)
            response = llm.complete(prompt, chunk_ids=[chunk.id for chunk in chunks])
    """
    return register_forms(engine, map(node_forms, nodes))


def register_forms(engine: BlendEngine, nodes: Iterable[tuple[str, ...]]) -> list[Chunk]:
    """Register nodes by :func:`node_forms`; see :func:`register_nodes`. Registered texts are not tokenised again."""

    def chosen(forms: tuple[str, ...]) -> str:
        return next((form for form in forms if chunk_id(form) in engine.registry), forms[0])

    return uses_of(engine).register(engine, [chosen(forms) for forms in nodes if forms])


def precompute_nodes(
    engine: BlendEngine,
    nodes: Sequence[BaseNode | NodeWithScore],
    progress: Callable[[int], None] | None = None,
    metadata_mode: MetadataMode = MetadataMode.LLM,
) -> PrecomputeReport:
    """Compute and store the KV of ``nodes`` (nodes with stored KV are skipped).

    Args:
        engine: The engine that computes and stores the KV.
        nodes: Nodes as they will be retrieved, metadata included.
        progress: Called with the number of chunks finished since its last call.
        metadata_mode: Form of the nodes in prompts. A node in another form is computed with its first prompt.

    Returns:
        The report of the computation. Nodes longer than the context window are among the failed: no prompt can hold
        them.

    Raises:
        StoreError: The store cannot be written.

    Example:
        Compute the KV of an index's nodes before the first question::

            report = precompute_nodes(engine, nodes)
            print(report.computed, report.present, report.failed)
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
        with suppress(InputError):  # invalid Unicode makes no chunk
            chunk = make_chunk(text, engine.tokenizer)
            failed[chunk.id] = f"it has {len(chunk.token_ids)} tokens, and the context window leaves {room}"
    return failed


def _bare(node: BaseNode | NodeWithScore) -> BaseNode:
    return node.node if isinstance(node, NodeWithScore) else node
