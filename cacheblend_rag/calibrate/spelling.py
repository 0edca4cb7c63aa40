"""Tokenises what is measured: an answer behind its prompt, and a prompt whose chunks are tokenised separately."""

from __future__ import annotations

from typing import Any

from cacheblend_rag.prompts.chunk import encoder_for, make_chunk
from cacheblend_rag.prompts.placing import text_of
from cacheblend_rag.prompts.prompt import BlendPrompt, ChunkRef, rag_prompt, tokenize
from cacheblend_rag.prompts.registry import ChunkRegistry
from cacheblend_rag.prompts.templates import PROBE, at_once, render


def answer_ids(tokenizer: Any, answer: str) -> tuple[int, ...]:
    """Return the tokens of an answer as they follow :func:`rag_prompt`, with the end-of-sequence token.

    The end token makes the likelihood that of exactly this answer; the likelihoods of different answers add up to at
    most 1.
    """
    encoder, lead = encoder_for(tokenizer), answer_lead(tokenizer)
    ids = [*encoder.template(lead), *encoder.document(answer)] if lead.strip() else encoder.document(lead + answer)
    end = getattr(tokenizer, "eos_token_id", None)
    return (*ids, *([] if end is None else [int(end)]))


def answer_lead(tokenizer: Any) -> str:
    """Return the text that the template writes between a prompt and its answer: a space or more for some, else nothing."""
    asked, variables = [{"role": "user", "content": "x"}], at_once(tokenizer)
    before = render(tokenizer, asked, None, variables)
    answered = [*asked, {"role": "assistant", "content": PROBE}]
    head, found, _ = render(tokenizer, answered, None, variables).partition(PROBE)
    if found and head.startswith(before):
        return head[len(before) :]
    return "" if before[-1:].isspace() else " "


def joins_are_plain(tokenizer: Any) -> bool:
    """Return whether a RAG prompt has the tokens of its text in one piece, for chunks with various edges."""
    texts = (
        "Letters at the end",
        "A full stop.",
        "42 is in 1999",
        "- one\n- (two)",
        "# Title\n\n“Quoted?”",
        "x = {1: 'y'}",
    )
    chunks = [make_chunk(text, tokenizer) for text in texts]
    prompt = rag_prompt(tokenizer, chunks, "Is it so?")
    whole = "".join(text_of(piece) for piece in prompt.segments if not isinstance(piece, ChunkRef))
    apart, together = (tokenize(each, tokenizer, ChunkRegistry()) for each in (prompt, BlendPrompt((whole,))))
    return apart.token_ids == together.token_ids
