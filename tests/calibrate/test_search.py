"""Tests the rules of calibration on made-up measurements: results shown, candidates given up, candidates chosen."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend_rag.calibrate.candidates import RATIOS, Candidate, LayerFinding, estimate_compute, list_candidates
from cacheblend_rag.calibrate.compared import Comparison
from cacheblend_rag.calibrate.intervals import share_bounds
from cacheblend_rag.calibrate.search import LOOK, Search, Trial
from cacheblend_rag.calibrate.standard import MIN_RESAMPLED, Result, Standard
from cacheblend_rag.errors import InputError

TOKENS = 4
LOOSE = Standard(0.9, 0.95)


def compared(wrong: int = 0, kl: float = 0.0, tokens: int = TOKENS) -> Comparison:
    return Comparison((False,) * wrong + (True,) * (tokens - wrong), (kl,) * tokens, 0.1)


def results(wrong: list[int]) -> list[Result]:
    return [(str(number), compared(count)) for number, count in enumerate(wrong)]


def test_the_needed_number_of_prompts_is_just_enough() -> None:
    for standard in (Standard(), LOOSE, Standard(0.999, 0.9)):
        clean = [(str(number), compared()) for number in range(standard.needed)]
        assert standard.shown_by(clean)
        assert not standard.shown_by(clean[1:])
    assert Standard().needed == 299


def test_one_wrong_answer_does_not_fail_the_usual_number_of_prompts() -> None:
    standard = Standard()
    assert not standard.shown_by(results([TOKENS] + [0] * (standard.needed - 1)))
    assert standard.shown_by(results([TOKENS] + [0] * (standard.usual - 1)))
    # A wrong answer in every hundred prompts must fail.
    assert not standard.shown_by(results([TOKENS if number % 100 == 0 else 0 for number in range(standard.usual)]))


def test_more_tokens_or_prompts_about_the_same_chunks_do_not_count_as_more_prompts() -> None:
    few = [(str(number % 50), compared(tokens=100)) for number in range(500)]
    assert not Standard().shown_by(few)


@settings(max_examples=50)
@given(st.lists(st.integers(0, TOKENS), min_size=2, max_size=60), st.integers(0, 59))
def test_a_further_disagreement_never_raises_the_bound(wrong: list[int], at: int) -> None:
    at %= len(wrong)
    before = LOOSE.bounds(results(wrong))
    # A prompt with disagreement in all tokens replaces one with disagreement in some or none.
    after = LOOSE.bounds(results([*wrong[:at], TOKENS, *wrong[at + 1 :]]))
    assert after.value <= before.value
    assert before.low <= before.value <= before.high
    clean = LOOSE.bounds(results([0] * len(wrong)))
    assert before.low <= clean.low


@settings(max_examples=50)
@given(st.lists(st.integers(0, TOKENS), min_size=1, max_size=40), st.integers(0, 39))
def test_candidates_given_up_could_not_have_been_shown(wrong: list[int], seen: int) -> None:
    seen = 1 + seen % len(wrong)
    whole = results(wrong)
    # `within_reach` imagines the remaining prompts at their best; the actual ones are no better.
    best = results([*wrong[:seen], *[0] * (len(wrong) - seen)])
    if not LOOSE.within_reach(whole[:seen], [group for group, _ in whole[seen:]]):
        assert not LOOSE.shown_by(best)


def test_one_completely_failing_prompt_weighs_more_than_as_many_tokens_of_several_prompts() -> None:
    spread = results([1] * 4 + [0] * 96)
    together = results([4] + [0] * 99)
    assert LOOSE.bounds(together).value == LOOSE.bounds(spread).value
    assert LOOSE.bounds(together).low < LOOSE.bounds(spread).low


def test_likelihood_is_bounded_by_resampling_prompts() -> None:
    standard = Standard(0.99, 0.95, "likelihood")
    assert standard.needed == MIN_RESAMPLED
    steady = [(str(n), compared(kl=0.005)) for n in range(MIN_RESAMPLED)]
    assert standard.shown_by(steady)
    assert not standard.shown_by(steady[1:])
    assert standard.bounds(steady).value == pytest.approx(math.exp(-0.005))
    # The average is as near, but one prompt is far off.
    heavy = [(str(n), compared(kl=0.1 if n == 0 else 0.0)) for n in range(MIN_RESAMPLED)]
    assert standard.supported_by(heavy)
    assert not standard.shown_by(heavy)


@pytest.mark.parametrize("wrong", [{"agreement": 1.0}, {"agreement": 0.2}, {"confidence": 1.0}, {"confidence": 95}])
def test_an_unreachable_standard_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        Standard(**wrong)  # type: ignore[arg-type]


def test_bounds_of_a_share_hold_as_often_as_their_confidence() -> None:
    import numpy as np

    rng = np.random.default_rng(0)
    below = 0
    for _ in range(200):
        # Each run has 60 prompts of four tokens that fail together or not at all: a true agreement of 90%.
        fails = rng.random(60) < 0.1
        values = [0.0 if fail else 1.0 for fail in fails for _ in range(4)]
        below += share_bounds(values, [str(n) for n in range(60) for _ in range(4)], 0.95)[0] <= 0.9
    assert below / 200 >= 0.92


World = Callable[[int, Candidate], Comparison]


def run(
    candidates: list[Candidate], world: World, prompts: int, standard: Standard = LOOSE
) -> tuple[Trial | None, Search]:
    search = Search(candidates, [str(n) for n in range(prompts)], standard, world)
    return search.run(), search


STATIC = [Candidate("static", ratio) for ratio in RATIOS]


def from_ratio(enough: float, kl: float = 0.0) -> World:
    """Make a world where ratios from ``enough`` on always agree, and lower ones disagree on every second prompt."""
    return lambda number, each: compared() if each.ratio >= enough else compared(2 * (number % 2), kl)


@pytest.mark.parametrize("enough", [0.01, 0.05, 0.18, 0.45, 0.6])
@pytest.mark.parametrize("prompts", [3, LOOK, LOOSE.needed, 2 * LOOSE.needed])
def test_the_cheapest_passing_candidate_is_chosen_however_few_the_prompts(enough: float, prompts: int) -> None:
    chosen, search = run(STATIC, from_ratio(enough), prompts)
    assert chosen is not None
    assert chosen.candidate.ratio == enough
    assert len(chosen.results) == prompts
    assert search.enough_prompts == (prompts >= LOOSE.needed)


def test_no_candidate_is_chosen_if_none_passes_and_few_prompts_are_measured() -> None:
    calls = 0

    def world(number: int, each: Candidate) -> Comparison:
        nonlocal calls
        calls += 1
        return compared(2)

    chosen, search = run(STATIC, world, 40)
    assert chosen is None
    assert calls == 3 * LOOK  # the middle of eleven ratios, one between it and the last, the last
    assert all(trial.given_up for trial in search.trials)


def test_candidates_of_another_policy_are_tried_only_if_cheaper() -> None:
    by_question = [Candidate("static-query", ratio) for ratio in RATIOS]
    both = [each for pair in zip(STATIC, by_question, strict=True) for each in pair]
    world: World = lambda number, each: compared(0 if each.policy == "static" and each.ratio >= 0.18 else 4)  # noqa: E731
    chosen, search = run(both, world, 40)
    assert chosen is not None
    assert chosen.candidate == Candidate("static", 0.18)
    looked = [trial.candidate.ratio for trial in search.trials if trial.candidate.policy == "static-query"]
    assert looked == [0.12, 0.18]  # the most expensive one below static at 18%, and its neighbour


def near_as(kl: float) -> Standard:
    return Standard.as_near_as(6).measured([Comparison((True,), (kl,), 1.0)])


def test_a_kl_standard_gives_up_a_blend_that_few_prompts_contradict() -> None:
    standard = near_as(0.01)
    assert standard.most_kl == pytest.approx(0.01)
    left = [str(number) for number in range(LOOK, 40)]
    for kl, goes_on in ((0.009, True), (0.02, False)):
        tried = [(str(number), compared(kl=kl + 0.001 * (-1) ** number)) for number in range(LOOK)]
        assert standard.within_reach(tried, left) is goes_on
        assert standard.within_reach(tried[:-1], left)  # too few prompts to decide
    # One prompt far off predicts little about the remaining ones.
    one_off = [(str(number), compared(kl=0.1 if number == 3 else 0.0)) for number in range(LOOK)]
    assert standard.within_reach(one_off, left)


def test_weights_too_coarse_to_recognise_the_model_are_refused_as_a_standard() -> None:
    with pytest.raises(InputError, match=r"2 bits are 1\.00 nats"):
        Standard.as_near_as(2).measured([Comparison((False,), (1.0,), 1.0)])


def losing(*losses: float) -> list[Result]:
    return [(str(number), Comparison((True,), (5.0,), 1.0, loss)) for number, loss in enumerate(losses)]


def test_a_metric_standard_judges_only_by_the_t_bound_of_the_loss() -> None:
    standard = Standard.as_good_by("f1", None, 0.95)
    assert (standard.agreement, standard.needed, standard.usual) == (0.95, 59, 118)
    clean = losing(*[0.0] * 59)
    assert standard.shown_by(clean)  # KL does not matter
    assert not standard.shown_by(clean[1:])
    assert standard.supported_by(losing(0.1, 0.0))
    assert not standard.supported_by(losing(0.3, 0.0))
    # Gains make up for losses, and spread widens the bound: here 0.0 +- 0.5 * 1.66 / sqrt(100).
    mixed = losing(*[0.5, -0.5] * 50)
    assert not standard.shown_by(mixed)
    assert standard.bounds(mixed).low == pytest.approx(1 - 0.5 * 1.66 / 10, abs=1e-3)
    assert standard.shown_by(losing(*[0.5, -0.5] * 200))
    alike = [("one group", each) for _, each in losing(*[0.0] * 100)]
    assert not standard.shown_by(alike)
    assert (standard.bounds(alike).low, standard.bounds(alike).high) == (0.0, 2.0)


def test_a_metric_standard_gives_up_a_blend_that_few_answers_contradict() -> None:
    standard, left = Standard.as_good_by("em", 0.9, 0.95), [str(number) for number in range(LOOK, 40)]
    assert standard.within_reach(losing(1.0, *[0.0] * (LOOK - 1)), left)
    assert not standard.within_reach(losing(*[1.0] * 4, *[0.0] * (LOOK - 4)), left)


def test_questions_that_full_recompute_cannot_answer_are_refused_as_a_standard() -> None:
    standard = Standard.as_good_by("em", None, 0.95)
    assert standard.scored([1.0, 0.0]).full == 0.5
    with pytest.raises(InputError, match=r"exact match of full recompute on these questions is 4\.0%"):
        standard.scored([1.0] + [0.0] * 24)


def test_full_kv_reuse_is_chosen_only_if_shown() -> None:
    everything = [Candidate("full-reuse", 0.0), *STATIC]
    for prompts, ratio in ((LOOSE.needed - 1, RATIOS[0]), (LOOSE.needed, 0.0)):
        chosen, _ = run(everything, lambda number, each: compared(), prompts)
        assert chosen is not None
        assert chosen.candidate.ratio == ratio


def test_few_prompts_reject_an_agreeing_ratio_with_high_kl() -> None:
    agrees_by_luck: World = lambda number, each: compared(kl=1.0 if each.ratio < 0.05 else 0.0)  # noqa: E731
    chosen, _ = run(STATIC, agrees_by_luck, 6)
    assert chosen is not None
    assert chosen.candidate.ratio == 0.05


def test_a_failure_in_a_late_prompt_moves_on_to_the_next_ratio() -> None:
    late: World = lambda number, each: compared(4 if each.ratio < 0.05 and number >= 25 else 0)  # noqa: E731
    chosen, search = run(STATIC, late, 40)
    assert chosen is not None
    assert chosen.candidate.ratio == 0.05
    given_up = [trial for trial in search.trials if trial.given_up]
    assert sorted(trial.candidate.ratio for trial in given_up) == [0.01, 0.02, 0.03]
    assert all(LOOK < len(trial.results) < 40 for trial in given_up)


@pytest.mark.parametrize(
    ("enough", "steps", "ratio"), [(0.03, 1, 0.05), (0.03, 2, 0.08), (0.03, 0, 0.03), (0.6, 1, 0.6)]
)
def test_a_margin_moves_that_many_ratios_up_and_is_measured_on_all_prompts(
    enough: float, steps: int, ratio: float
) -> None:
    least, search = run(STATIC, from_ratio(enough), 40)
    assert least is not None
    above = search.step_above(least, steps)
    assert above.candidate == Candidate("static", ratio)
    assert len(above.results) == 40
    assert [trial.candidate.ratio for trial in search.trials].count(ratio) == 1


def test_a_margin_with_worse_results_is_not_taken() -> None:
    world: World = lambda number, each: compared(0 if each.ratio == 0.03 else 4 * (number > 20))  # noqa: E731
    least, search = run(STATIC, world, 40)
    assert least is not None
    assert least.candidate.ratio == 0.03
    assert search.step_above(least, 1) is least


def test_full_kv_reuse_has_no_ratio_above_it() -> None:
    least, search = run([Candidate("full-reuse", 0.0), *STATIC], lambda number, each: compared(), LOOSE.needed)
    assert least is not None
    assert search.step_above(least, 1) is least


def test_a_policy_that_needs_attention_is_left_out_without_attention() -> None:
    def world(number: int, each: Candidate) -> Comparison:
        if each.policy == "static-query":
            raise InputError("no attention")
        return compared(4)

    _, search = run([Candidate("static-query", 0.1), Candidate("static", 0.2)], world, 4)
    assert [trial.candidate.policy for trial in search.trials] == ["static"]


def layer(number: int, *, visible: float = 1.0, offered: bool = True) -> LayerFinding:
    return LayerFinding(number, 0.9, visible, offered)


def test_candidates_are_ordered_by_total_compute() -> None:
    found = list_candidates([layer(1), layer(2)], 8, 0.7, 0.01, ranked=True)
    costs = [estimate_compute(each, 8, 0.7, 0.01) for each in found]
    assert costs == sorted(costs)
    assert found[0] == Candidate("full-reuse", 0.0)
    assert {each.policy for each in found} == {"full-reuse", "static", "query", "static-query", "hkvd"}
    assert max(each.ratio for each in found) > 0.3
    # The dense pass of a quarter of the layers counts: static at 18% is cheaper than hkvd at 1%.
    assert found.index(Candidate("static", 0.18)) < found.index(Candidate("hkvd", 0.01, (2,), (1.0,)))


def test_a_blind_layer_is_not_offered_and_ratios_stay_below_the_deviating_share() -> None:
    found = list_candidates([layer(1, offered=False), layer(2, visible=0.2)], 8, 0.7, 0.01, ranked=False)
    hkvd = [each for each in found if each.policy == "hkvd"]
    assert {each.check_layers for each in hkvd} == {(2,)}
    assert max(each.ratio for each in hkvd) == 0.18


def test_policies_that_need_ranks_are_left_out_without_ranks() -> None:
    found = list_candidates([layer(1)], 8, 0.7, 0.01, ranked=False)
    assert {each.policy for each in found} == {"full-reuse", "query", "hkvd"}
