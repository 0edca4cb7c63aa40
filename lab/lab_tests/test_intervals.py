"""Tests intervals, and the scores used only in evaluation."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binomtest

from cacheblend_lab.intervals import mean_interval, quantile_interval, share_interval
from cacheblend_lab.metrics import f1_of_tokens, rouge_l
from cacheblend_rag.calibrate.metrics import f1
from cacheblend_rag.prompts.chunk import encoder_for
from tests.conftest import tokenizer_named


def test_f1_over_tokens_counts_parts_of_words():
    tokenizer = tokenizer_named("byte_level")
    assert f1("observatories", ["observatory"]) == 0
    assert 0 < f1_of_tokens("observatories", ["observatory"], encoder_for(tokenizer).document) < 1
    assert f1_of_tokens("The Observatory", ["observatory"], encoder_for(tokenizer).document) == 1
    assert f1_of_tokens("", ["observatory"], encoder_for(tokenizer).document) == 0


def test_rouge_l_takes_the_best_reference():
    assert rouge_l("the cat sat on the mat", ["dogs bark", "the cat sat on a mat"]) == pytest.approx(5 / 6)


def test_intervals_of_grouped_values_are_wider_than_those_of_independent_ones():
    values = [float(i % 2) for i in range(40) for _ in range(10)]
    groups = [str(i) for i in range(40) for _ in range(10)]
    low, high = mean_interval(values, groups)
    alone_low, alone_high = mean_interval(values, [""] * len(values))
    assert low < 0.5 < high
    assert (high - low) > 2 * (alone_high - alone_low)


def test_few_groups_still_give_an_interval_with_width():
    low, high = mean_interval([0.0, 1.0] * 10, ["only"] * 20)
    assert low < 0.5 < high


def test_intervals_cover_the_true_mean_about_as_often_as_stated():
    generator = np.random.default_rng(1)
    covered = 0
    for _ in range(100):
        values = generator.normal(3.0, 1.0, 60).tolist()
        low, high = mean_interval(values, [""] * 60)
        covered += low <= 3.0 <= high
    assert 85 <= covered <= 100


def test_a_quantiles_interval_contains_the_quantile():
    values = list(map(float, range(100)))
    low, high = quantile_interval(values, quantile=0.9)
    assert low < np.quantile(values, 0.9) < high


@pytest.mark.parametrize(("ones", "n"), [(0, 1), (1, 1), (1, 2), (5, 5), (3, 20), (40, 40)])
def test_a_shares_interval_is_the_exact_binomial_one_and_has_width(ones, n):
    found = share_interval([1.0] * ones + [0.0] * (n - ones), [""] * n)
    assert found == pytest.approx(tuple(binomtest(ones, n).proportion_ci(0.95, "exact")))
    assert found[0] < found[1]


def test_a_shares_interval_is_wider_for_questions_that_share_chunks():
    values = [float(i % 2) for i in range(40) for _ in range(10)]
    groups = [str(i) for i in range(40) for _ in range(10)]
    assert share_interval(values, groups) == pytest.approx(share_interval(values[::10], [""] * 40))
    # If all agree, questions about the same chunks prove no more than one of them.
    assert share_interval([1.0] * 400, groups) == pytest.approx(share_interval([1.0] * 40, [""] * 40))
    mixed = share_interval([1.0, 0.0] * 200, groups)
    assert mixed == pytest.approx(share_interval([1.0, 0.0] * 200, [""] * 400))


def test_intervals_of_shares_cover_the_true_share_at_least_as_often_as_stated():
    generator = np.random.default_rng(2)
    covered = 0
    for _ in range(300):
        share = generator.uniform(0.5, 1.0)
        low, high = share_interval((generator.random(12) < share).astype(float).tolist(), [""] * 12)
        covered += low <= share <= high
    assert covered >= 285


@pytest.mark.parametrize("values", [[0.3], [0.3, 0.9, 0.1, 0.2], [0.7] * 30])
def test_too_few_or_equal_values_have_no_bootstrap_interval(values):
    assert mean_interval(values, [""] * len(values)) is None
    assert quantile_interval(values) is None
