"""Says which LLM answers where it is left open: `llm_for`, and `use_engine`, which sets LlamaIndex's global settings."""

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

    ``Settings.llm = CacheBlendLLM(engine=engine)`` is enough as long as retrieved chunks fit into one prompt; with this, a prompt
    over the context window is divided between chunks instead of through them, whatever engine or synthesizer makes it.

    Args:
        engine: The model.
        options: As of :class:`CacheBlendLLM`; our query and chat engines and synthesizers that are given the same ``engine=``
            have them, too.

    Returns:
        The LLM that is now `Settings.llm`.
    """
    llm = CacheBlendLLM(engine=engine, **options)
    Settings.llm = llm
    Settings.tokenizer = llm.tokenizer
    Settings.prompt_helper = ChunkPreservingPromptHelper.of(llm)
    return llm


def llm_for(
    engine: BlendEngine | None, llm: CacheBlendLLM | None, owner: str, options: Mapping[str, Any], *, watch: bool = True
) -> CacheBlendLLM:
    """Return ``llm``, else `Settings.llm` where it has this engine or none is given, else a new one of ``engine``.

    Args:
        engine: The model.
        llm: An LLM of it.
        owner: Whose LLM it will be, for the message.
        options: Those of them that are the LLM's go before what the LLM has; see :func:`other_options`.
        watch: Whether it must learn of what retrievers return; its owner may tell it.

    Raises:
        InputError: There is none of them, the LLM has another engine, or an option is out of range.
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
    """Return those of ``options`` that :func:`llm_for` leaves to others."""
    return {name: value for name, value in options.items() if name not in LLM_OPTIONS}
