"""At which tokens an answer ends, the same for every engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def end_tokens(config: Any, generation_config: Any, tokenizer: Any) -> frozenset[int]:
    """Return every token that one of them names as the end of sequence; any may be None, and a config a mapping.

    All of them count, because vLLM ends at its tokenizer's token whatever the configs name, and some models name it in only
    one of the three places.
    """
    found: set[int] = set()
    for source in (config, generation_config, tokenizer):
        named = source.get("eos_token_id") if isinstance(source, Mapping) else getattr(source, "eos_token_id", None)
        found.update(named if isinstance(named, (list, tuple)) else [] if named is None else [named])
    return frozenset(found)
