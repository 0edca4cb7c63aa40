"""Finds the engine and tokenizer to use, and checks that pickles hold only connections to a server, never a model."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import llama_index.core
from llama_index.core.settings import Settings
from llama_index.core.utils import set_global_tokenizer

from cacheblend_rag import BlendEngine, InputError


class _Discard:
    def write(self, data: bytes) -> int:
        return len(data)


def refuse_unpicklable(engine: BlendEngine, owner: str) -> None:
    """Raise unless ``engine`` can be sent to another process; LlamaIndex would drop it silently.

    Raises:
        InputError: The engine holds a model.
    """
    try:
        pickle.Pickler(_Discard()).dump(engine)  # tries to pickle without storing the bytes of a model
    except Exception as error:
        raise InputError(
            f"{owner} holds a {type(engine).__name__}, which lives in this process and cannot be sent to another. "
            "Use num_workers=1, an engine that talks to a server, or a model given by name: CacheBlendLLM(model=...).engine."
        ) from error


def check_window(llm: Any) -> None:
    """Refuse an LLM whose packed prompts can exceed its engine's context window.

    Raises:
        InputError: The LLM's ``context_window`` is larger than the engine's, or not positive.
    """
    window: int | None = llm.context_window
    if window is not None and not 0 < window <= llm.engine.context_window:
        raise InputError(
            f"context_window is {window}; the engine's is {llm.engine.context_window}, and prompts can be packed for less, "
            "not for more."
        )


def engine_in_settings() -> BlendEngine | None:
    """Return the engine of `Settings.llm`, or None if it is no CacheBlendLLM (nothing is resolved or downloaded)."""
    engine = getattr(Settings._llm, "engine", None)
    return engine if isinstance(engine, BlendEngine) else None


def engine_for(engine: BlendEngine | None, owner: str) -> BlendEngine:
    """Return ``engine``, else the engine of `Settings.llm`.

    Raises:
        InputError: Neither exists.
    """
    found = engine or engine_in_settings()
    if found is None:
        raise InputError(f"{owner} needs an engine: pass engine=..., or set Settings.llm = CacheBlendLLM(engine=...).")
    return found


def count_with(tokenizer: Callable[[str], list[int]]) -> None:
    """Make ``tokenizer`` LlamaIndex's global tokenizer, unless the user has set one.

    GPT-2's tokenizer, which LlamaIndex sets at its first use, does not count as set by the user.
    """
    present: Any = llama_index.core.global_tokenizer
    own = present.func if isinstance(present, partial) else None
    if present is None or type(getattr(own, "__self__", None)).__module__.startswith("tiktoken"):
        set_global_tokenizer(tokenizer)
