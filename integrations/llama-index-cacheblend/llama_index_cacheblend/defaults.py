"""Chooses the LLM if none is given: `llm_for`, and `use_engine`, which sets LlamaIndex's global settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llama_index.core.settings import Settings

from cacheblend_rag import BlendEngine, InputError
from llama_index_cacheblend.handles import engine_for
from llama_index_cacheblend.llm import LLM_OPTIONS, CacheBlendLLM
from llama_index_cacheblend.prompt_helper import ChunkPreservingPromptHelper


def use_engine(engine: BlendEngine, **options: Any) -> CacheBlendLLM:
    """Set `Settings.llm`, `Settings.tokenizer` and `Settings.prompt_helper` for ``engine``.

    ``Settings.llm = CacheBlendLLM(engine=engine)`` is enough as long as retrieved chunks fit into one prompt. With
    `use_engine`, a prompt over the context window is divided between chunks and not inside them, by any engine or
    synthesizer.

    Args:
        engine: The engine that answers.
        options: Options of :class:`CacheBlendLLM`; query engines, chat engines and synthesizers of this package with
            the same ``engine=`` use them, too.

    Returns:
        The LLM that is now `Settings.llm`.

    Example:
        Query an index with the engine::

            use_engine(engine, max_tokens=64)
            response = index.as_query_engine().query("Who is the captain?")
    """
    llm = CacheBlendLLM(engine=engine, **options)
    Settings.llm = llm
    Settings.tokenizer = llm.tokenizer
    Settings.prompt_helper = ChunkPreservingPromptHelper.of(llm)
    return llm


def llm_for(
    engine: BlendEngine | None, llm: CacheBlendLLM | None, owner: str, options: Mapping[str, Any], *, watch: bool = True
) -> CacheBlendLLM:
    """Return ``llm``, else `Settings.llm` if it has this engine or none is given, else a new LLM of ``engine``.

    Args:
        engine: The engine that answers.
        llm: An LLM with this engine.
        owner: Class that will use the LLM, for error messages.
        options: Options of the LLM override the LLM's own values; other options are ignored (see
            :func:`other_options`).
        watch: Whether a new LLM registers the chunks that retrievers return; False if the owner registers them.

    Raises:
        InputError: No engine is found, the LLM has another engine, or an option is out of range.
    """
    if llm is not None and engine is not None and llm.engine is not engine:
        raise InputError("The LLM has another engine; give the engine or the LLM, not two that differ.")
    found, set_already = llm, Settings._llm
    if found is None and isinstance(set_already, CacheBlendLLM) and engine in (None, set_already.engine):
        found = set_already
    if found is None:
        found = CacheBlendLLM(engine=engine_for(engine, owner), watch_retrieval=watch)
    own = {name: value for name, value in options.items() if name in LLM_OPTIONS}
    return found.with_options(**own) if own else found


def other_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``options`` that :func:`llm_for` ignores."""
    return {name: value for name, value in options.items() if name not in LLM_OPTIONS}
