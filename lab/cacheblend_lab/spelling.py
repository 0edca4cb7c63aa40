"""Tokenises an answer behind its prompt."""

from __future__ import annotations

from typing import Any

from cacheblend_rag.prompts.chunk import encoder_for
from cacheblend_rag.prompts.templates import PROBE, at_once, render


def answer_ids(tokenizer: Any, answer: str) -> tuple[int, ...]:
    """Return the tokens of an answer as they follow :func:`rag_prompt`, with the end-of-sequence token.

    The end token makes the likelihood that of exactly this answer; the likelihoods of different answers add up to at
    most 1.
    """
    encoder, lead = encoder_for(tokenizer), _lead(tokenizer)
    ids = [*encoder.template(lead), *encoder.document(answer)] if lead.strip() else encoder.document(lead + answer)
    end = getattr(tokenizer, "eos_token_id", None)
    return (*ids, *([] if end is None else [int(end)]))


def _lead(tokenizer: Any) -> str:
    """Return the text that the template writes between a prompt and its answer: a space or more for some, else nothing."""
    asked, variables = [{"role": "user", "content": "x"}], at_once(tokenizer)
    before = render(tokenizer, asked, None, variables)
    answered = [*asked, {"role": "assistant", "content": PROBE}]
    head, found, _ = render(tokenizer, answered, None, variables).partition(PROBE)
    if found and head.startswith(before):
        return head[len(before) :]
    return "" if before[-1:].isspace() else " "
