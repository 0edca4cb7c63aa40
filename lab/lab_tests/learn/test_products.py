"""Frugal products give the losses and gradients of peft's forward, with any weights, and narrow only exact values."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from cacheblend_lab.learn import adapter, products
from cacheblend_lab.learn.adapter import weights_of, writing_copy
from cacheblend_lab.learn.blend import BatchBlender, Lesson
from cacheblend_lab.learn.products import NarrowLinear, hold_narrow, product
from lab_tests.learn.test_blend import FAMILIES, batch_of, like
from tests.blending.families import BLENDED, make_model
from tests.blending.prompts import Scene


@pytest.mark.parametrize("family", FAMILIES)
def test_a_frugal_writer_has_the_loss_and_the_gradients_of_pefts_forward(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "_BLOCK", 1000)  # several blocks for each weight
    model = make_model(BLENDED[family]())
    for tensor in model.parameters():
        tensor.data = tensor.data.bfloat16().float()
    narrow = copy.deepcopy(model)
    hold_narrow(narrow)
    assert any(isinstance(module, NarrowLinear) for module in narrow.modules())
    frugal = Lesson(BatchBlender(narrow), writing_copy(narrow, rank=2))
    monkeypatch.setattr(adapter, "make_frugal", lambda writing: None)
    plain = Lesson(BatchBlender(model), writing_copy(model, rank=2))
    batch = batch_of([Scene(), like(Scene(), 1)], exact=1)
    found = []
    for lesson in (frugal, plain):
        generator = torch.Generator().manual_seed(0)
        weights = weights_of(lesson.writing)
        with torch.no_grad():
            for tensor in weights.values():
                tensor.copy_(0.1 * torch.randn(tensor.shape, generator=generator))
        loss = lesson.loss(batch, 0.3)
        torch.autograd.backward(loss)
        found.append((float(loss.detach()), {name: tensor.grad for name, tensor in weights.items()}))
    (loss, gradients), (want, wanted) = found
    assert loss == pytest.approx(want, rel=1e-4)
    assert gradients.keys() == wanted.keys()
    largest = max(float(each.abs().max()) for each in wanted.values() if each is not None)
    assert largest > 1e-4, "no gradient: the test would prove nothing"
    for name, each in wanted.items():
        mine = gradients[name]
        assert (mine is None) == (each is None), name
        if mine is not None and each is not None:
            assert (mine - each).abs().max() < 1e-4 * largest, name


def test_weights_that_bf16_would_change_or_that_modules_share_stay_unchanged() -> None:
    model = nn.ModuleDict({name: nn.Linear(8, 8) for name in ("narrow", "wide", "output")})
    model["embedding"] = nn.Embedding(8, 8)
    for name in ("narrow", "embedding"):
        model[name].weight.data = model[name].weight.data.bfloat16().float()
    model["output"].weight = model["embedding"].weight
    x = torch.randn(3, 8)
    before = {name: model[name](x) for name in ("narrow", "wide", "output")}
    hold_narrow(model)
    dtypes = [model[name].weight.dtype for name in ("narrow", "wide", "output")]
    assert dtypes == [torch.bfloat16, torch.float32, torch.float32]
    assert all(torch.allclose(model[name](x), want, atol=1e-6) for name, want in before.items())


def test_gradients_of_a_product_equal_finite_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_BLOCK", 12)
    generator = torch.Generator().manual_seed(0)
    x, weight, bias, down, up = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((2, 3, 4), (5, 4), (5,), (2, 4), (5, 2))
    )
    for learned in (x, down, up):
        learned.requires_grad_()
    got = product(x, weight, bias, down, up, 0.5)
    assert torch.allclose(got, x @ (weight + 0.5 * up @ down).T + bias)
    assert torch.autograd.gradcheck(lambda x, down, up: product(x, weight, bias, down, up, 0.5), (x, down, up))
    assert torch.autograd.gradcheck(lambda x: product(x, weight, None, None, None, 0.0), (x,))
