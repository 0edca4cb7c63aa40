"""The fusor and its loader over a model that computes nothing: placed KV, measurements, chosen tokens and passes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cacheblend_rag.blending.bulk import StoredLayers
from cacheblend_rag.blending.fusor import FuseResult, OtherRankError, fuse, fuse_stepwise
from cacheblend_rag.blending.loader import LayerLoader
from cacheblend_rag.blending.plan import BlendPlan, PlannedChunk, StoredSpan
from cacheblend_rag.blending.policies import Candidates, SelectionPolicy, policy
from cacheblend_rag.blending.reads import NotYetError, UnusableSpanError
from cacheblend_rag.blending.rope import Move, Rope, moved
from cacheblend_rag.blending.settings import FuseOptions
from cacheblend_rag.errors import InputError
from cacheblend_rag.prompts.chunk import Chunk
from cacheblend_rag.prompts.prompt import ChunkSpan
from cacheblend_rag.store.kv import ChunkKV, LayerKV

LAYERS, HEADS, DIM = 4, 2, 8
HEADER, FIRST, TEXT, SECOND, QUESTION = range(2), range(2, 6), range(6, 8), range(8, 18), range(18, 20)
HERE = torch.device("cpu")


def table(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    angles = positions[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.03]).repeat(2)
    return angles.cos(), angles.sin()


ROPE = Rope([table], [0] * LAYERS, ["half"] * LAYERS)


def bare(seed: int, tokens: int) -> list[LayerKV]:
    """KV of a chunk's tokens, layer by layer, keys as at position 0."""
    drawn = torch.Generator().manual_seed(seed)
    return [LayerKV(*(torch.rand(HEADS, tokens, DIM, generator=drawn) for _ in "kv")) for _ in range(LAYERS)]


def at(layer: LayerKV, first: int) -> LayerKV:
    """Move the same tokens' keys to position ``first`` and the following."""
    tokens = torch.arange(layer.k.shape[1])
    return LayerKV(ROPE.rotate(0, layer.k, ROPE.rotations(torch.zeros_like(tokens), tokens + first)), layer.v)


def stored(seed: int, tokens: int, start: int, static: torch.Tensor | None = None, tier: str = "ram") -> ChunkKV:
    return ChunkKV([at(layer, start) for layer in bare(seed, tokens)], start, tier, static)


STATIC = torch.tensor([0.0, 5.0, 1.0, 0.5, 4.0, 0.2, 3.0, 0.1, 2.0, 0.3])


def plan(static: torch.Tensor | None = STATIC, **changes: Any) -> BlendPlan:
    """Header and first chunk exact, then text, a chunk that was computed behind the header, and the question."""
    exact = (StoredSpan(0, 2, stored(1, 2, 0)), StoredSpan(2, 6, stored(2, 4, 2), Chunk("a", "a", (1,) * 4)))
    stale = (StoredSpan(8, 18, stored(3, 10, 2, static), Chunk("b", "b", (2,) * 10)),)
    chunks = [
        PlannedChunk(ChunkSpan(span.chunk, span.start, span.end), fate)
        for fate, span in (("exact", exact[1]), ("reused", stale[0]))
    ]
    return BlendPlan(20, exact, stale, "", tuple(chunks), **changes)


class Target:
    """Notes the KV that it receives; fresh KV is the stored KV, at its positions, except for the tokens that ``moves``
    names."""

    num_layers, rope, device, shows_attention = LAYERS, ROPE, HERE, True

    def __init__(self, keys: tuple[int, ...] = (), values: tuple[int, ...] = (), votes: Iterator[bool] | None = None):
        self._keys, self._values, self._votes = keys, values, votes
        self.placed: dict[int, tuple[LayerKV, list[int]]] = {}
        self.ran: list[list[int]] = []
        self.brought: list[int] = []
        self.seen = torch.rand(20, generator=torch.Generator().manual_seed(9))

    def place(self, layer: int, kv: LayerKV, positions: torch.Tensor, move: Move | None) -> None:
        self.placed[layer] = moved(kv, move), positions.tolist()

    def place_layers(self, stored: StoredLayers) -> Callable[[int], None]:
        return self.brought.append

    def forward(self, positions: torch.Tensor, before_layer: Any, stop_layer: int | None = None) -> LayerKV | None:
        for layer in range(LAYERS if stop_layer is None else stop_layer + 1):
            before_layer(layer)
        self.ran.append(positions.tolist())
        if stop_layer is None:
            return None
        right = at(bare(3, 10)[stop_layer], SECOND.start)
        k, v = (torch.zeros(HEADS, 20, DIM) for _ in "kv")
        k[:, SECOND.start : SECOND.stop], v[:, SECOND.start : SECOND.stop] = right.k, right.v
        k[:, self._keys] += 0.01  # less than a rotation changes
        v[:, self._values] += 0.01
        return LayerKV(k[:, positions], v[:, positions])

    def attention(self, watch_from: int, before_layer: Any) -> Any:
        def run(positions: torch.Tensor) -> None:
            self.forward(positions, before_layer)

        return SimpleNamespace(run=run, mean=lambda: self.seen)

    def segment(self, positions: torch.Tensor, most: int | None = None) -> torch.Tensor:
        return positions[:most]

    def all_reduce(self, deviation: torch.Tensor) -> torch.Tensor:
        return deviation

    def agree(self, ok: bool) -> bool:
        return ok if self._votes is None else next(self._votes) and ok


def blended(
    target: Target, chosen: SelectionPolicy | str, ratio: float, *layers: int, of: BlendPlan | None = None
) -> FuseResult:
    widths = (*(3.0 - i for i in range(len(layers) - 1)), 1.0)
    named = policy(chosen) if isinstance(chosen, str) else chosen
    return fuse(of or plan(), target, FuseOptions(named, ratio, layers or (1,), widths))  # type: ignore[arg-type]


class Spy(SelectionPolicy):
    """Chooses all tokens, and notes the candidates."""

    name = "spy"

    def __init__(self, mask: Callable[[Candidates], torch.Tensor] = lambda c: torch.ones(len(c.positions)) > 0):
        self.mask = mask

    def score(self, candidates: Candidates) -> torch.Tensor:
        raise NotImplementedError

    def select(self, candidates: Candidates, count: int) -> torch.Tensor:
        self.shown, self.count = candidates, count
        return self.mask(candidates)


@pytest.mark.parametrize(("ratio", "count"), [(0.28, 3), (0.22, 2), (0.06, 1), (0.04, 0)])
def test_the_number_of_recomputed_tokens_is_the_rounded_ratio(ratio: float, count: int) -> None:
    best = (STATIC.argsort(descending=True)[:count] + SECOND.start).sort().values
    assert torch.equal(blended(Target(), "static", ratio).recomputed, best)
    deviating = tuple(best.tolist())
    assert blended(Target(keys=deviating), "hkvd", ratio).recomputed.tolist() == list(deviating)


@pytest.mark.parametrize("layers", [(1,), (1, 2), (1, 2, 3)])
def test_tokens_with_deviating_keys_or_values_are_recomputed(layers: tuple[int, ...]) -> None:
    target = Target(keys=(11, 16), values=(13,))
    assert blended(target, "hkvd", 0.3, *layers).recomputed.tolist() == [11, 13, 16]
    assert target.ran[1] == [*SECOND], "all behind the front, up to the last candidate"
    assert target.ran[-1] == [11, 13, 16, *QUESTION]


@pytest.mark.parametrize("name", ["static-query", "query", "hkvd", "hybrid"])
def test_text_in_front_of_the_first_stale_chunk_is_computed_once_and_before_the_question(name: str) -> None:
    target = Target()
    done = blended(target, name, 0.3, 1)
    assert target.ran[0] == [*TEXT]
    assert all(position not in TEXT for run in target.ran[1:] for position in run)
    assert done.outcome.usage.computed_tokens == len(TEXT) + 3 + len(QUESTION)
    question = len(QUESTION) if name != "hkvd" else 0
    dense = len(SECOND) / LAYERS if name in ("hkvd", "hybrid") else 0
    assert done.outcome.usage.selection_tokens == question + dense, "the front chooses nothing"


def test_a_policy_that_measures_nothing_takes_one_pass() -> None:
    target = Target()
    blended(target, "static", 0.3)
    assert target.ran == [[*TEXT, 9, 12, 14, *QUESTION]]


def test_every_layer_is_placed_once_at_the_prompts_positions_and_exact_kv_keeps_its_bits() -> None:
    target = Target()
    blended(target, "static", 0.3)
    assert list(target.placed) == list(range(LAYERS))
    for layer, (kv, positions) in target.placed.items():
        assert positions == [*HEADER, *FIRST, *SECOND]
        exact = [at(bare(seed, count)[layer], first) for seed, count, first in ((1, 2, 0), (2, 4, 2))]
        assert torch.equal(kv.k[:, :6], torch.cat([part.k for part in exact], 1))
        torch.testing.assert_close(kv.k[:, 6:], at(bare(3, 10)[layer], SECOND.start).k)
        assert torch.equal(kv.v[:, 6:], bare(3, 10)[layer].v)


def test_layers_below_the_check_layer_read_no_stale_kv_unless_the_question_runs_first() -> None:
    asked, measured = Target(), Target()
    blended(measured, "hkvd", 0.3, 2)
    assert [len(measured.placed[layer][1]) for layer in range(LAYERS)] == [6, 6, 16, 16]
    blended(asked, "hybrid", 0.3, 2)
    assert [len(asked.placed[layer][1]) for layer in range(LAYERS)] == [16] * LAYERS


def test_a_policy_receives_the_attention_to_its_candidates() -> None:
    class Asking(Spy):
        needs_attention = True

    spy, target = Asking(), Target()
    blended(target, spy, 0.3)
    assert spy.shown.positions.tolist() == list(SECOND) and spy.count == 3
    assert spy.shown.attention is not None
    assert torch.equal(spy.shown.attention, target.seen[list(SECOND)])


def test_stored_kv_is_placed_even_if_no_token_is_computed() -> None:
    target = Target()
    blended(target, "full-reuse", 0.0, of=plan().within(0, 6))
    assert (list(target.placed), target.ran) == (list(range(LAYERS)), [])


@pytest.mark.parametrize("wrong", [torch.ones(10), torch.ones(9) > 0, torch.ones(10, 1) > 0])
def test_a_mask_without_one_boolean_per_candidate_is_refused(wrong: torch.Tensor) -> None:
    with pytest.raises(InputError, match="'spy' returned"):
        blended(Target(), Spy(lambda _: wrong), 0.3)


def test_no_rank_uses_its_ranking_if_another_rank_has_none() -> None:
    votes = iter([False, *[True] * 20])
    done = blended(Target(votes=votes), "static", 0.3)
    assert done.outcome.policy != "static"
    first, second = done.outcome.chunks
    assert (first.fate, first.computed) == ("exact", 0)
    assert first.load is not None
    assert first.load.tier == "ram"
    assert (second.fate, second.computed) == ("reused", len(done.recomputed))
    assert done.outcome.lacking("static") == ("b",)


def test_no_rank_continues_if_another_rank_cannot_place_a_layer() -> None:
    with pytest.raises(OtherRankError):
        blended(Target(votes=iter([False] * 20)), "hkvd", 0.3)


def test_the_pass_after_an_abandoned_blend_waits_for_kv_still_being_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LayerLoader, "rest", lambda self, first: StoredLayers(first, (), (), torch.empty(0)))
    target = Target()
    steps = fuse_stepwise(plan(), target, FuseOptions(policy("static"), 0.3))  # type: ignore[arg-type]
    assert next(steps).kind == "sparse"
    steps.close()
    assert target.brought == [LAYERS - 1]


def loader(spans: tuple[StoredSpan, ...] = (), **options: Any) -> LayerLoader:
    """Make a loader of the plan's spans, or of other, stale spans."""
    of = plan()
    return LayerLoader(() if spans else of.exact, spans or of.stale, ROPE, LAYERS, HERE, **options)


def test_part_of_an_entry_is_moved_from_the_position_at_which_it_was_computed() -> None:
    (part,) = plan().within(11, 15).stale
    with loader((part,)) as loading:
        placed = loading.layer(2)
        assert placed is not None and placed.positions.tolist() == [11, 12, 13, 14]
        torch.testing.assert_close(placed.moved().kv.k, at(bare(3, 10)[2], SECOND.start).k[:, 3:7])


def test_stale_spans_are_loaded_from_the_first_stale_layer_on() -> None:
    with loader(stale_from_layer=2) as loading:
        assert [len(placed.positions) for layer in range(LAYERS) if (placed := loading.layer(layer))] == [6, 6, 16, 16]


def test_entries_in_ram_are_never_overdue_or_late() -> None:
    far = StoredSpan(18, 28, stored(4, 10, 2, tier="disk"))
    with loader((*plan().stale, far), most_wait_s=0.0) as loading:
        assert loading.too_late().spans == (far,)
    with loader(most_wait_s=0.0) as loading:
        assert loading.ready and not loading.overdue


def test_time_already_waited_is_subtracted_from_the_remaining_wait() -> None:
    left: list[float | None] = []

    def late(index: int, seconds: float | None) -> Any:
        left.append(seconds)
        raise NotYetError

    with loader(most_wait_s=3.0) as loading:
        loading.wait_s, loading._reads.parts = 2.0, late  # type: ignore[method-assign]
        with pytest.raises(UnusableSpanError, match="is late"):
            loading.layer(0)
    assert left == [1.0]


def test_a_failed_blend_does_not_wait_for_reads_already_begun() -> None:
    go_on, ended = threading.Event(), threading.Event()

    class Slow(ChunkKV):
        def layer(self, index: int) -> LayerKV:
            go_on.wait(20)
            ended.set()
            return super().layer(index)

    slow = Slow([at(layer, 2) for layer in bare(4, 10)], 2, "disk")
    with pytest.raises(ZeroDivisionError), loader((StoredSpan(18, 28, slow),)):
        raise ZeroDivisionError
    assert not ended.is_set()
    go_on.set()
