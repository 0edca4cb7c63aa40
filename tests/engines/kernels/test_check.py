"""Tests that a kernel is used only after a check has found it right."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cacheblend_rag.engines.kernels.check import _passes, attention_works, placing_works, rows_work, shares_work


@pytest.fixture(autouse=True)
def _afresh() -> Iterator[None]:
    _passes.cache_clear()
    yield
    _passes.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_right_kernels_pass_their_checks(device: str, dtype: torch.dtype) -> None:
    assert placing_works(torch.device(device), dtype, 2, 64)
    assert rows_work(torch.device(device), dtype, 2, 64)
    assert attention_works(torch.device(device), dtype, 8, 2, 64)
    assert attention_works(torch.device(device), dtype, 8, 2, 64, sinks=True)
    assert shares_work(torch.device(device), dtype, 8, 2, 64)


def both_work(device: str) -> tuple[bool, bool]:
    where = torch.device(device), torch.float32
    return placing_works(*where, 2, 32), attention_works(*where, 4, 2, 32)


@pytest.mark.parametrize(
    "fault,says",
    [("place", "does not place keys"), ("place_layers", "does not place several"), ("attend", "attention differs")],
)
def test_a_wrong_kernel_is_not_used_and_the_log_names_the_fault(
    device: str, fault: str, says: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from cacheblend_rag.engines.kernels import attention, place

    module: Any = attention if fault == "attend" else place
    right = getattr(module, fault)

    def wrong(*args: Any, **named: Any) -> None:
        right(*args, **named)
        written = args[-2 if fault == "attend" else -1]
        (written.values if fault == "place_layers" else written).mul_(1.5)

    monkeypatch.setattr(module, fault, wrong)
    with caplog.at_level(logging.WARNING):
        assert both_work(device) == (fault == "attend", fault != "attend")
    assert says in caplog.text


def test_wrongly_placed_rows_are_decoded_before_they_are_placed(
    device: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from cacheblend_rag.engines.kernels import place

    right = place.place_layers

    def wrong(memory: torch.Tensor, *more: Any) -> None:
        right(memory, *more)
        more[-1].values.mul_(1.5 if memory.dtype == torch.uint8 else 1.0)

    monkeypatch.setattr(place, "place_layers", wrong)
    where = torch.device(device), torch.float32, 2, 32
    with caplog.at_level(logging.WARNING):
        assert (placing_works(*where), rows_work(*where)) == (True, False)
    assert "does not place rows" in caplog.text
    assert not rows_work(where[0], torch.float32, 2, 30)  # at this size the scales are not aligned to 4 bytes


def test_a_kernel_with_wrong_sums_is_not_used_and_the_log_names_the_fault(
    device: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from cacheblend_rag.engines.kernels import attention

    right = attention.add_shares

    def wrong(*args: Any) -> None:
        right(*args)
        args[5].mul_(1.5)

    monkeypatch.setattr(attention, "add_shares", wrong)
    with caplog.at_level(logging.WARNING):
        assert not shares_work(torch.device(device), torch.float32, 4, 2, 32)
    assert both_work(device) == (True, True)
    assert "sums of weights differ" in caplog.text


def test_a_kernel_that_does_not_compile_is_not_used_and_the_log_gives_the_error(
    device: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from cacheblend_rag.engines.kernels import attention

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(attention, "attend", fail)
    with caplog.at_level(logging.WARNING):
        assert both_work(device) == (True, False)
    assert "C compiler" in caplog.text


def test_a_cpu_uses_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert both_work("cpu") == (False, False)


def test_double_precision_uses_no_attention_kernel(device: str) -> None:
    assert not attention_works(torch.device(device), torch.float64, 4, 2, 32)
