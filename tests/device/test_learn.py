"""Tests that a training batch on a device has the CPU's loss, and on CUDA the CPU's gradients."""

from __future__ import annotations

import pytest
import torch
from cacheblend_lab.learn.adapter import weights_of, writing_copy
from cacheblend_lab.learn.blend import BatchBlender, Lesson, PromptBatch
from lab_tests.learn.test_blend import batch_of

from tests.blending.families import BLENDED, make_model
from tests.blending.prompts import Scene

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("ratio", [0.0, 0.3])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_loss_and_gradients_on_a_device_equal_the_cpus(device: str, family: str, ratio: float) -> None:
    learns = device == "cuda"  # autograd counts devices at its first run, before the simulated one is registered
    found = []
    for place in ("cpu", device):
        model = make_model(BLENDED[family]()).to(place)
        batch = batch_of([Scene()])
        batch = PromptBatch(batch.layout, batch.ids.to(place), batch.weights.to(place))
        writing = writing_copy(model, rank=2)
        with torch.set_grad_enabled(learns):
            loss = Lesson(BatchBlender(model), writing).loss(batch, ratio)
        if learns:
            torch.autograd.backward(loss)
        gradients = {name: tensor.grad.cpu() for name, tensor in weights_of(writing).items() if tensor.grad is not None}
        found.append((float(loss.detach()), gradients))
    (want, expected), (got, gradients) = found
    assert got == pytest.approx(want, rel=1e-3)
    assert gradients.keys() == expected.keys()
    assert bool(expected) == learns
    for name, gradient in expected.items():
        assert (gradients[name] - gradient).abs().max() < 1e-4
