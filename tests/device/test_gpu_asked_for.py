"""Tests that what is asked to run on a GPU does not pass for want of one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests import conftest


def test_the_tests_of_a_gpu_fail_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # it would be set for the rest of this process
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    asked: Any = SimpleNamespace(option=SimpleNamespace(markexpr="gpu"), add_cleanup=lambda clean: clean())
    with pytest.raises(pytest.UsageError, match="need a CUDA device"):  # with which pytest ends at once
        conftest.pytest_configure(asked)
