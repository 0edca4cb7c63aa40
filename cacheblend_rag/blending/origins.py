"""Records how a prompt's KV came about, position by position: only by this may it serve a later prompt."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

import xxhash

from cacheblend_rag.blending.options import FuseOptions
from cacheblend_rag.blending.settings import ResolvedSettings
from cacheblend_rag.blending.text_ratio import ratio_to_json


@dataclass(frozen=True)
class Origin:
    """Marks a position from which on KV may be approximate: the chunks of a turn were blended there.

    Attributes:
        start: The position.
        key: Hash of where the turn's chunks are and how they were blended.
    """

    start: int
    key: str


def blend_terms(settings: ResolvedSettings, options: FuseOptions) -> dict[str, Any]:
    """Return all that decides how a prompt's chunks are blended, as JSON values.

    Of the loading controller's costs nothing is in it: whatever it decides recomputes as much as was asked for, or more.
    """
    return {
        "reuse": settings.reuse,
        "policy": options.policy.name,
        "ratio": [settings.ratio, ratio_to_json(options.ratio)],
        "schedule": asdict(options.schedule),
    }


def origins(
    spans: Sequence[tuple[int, int]],
    token_ids: Sequence[int],
    turn_ends: Sequence[int],
    header_tokens: int,
    how: Mapping[str, Any],
    watches_question: bool,
) -> tuple[Origin, ...]:
    """Return a prompt's origins, ascending: one for each turn that has chunks.

    Before the first of them KV is exact. Behind each it is that of a conversation whose turns were answered one after the
    other: a prompt that goes on from an answer has the same origins, and those of its new chunks behind them.

    Args:
        spans: Start and end of each chunk, ascending.
        token_ids: The prompt.
        turn_ends: Where earlier prompts of the conversation ended.
        header_tokens: Length of what chunks are precomputed behind.
        how: What :func:`blend_terms` returns.
        watches_question: Whether the turn's other tokens do, too: where their attention selects.
    """
    found = []
    for turn, members in groupby(spans, lambda span: bisect_right(turn_ends, span[0])):
        inside = list(members)
        # Header and first chunk come from the store together, which may keep them in fewer bits.
        start = 0 if inside[0][0] == header_tokens else inside[0][0]
        end = turn_ends[turn] if turn < len(turn_ends) else len(token_ids)
        shaping = list(token_ids[start:end]) if watches_question else []
        text = json.dumps([inside, dict(how), shaping], sort_keys=True)
        found.append(Origin(start, xxhash.xxh3_128_hexdigest(text.encode())))
    return tuple(found)


def common_tokens(one: Sequence[int], ones: Sequence[Origin], other: Sequence[int], others: Sequence[Origin]) -> int:
    """Return how many tokens two prompts have in common from the first on, whose KV came about alike, too."""
    low, high = 0, min(len(one), len(other))
    while low < high:  # slices are compared in C
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    alike = 0
    while alike < min(len(ones), len(others)) and ones[alike] == others[alike]:
        alike += 1
    return min([low, *(origin.start for origin in (*ones[alike:], *others[alike:]))])
