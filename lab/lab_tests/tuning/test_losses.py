"""Tests the losses against the paper's equations, finite differences, and each other."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cacheblend_lab.marginal import log_marginal, posterior
from cacheblend_lab.tuning.training import infonce_loss, kl_loss, loss_of, marginal_loss

numbers = st.floats(-8, 8)
likelihoods = st.floats(-12, -0.01)
candidates = st.integers(2, 6).flatmap(
    lambda count: st.tuples(
        st.lists(numbers, min_size=count, max_size=count), st.lists(likelihoods, min_size=count, max_size=count)
    )
)


def tensors(drawn: tuple[list[float], list[float]]) -> tuple[torch.Tensor, torch.Tensor]:
    relevance, reader = (torch.tensor([values], dtype=torch.float64) for values in drawn)
    return relevance.requires_grad_(), reader


@given(candidates)
def test_the_marginal_is_the_sum_over_candidates_and_the_null_document(drawn) -> None:
    relevance, reader = drawn
    weights = [math.exp(f) for f in relevance]
    want = sum(w / sum(weights) * math.exp(log_p) for w, log_p in zip(weights, reader, strict=True))
    assert float(log_marginal(*tensors(drawn)).detach().exp()) == pytest.approx(want, rel=1e-12)


@given(candidates)
def test_the_marginal_over_all_possible_answers_is_one(drawn) -> None:
    relevance, values = tensors(drawn)
    # Each candidate has three answers that exclude each other and leave nothing.
    answers = torch.stack([values[0], -values[0], values[0] / 2]).log_softmax(0)
    total = sum(float(log_marginal(relevance, row[None]).detach().exp()) for row in answers)
    assert total == pytest.approx(1, abs=1e-12)


@given(candidates)
def test_the_gradient_is_posterior_minus_prior_by_autograd_and_by_finite_differences(drawn) -> None:
    relevance, reader = tensors(drawn)
    log_marginal(relevance, reader).sum().backward()
    want = posterior(relevance.detach(), reader) - relevance.detach().softmax(-1)
    assert torch.allclose(relevance.grad, want, rtol=0, atol=1e-10)
    step = 1e-5
    for at in range(relevance.shape[1]):
        ends = []
        for sign in (1, -1):
            moved = relevance.detach().clone()
            moved[0, at] += sign * step
            ends.append(float(log_marginal(moved, reader)))
        assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(float(want[0, at]), abs=1e-6)


@given(candidates)
def test_kl_is_zero_only_if_retriever_and_reader_prefer_the_same_candidates(drawn) -> None:
    relevance, reader = tensors(drawn)
    assert float(kl_loss(reader + 3.0, reader)) == pytest.approx(0, abs=1e-12)
    p, q = reader.softmax(-1)[0], relevance.detach().softmax(-1)[0]
    want = sum(float(a) * math.log(float(a) / float(b)) for a, b in zip(p, q, strict=True))
    assert float(kl_loss(relevance, reader).detach()) == pytest.approx(want, abs=1e-9)


def test_infonce_leaves_out_rivals_that_the_reader_likes_as_well() -> None:
    relevance = torch.tensor([[1.0, 3.0, 0.0]])
    alike, worse = torch.tensor([[-0.1, -0.2, -9.0]]), torch.tensor([[-0.1, -2.0, -9.0]])
    assert float(infonce_loss(relevance, alike)) == pytest.approx(-math.log(math.e / (math.e + 1)))
    assert float(infonce_loss(relevance, worse)) == pytest.approx(-math.log(math.e / (math.e + math.e**3 + 1)))


@pytest.mark.parametrize("name", ["marginal", "kl", "infonce"])
def test_a_step_down_each_loss_raises_the_readers_favourite(name) -> None:
    relevance = torch.zeros(1, 4, requires_grad=True)
    reader = torch.tensor([[-6.0, -0.1, -6.0, -4.0]])
    loss_of(name, relevance, reader).backward()
    step = -relevance.grad[0]
    assert int(step.argmax()) == 1 and all(float(step[at]) < 0 for at in (0, 2, 3))


def test_padded_candidates_change_no_loss() -> None:
    relevance, reader = torch.tensor([[0.3, -0.2]]), torch.tensor([[-1.0, -3.0]])
    wider, reader_wider = (torch.nn.functional.pad(each, (0, 2), value=-1e4) for each in (relevance, reader))
    for loss in (marginal_loss, kl_loss, infonce_loss):
        assert float(loss(wider, reader_wider)) == pytest.approx(float(loss(relevance, reader)), abs=1e-6)
