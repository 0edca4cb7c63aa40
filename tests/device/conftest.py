"""Fixtures of devices: a simulated one (`pytest -m device`), and CUDA if there is a GPU (`make test-gpu`)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.device import simulated

NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(
    params=[
        pytest.param(simulated.NAME, marks=pytest.mark.device),
        pytest.param("cuda", marks=[pytest.mark.gpu, NO_CUDA]),
    ]
)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Yield the name of a device that is not the CPU."""
    if request.param == simulated.NAME:
        with simulated.usable():
            yield request.param
    else:
        yield request.param


@pytest.fixture
def sim() -> Iterator[str]:
    """Yield the simulated device's name."""
    with simulated.usable():
        yield simulated.NAME
