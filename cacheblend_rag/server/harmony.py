"""Reads chat prompts that vLLM renders with harmony (the format of gpt-oss): token ids without text.

Harmony encodes a message's text apart from the surrounding tokens, so the text cannot produce special tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cacheblend_rag.prompts.chunk import encoder_for

SPELLED = "special tokens are spelled in text that is no registered chunk, which is data to gpt-oss"


def rendered_text(engine_input: Mapping[str, Any], tokenizer: Any, harmony: bool) -> str | None:
    """Return the text of a rendered prompt; None if the prompt is not text alone."""
    text = engine_input.get("prompt")
    if text is None and harmony and (token_ids := engine_input.get("prompt_token_ids")):
        text = tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)
    return text if engine_input.get("type") == "token" and isinstance(text, str) else None


def why_not_as(rendered: Sequence[int], made: Sequence[int], tokenizer: Any) -> str:
    """Return why the tokens ``made`` from a prompt's text cannot replace the ``rendered`` tokens; empty if they can."""
    controls = encoder_for(tokenizer).controls
    return "" if controls(made) == controls(rendered) else SPELLED
