"""Finds where a conversation's earlier turns end in a prompt: where the model's template lets an answer begin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cacheblend_rag.errors import CacheBlendError
from cacheblend_rag.prompts.remembered import PerTokenizer
from cacheblend_rag.prompts.templates import PROBE, render
from cacheblend_rag.prompts.tokens import encoder_for


def turn_lead(tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens that the chat template writes between what a user says and the answer to it, white space left out.

    Returns none where the template has no such text, or there is no tokenizer.
    """
    if tokenizer is None:
        return ()
    return _leads(tokenizer)


def _measured(tokenizer: Any) -> tuple[int, ...]:
    asked, answered = f"{PROBE}?", f"{PROBE}!"
    roles = (("user", asked), ("assistant", answered), ("user", "x"))
    try:
        rendered = render(tokenizer, [{"role": role, "content": content} for role, content in roles])
        encoder = encoder_for(tokenizer)
    except CacheBlendError:  # a template for other messages, or a tokenizer that no prompt can be made with
        return ()
    begin, end = rendered.find(asked) + len(asked), rendered.find(answered)
    between = rendered[begin:end]
    lead = between.strip()
    if begin < len(asked) or not lead:
        return ()
    begin += between.index(lead)
    return tuple(encoder.template_between(rendered, begin, begin + len(lead)))


_leads = PerTokenizer(_measured)


def turn_ends(token_ids: Sequence[int], lead: Sequence[int]) -> tuple[int, ...]:
    """Return the positions right behind each ``lead`` in a prompt, ascending: up to there earlier prompts went."""
    ids, wanted = tuple(token_ids), tuple(lead)
    ends: list[int] = []
    at = -1
    while wanted:
        try:
            at = ids.index(wanted[0], at + 1)
        except ValueError:
            break
        if ids[at : at + len(wanted)] == wanted:
            ends.append(at + len(wanted))
    return tuple(ends)
