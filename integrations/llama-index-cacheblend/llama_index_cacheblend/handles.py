"""Finds the engine and the tokenizer that are meant, and checks what may be pickled: a handle to a server, never a model."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import llama_index.core
from llama_index.core.settings import Settings
from llama_index.core.utils import set_global_tokenizer

from cacheblend_rag import BlendEngine, InputError
from cacheblend_rag.frameworks import EngineName, shared_engine


class _Discard:
    def write(self, data: bytes) -> int:
        return len(data)


def refuse_unpicklable(engine: BlendEngine, owner: str) -> None:
    """Raise unless ``engine`` can be sent to another process; LlamaIndex would drop it without a word.

    Raises:
        InputError: It holds a model.
    """
    try:
        pickle.Pickler(_Discard()).dump(engine)  # whether it can be done, without holding a model's bytes
    except Exception as error:
        raise InputError(
            f"{owner} holds a {type(engine).__name__}, which lives in this process and cannot be sent to another. "
            "Use num_workers=1, an engine that talks to a server, or a model given by name: CacheBlendLLM(model=...).engine."
        ) from error


def named_engine(engine: BlendEngine | EngineName | None, named: Mapping[str, Any]) -> BlendEngine:
    """Return the engine that is given, or the shared one that ``named``, the arguments of `shared_engine`, names.

    Raises:
        InputError: There are both.
    """
    if not isinstance(engine, BlendEngine):
        return shared_engine(engine=engine or "transformers", **named)
    if given := [name for name, value in named.items() if value is not None]:
        argument = given[0].removesuffix("_s")
        raise InputError(
            f"{argument} is for an engine that is named, and one is given: give engine= or {argument}=, not both."
        )
    return engine


def check_window(llm: Any) -> None:
    """Refuse an LLM that packs prompts for more than its engine reads.

    Raises:
        InputError: Its ``context_window`` is larger than the engine's, or not positive.
    """
    window: int | None = llm.context_window
    if window is not None and not 0 < window <= llm.engine.context_window:
        raise InputError(
            f"context_window is {window}; the engine's is {llm.engine.context_window}, and prompts can be packed for less, "
            "not for more."
        )


def engine_in_settings() -> BlendEngine | None:
    """Return the engine of `Settings.llm`, or None if that is no CacheBlendLLM (nothing is resolved or downloaded)."""
    engine = getattr(Settings._llm, "engine", None)
    return engine if isinstance(engine, BlendEngine) else None


def engine_for(engine: BlendEngine | None, owner: str) -> BlendEngine:
    """Return ``engine``, else that of `Settings.llm`.

    Raises:
        InputError: There is neither.
    """
    found = engine or engine_in_settings()
    if found is None:
        raise InputError(f"{owner} needs an engine: pass engine=..., or set Settings.llm = CacheBlendLLM(engine=...).")
    return found


def count_with(tokenizer: Callable[[str], list[int]]) -> None:
    """Make ``tokenizer`` LlamaIndex's global one, unless somebody chose that; GPT-2's, set when first used, nobody chose."""
    present: Any = llama_index.core.global_tokenizer
    own = present.func if isinstance(present, partial) else None
    if present is None or type(getattr(own, "__self__", None)).__module__.startswith("tiktoken"):
        set_global_tokenizer(tokenizer)
