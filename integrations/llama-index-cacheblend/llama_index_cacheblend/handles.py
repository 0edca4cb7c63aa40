"""What may be pickled: an engine that is a handle to a server, never a model."""

from __future__ import annotations

import pickle

from llama_index.core.settings import Settings

from cacheblend_rag import BlendEngine, InputError


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
            "Use num_workers=1, or an engine that talks to a server."
        ) from error


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
