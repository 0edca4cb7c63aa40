"""Run the kernels' tests compiled on a GPU (`make test-gpu`) and in Triton's interpreter on a CPU."""

from __future__ import annotations

import pytest
import torch

from tests.engines.kernels.interpreter import interpret

NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_CUDA])])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the device that runs the kernels."""
    if request.param == "cpu":
        interpret(monkeypatch)
    return str(request.param)
