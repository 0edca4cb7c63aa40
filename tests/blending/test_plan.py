"""Tests the stored KV that a prompt takes, and the prompts that its KV may serve later: common tokens, computed alike."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import pytest
import torch

from cacheblend_rag.blending.plan import BlendPlan, Origin, StoredSpan, make_plan, origins
from cacheblend_rag.blending.policies import policy
from cacheblend_rag.blending.settings import FuseOptions, TextRatio
from cacheblend_rag.engines.transformers.prefixes import PromptKey
from cacheblend_rag.prompts.chunk import Chunk
from cacheblend_rag.prompts.prompt import ChunkSpan, TokenizedPrompt
from cacheblend_rag.store.kv import ChunkKV, LayerKV

HEADER = 2
IDS = tuple(range(40))
SPANS = [(2, 8), (9, 14), (20, 26)]
ENDS = (17, 30)


def made(**changes: Any) -> tuple[Origin, ...]:
    options = FuseOptions(policy(changes.get("policy", "hkvd")), changes.get("ratio", 0.15), **changes.get("more", {}))
    spans, ids, ends = (changes.get(name, value) for name, value in (("spans", SPANS), ("ids", IDS), ("ends", ENDS)))
    return origins(spans, ids, ends, HEADER, options.terms, changes.get("watches", False))


def common_tokens(one: Sequence[int], ones: Sequence[Origin], other: Sequence[int], others: Sequence[Origin]) -> int:
    """Count the tokens that two prompts have in common and whose KV was computed alike, as the prefix cache counts."""
    labels = (PromptKey(tuple(ids), tuple(found), "").labels for ids, found in ((one, ones), (other, others)))
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*labels, strict=False)))


def test_each_turn_with_chunks_has_an_origin_at_its_first_chunk_or_the_header_before_that() -> None:
    assert [origin.start for origin in made()] == [0, 20]
    assert [origin.start for origin in made(spans=SPANS[1:])] == [9, 20]
    assert made(spans=[]) == ()


def test_a_chunk_that_begins_where_a_turn_ends_belongs_to_the_next_turn() -> None:
    assert [origin.start for origin in made(spans=[(2, 8), (17, 26)])] == [0, 17]


def test_a_continued_prompt_has_the_origins_of_the_earlier_prompt() -> None:
    first = made(spans=SPANS[:2], ids=IDS[:17], ends=ENDS[:1])
    assert first == made()[:1]
    assert common_tokens(IDS[:19], first, IDS, made()) == 19


@pytest.mark.parametrize(
    "other",
    [
        {"ratio": 0.2},
        {"policy": "random"},
        {"more": {"auto": True}},
        {"ratio": TextRatio(0.15, 0.5), "more": {"auto": True}},
        {"more": {"check_layers": (2,)}},
        {"more": {"widths": (1.5,)}},
        {"more": {"reuse": "prefix"}},
        {"spans": [(2, 8), (20, 26)]},
        {"spans": [(2, 8), (10, 14), (20, 26)]},
    ],
)
def test_tokens_computed_with_different_options_are_not_common(other: dict[str, Any]) -> None:
    assert common_tokens(IDS, made(), IDS, made(**other)) == 0


def test_a_difference_in_a_later_turn_leaves_earlier_turns_in_common() -> None:
    assert common_tokens(IDS, made(), IDS, made(spans=[*SPANS[:2], (21, 26)])) == 20
    assert common_tokens(IDS, made(), IDS, made(spans=SPANS[:2])) == 20


def test_exact_kv_serves_a_blended_prompt_up_to_its_first_chunk() -> None:
    assert common_tokens(IDS, (), IDS, made(spans=SPANS[1:])) == 9
    assert common_tokens(IDS, (), IDS, made()) == 0


def test_question_words_matter_only_to_policies_that_read_them_and_only_within_their_turn() -> None:
    asked = (*IDS[:15], 99, *IDS[16:])
    later = (*IDS[:32], 99, *IDS[33:])
    assert [a == b for a, b in zip(made(), made(ids=asked), strict=True)] == [True, True]
    watched = made(watches=True)
    assert [a == b for a, b in zip(watched, made(watches=True, ids=asked), strict=True)] == [False, True]
    assert watched == made(watches=True, ids=later)
    assert common_tokens(IDS, watched, asked, made(watches=True, ids=asked)) == 0
    assert common_tokens(IDS, watched, later, watched) == 32


def test_common_tokens_are_counted_to_the_last_one() -> None:
    for common in range(len(IDS) + 1):
        assert common_tokens(IDS, (), (*IDS[:common], 99), ()) == common


TEXT, QUESTION = (50, 51, 52), (90, 91)
CHUNKS = [Chunk(f"{n}", f"chunk {n}", tuple(range(10 * n, 10 * n + 4))) for n in (1, 2, 3)]


def entry(tokens: int) -> ChunkKV:
    """Make KV of two layers whose values, like its static deviation, number the tokens."""
    values = torch.arange(tokens, dtype=torch.float32)
    return ChunkKV([LayerKV(values[None, :, None], values[None, :, None])] * 2, HEADER, static=values)


def planned(*pieces: tuple[int, ...] | Chunk, stored: list[Chunk] | None = None, **options: Any) -> BlendPlan:
    """The plan of a prompt of texts and chunks, where the header and all chunks are stored, or ``stored`` alone."""
    ids: list[int] = []
    spans = []
    for piece in pieces:
        tokens = piece.token_ids if isinstance(piece, Chunk) else piece
        if isinstance(piece, Chunk):
            spans.append(ChunkSpan(piece, len(ids), len(ids) + len(tokens)))
        ids += tokens
    known = {chunk.token_ids: entry(4) for chunk in (CHUNKS if stored is None else stored)}
    known |= {(): entry(HEADER)} if stored is None else {}

    def look(token_ids: Sequence[int]) -> ChunkKV | None:
        return known.get(tuple(token_ids))

    return make_plan(TokenizedPrompt(tuple(ids), tuple(spans)), IDS[:HEADER], look, **options)


def places(spans: tuple[StoredSpan, ...]) -> list[tuple[int, int]]:
    return [(span.start, span.end) for span in spans]


def test_a_chunk_right_behind_the_header_is_exact_and_one_behind_any_text_is_stale() -> None:
    first, second, _ = CHUNKS
    plan = planned(IDS[:HEADER], first, TEXT, second, QUESTION)
    assert (places(plan.exact), places(plan.stale), plan.exact_tokens) == ([(0, 2), (2, 6)], [(9, 13)], 6)
    behind_text = planned(IDS[:HEADER], TEXT, first, QUESTION)
    assert (places(behind_text.exact), places(behind_text.stale)) == ([(0, 2)], [(5, 9)])
    elsewhere = planned((7, 8), first, QUESTION)
    assert (places(elsewhere.exact), places(elsewhere.stale)) == ([], [(2, 6)])
    headless = planned(IDS[:HEADER], first, QUESTION, stored=CHUNKS)
    assert (places(headless.exact), places(headless.stale)) == ([], [(2, 6)]), "the header's own KV is not stored"


@pytest.mark.parametrize("says", [True, False], ids=["every rank", "another rank not"])
def test_a_header_without_exact_kv_on_every_rank_is_computed_if_text_follows(says: bool) -> None:
    first, second, _ = CHUNKS
    for pieces, taken in (
        ((IDS[:HEADER], first, second, QUESTION), True),
        ((IDS[:HEADER], TEXT, first, QUESTION), says),
    ):
        plan = planned(*pieces, agree=lambda exact: exact and says)
        assert (len(plan.stale), bool(plan.exact)) == (1, taken)


def test_the_first_chunk_uses_the_models_own_kv_even_with_a_kv_writer() -> None:
    own, (first, second, _) = entry(4), CHUNKS
    plan = planned(IDS[:HEADER], first, second, QUESTION, own=lambda _: own)
    assert [span.kv is own for span in (*plan.exact, *plan.stale)] == [False, True, False]


@pytest.mark.parametrize(
    ("stored", "reuse", "exact", "stale", "missing"),
    [
        (CHUNKS, "chunks", [(0, 2)], [(6, 10)], ()),
        (CHUNKS[1:], "chunks", [(0, 2)], [(6, 10)], CHUNKS[:1]),
        (CHUNKS, "prefix", [], [], ()),
        (CHUNKS[1:], "prefix", [], [], ()),
        (CHUNKS[:1], "chunks", [], [], CHUNKS[1:2]),
    ],
    ids=["as it was indexed", "not indexed", "the prefix alone", "the prefix, not indexed", "alone"],
)
def test_the_models_own_kv_of_a_first_chunk_is_missing_if_only_a_kv_writer_stored_the_chunk(
    stored: list[Chunk],
    reuse: Any,
    exact: list[tuple[int, int]],
    stale: list[tuple[int, int]],
    missing: Sequence[Chunk],
) -> None:
    first, second, _ = CHUNKS
    header = Chunk("", "", ())
    stored = [header, *stored]
    plan = planned(IDS[:HEADER], first, second, QUESTION, stored=stored, reuse=reuse, own=lambda _: None)
    assert (places(plan.exact), places(plan.stale), plan.lacking("kv")) == (exact, stale, tuple(missing))
    assert plan.lacking("own_kv") == (first,)
    assert plan.outcome().lacking("own_kv") == (first.id,)
    assert ("the model's own KV of it was not stored" in plan.reason) == (first not in missing)


def test_a_first_chunk_whose_own_kv_arrived_too_late_counts_as_stored() -> None:
    first, second, _ = CHUNKS
    stored = [Chunk("", "", ()), second]
    plan = planned(IDS[:HEADER], first, second, QUESTION, stored=stored, own=lambda _: None)
    late = plan.after_late({first.token_ids})
    assert (plan.lacking("own_kv"), late.lacking("own_kv")) == ((first,), ())
    assert (late.lacking("kv"), late.outcome().in_place) == ((), (first.id,))


def test_the_models_own_kv_is_needed_only_for_a_chunk_right_behind_the_header() -> None:
    first, second, _ = CHUNKS
    for pieces in ((IDS[:HEADER], TEXT, first, second, QUESTION), ((7, 8), first, second, QUESTION)):
        plan = planned(*pieces, own=lambda _: None)
        assert (len(plan.stale), plan.lacking("kv"), plan.lacking("own_kv")) == (2, (), ())
    assert planned(IDS[:HEADER], first, second, QUESTION, stored=[]).lacking("own_kv") == (), "there is no KV writer"


def test_the_last_token_is_always_computed() -> None:
    plan = planned(IDS[:HEADER], CHUNKS[0])
    assert (places(plan.exact), places(plan.stale), places(plan.candidates)) == ([(0, 2)], [(2, 6)], [(2, 5)])
    assert places(plan.within(0, 6).candidates) == [(2, 6)], "where its logits are wanted"


def test_prefix_caching_uses_exact_kv_only() -> None:
    first, second, _ = CHUNKS
    assert places(planned(IDS[:HEADER], first, second, QUESTION, reuse="prefix").exact) == [(0, 2), (2, 6)]
    for pieces in (
        (IDS[:HEADER], first, second, QUESTION),
        ((7, 8), first, QUESTION),
        (IDS[:HEADER], TEXT, first, TEXT),
    ):
        assert planned(*pieces, reuse="prefix").stale == ()


@pytest.mark.parametrize("stored", [CHUNKS, []], ids=["the header alone", "all"])
def test_prefix_caching_misses_a_first_chunk_whose_header_is_not_stored(stored: list[Chunk]) -> None:
    first, second, _ = CHUNKS
    plan = planned(IDS[:HEADER], first, second, QUESTION, stored=stored, reuse="prefix")
    assert (plan.uses_stored_kv, plan.lacking("kv")) == (False, (first,))
    for pieces in ((IDS[:HEADER], TEXT, first, QUESTION), ((7, 8), first, QUESTION)):
        plan = planned(*pieces, stored=stored, reuse="prefix")
        assert plan.lacking("kv") == ()
        assert plan.reason == "exact reuse takes a chunk right behind the header, and none stands there"


def test_a_prompt_as_long_as_the_longest_is_planned_and_a_longer_one_is_computed() -> None:
    pieces = (IDS[:HEADER], CHUNKS[0], QUESTION)
    assert planned(*pieces, longest=8).uses_stored_kv
    assert not planned(*pieces, longest=7).uses_stored_kv


def test_a_header_without_a_chunk_is_not_worth_a_blend() -> None:
    plan = planned(IDS[:HEADER], TEXT, CHUNKS[0], QUESTION)
    assert not plan.without(plan.stale, "sooner").uses_stored_kv
    two = planned(IDS[:HEADER], CHUNKS[0], CHUNKS[1], QUESTION)
    assert places(two.without(two.stale, "sooner").exact) == [(0, 2), (2, 6)]


def test_part_of_a_plan_reads_the_tokens_at_its_positions() -> None:
    (span,) = planned((7, 8, 9), CHUNKS[0], QUESTION).within(4, 6).stale
    (again,) = planned((7, 8, 9), CHUNKS[0], QUESTION).within(4, 7).within(5, 7).stale
    for part, want in ((span, [1.0, 2.0]), (again, [2.0, 3.0])):
        assert part.layer(1).k[0, :, 0].tolist() == part.layer(0).v[0, :, 0].tolist() == want
        static = part.static_deviation()
        assert static is not None and static.tolist() == want


def fates(plan: BlendPlan, *, recomputed: Sequence[int] = ()) -> list[tuple[str, int]]:
    return [(chunk.fate, chunk.computed) for chunk in plan.outcome(recomputed=recomputed).chunks]


def test_each_chunk_has_a_record_of_its_fate() -> None:
    first, second, third = CHUNKS
    plan = planned(IDS[:HEADER], first, second, TEXT, third, QUESTION, stored=[Chunk("", "", ()), first, second])
    (a, b, c) = plan.outcome(recomputed=[6, 9, 12]).chunks
    assert [(each.id, each.start, each.tokens) for each in (a, b, c)] == [
        (first.id, 2, 4),
        (second.id, 6, 4),
        (third.id, 10 + len(TEXT), len(third.token_ids)),
    ]
    assert [(each.fate, each.computed, each.lacks) for each in (a, b, c)] == [
        ("exact", 0, ()),
        ("reused", 2, ()),
        ("missing", c.tokens, ("kv",)),
    ]


@pytest.mark.parametrize("exact", [True, False])
def test_chunks_in_the_prefix_cache_are_as_exact_as_the_cached_kv(exact: bool) -> None:
    first, second, third = CHUNKS
    stored = [Chunk("", "", ()), first, second]
    plan = planned(IDS[:HEADER], first, second, third, QUESTION, stored=stored).behind_kept(8, exact)
    assert fates(plan) == [("exact" if exact else "reused", 0), ("reused", 0), ("missing", len(third.token_ids))]
    assert plan.outcome().usage.exact_tokens == 8 * exact
    assert fates(plan.behind_kept(12, exact))[2] == ("missing", len(third.token_ids) - 2)
    unused = plan.without(plan.stale, "computed")
    assert fates(unused)[1] == ("recomputed", 2), "of a chunk that begins in the prefix cache"


@pytest.mark.parametrize(("reuse", "kinds"), [("off", {"recomputed"}), ("prefix", {"exact", "recomputed"})])
def test_chunks_that_are_not_looked_up_are_recomputed(reuse: Any, kinds: set[str]) -> None:
    plan = planned(IDS[:HEADER], *CHUNKS, QUESTION, reuse=reuse)
    assert {fate for fate, _ in fates(plan)} == kinds
    assert not any(chunk.lacks for chunk in plan.outcome().chunks)
