"""Tests that a run of GPU tests does not pass on a machine without a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests import conftest


def test_the_gpu_tests_fail_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "PYTORCH_NVML_BASED_CUDA_CHECK", "1"
    )  # monkeypatch restores the variable, which pytest_configure sets
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    asked: Any = SimpleNamespace(option=SimpleNamespace(markexpr="gpu"), add_cleanup=lambda clean: clean())
    with pytest.raises(pytest.UsageError, match="need a CUDA device"):  # this error ends pytest at once
        conftest.pytest_configure(asked)
