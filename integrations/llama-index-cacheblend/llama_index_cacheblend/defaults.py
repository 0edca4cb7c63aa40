"""Sets LlamaIndex's global settings all at once: `use_engine`."""

from __future__ import annotations

from typing import Any

from llama_index.core.settings import Settings

from cacheblend_rag import BlendEngine
from llama_index_cacheblend.llm import CacheBlendLLM
from llama_index_cacheblend.prompt_helper import ChunkPreservingPromptHelper


def use_engine(engine: BlendEngine, **options: Any) -> CacheBlendLLM:
    """Set `Settings.llm`, `Settings.tokenizer` and `Settings.prompt_helper` for ``engine``.

    ``Settings.llm = CacheBlendLLM(engine=engine)`` is enough as long as retrieved chunks fit into one prompt; with this, a prompt
    over the context window is divided between chunks instead of through them, whatever engine or synthesizer makes it.

    Args:
        engine: The model.
        options: As of :class:`CacheBlendLLM`.

    Returns:
        The LLM that is now `Settings.llm`.
    """
    llm = CacheBlendLLM(engine=engine, **options)
    Settings.llm = llm
    Settings.tokenizer = llm.tokenizer
    Settings.prompt_helper = ChunkPreservingPromptHelper(engine, llm.metadata.num_output)
    return llm
