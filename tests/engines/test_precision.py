"""Tests that a model runs in bf16 on a CPU if its config names bf16 and the CPU is faster in bf16."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cacheblend_rag.engines import precision
from cacheblend_rag.engines.models import bundled_model_directory
from cacheblend_rag.engines.precision import check_memory, cpu_dtype, is_faster_in_bf16
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.errors import ModelError


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHEBLEND_HOME", str(tmp_path / "home"))


class Clock:
    """A simulated CPU on which products take the given seconds; it counts the products."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **seconds: float | Iterator[float]):
        self.now, self.products, self._seconds = 0.0, 0, seconds
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(torch.nn.functional, "linear", self._multiply)

    def _multiply(self, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        took = self._seconds[str(x.dtype).removeprefix("torch.")]
        self.now += took if isinstance(took, float) else next(took)
        self.products += 1
        return x


@pytest.mark.parametrize(("bf16", "wins"), [(0.2, True), (0.83, True), (0.84, False), (1.5, False), (9.0, False)])
def test_bf16_is_used_only_if_it_is_clearly_faster(monkeypatch: pytest.MonkeyPatch, bf16: float, wins: bool) -> None:
    Clock(monkeypatch, float32=1.0, bfloat16=bf16)
    assert is_faster_in_bf16() == wins
    assert cpu_dtype({"dtype": "bfloat16"}) == (torch.bfloat16 if wins else torch.float32)


@pytest.mark.parametrize("config", [{"dtype": "float32"}, {"torch_dtype": "float16"}, {}])
def test_a_model_of_another_dtype_runs_in_fp32(monkeypatch: pytest.MonkeyPatch, config: dict[str, Any]) -> None:
    Clock(monkeypatch, float32=1.0, bfloat16=0.1)
    assert cpu_dtype(config) == torch.float32
    assert cpu_dtype({"torch_dtype": torch.bfloat16}) == torch.bfloat16


def test_a_busy_period_does_not_decide_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch, float32=iter([1.0] * 9), bfloat16=iter([1.9, 1.9, 0.4, 1.9, 1.9, 1.9]))
    assert is_faster_in_bf16()


def test_bf16_and_fp32_are_timed_once_on_each_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock = Clock(monkeypatch, float32=1.0, bfloat16=0.5)
    assert [is_faster_in_bf16() for _ in range(3)] == [True] * 3
    once = clock.products
    monkeypatch.setattr(precision, "cpu_name", lambda: "another CPU")
    is_faster_in_bf16()
    assert clock.products == 2 * once
    for file in (tmp_path / "home" / "precision").iterdir():
        file.write_text("[")
    assert is_faster_in_bf16()
    assert clock.products == 3 * once


def test_bf16_and_fp32_are_timed_each_time_if_the_result_cannot_be_saved(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "home").write_text("a file")
    Clock(monkeypatch, float32=1.0, bfloat16=0.5)
    assert [is_faster_in_bf16(), is_faster_in_bf16()] == [True, True]


@pytest.fixture
def free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Gives this machine so many bytes of free memory and of swap."""

    def give(memory: int, swap: int = 0) -> None:
        lines = [f"MemTotal: 99999999 kB\nMemAvailable: {memory // 1024} kB", f"SwapFree: {swap // 1024} kB\n"]
        (tmp_path / "meminfo").write_text("\n".join(lines))
        monkeypatch.setattr(precision, "_MEMORY", tmp_path / "meminfo")

    return give


def test_a_model_larger_than_the_free_memory_is_refused_before_it_is_loaded(free: Callable[..., None]) -> None:
    stored = sum(file.stat().st_size for file in bundled_model_directory().glob("*.safetensors"))
    free(2 * stored - 2048)
    with pytest.raises(ModelError, match=r"MiB of memory in float32, and .* MiB are free.* --dtype bfloat16"):
        TransformersEngine(device="cpu", dtype=torch.float32)
    free(stored, stored + 2048)
    with TransformersEngine(device="cpu", dtype=torch.float32) as engine:
        assert engine.dtype == torch.float32


def test_the_needed_memory_follows_the_dtype_and_a_container_has_no_more_than_its_limit(
    free: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(1 << 20))
    cpu, half, whole = torch.device("cpu"), torch.bfloat16, torch.float32
    free(1 << 20)
    check_memory(tmp_path, half, half, cpu)
    check_memory(tmp_path, whole, half, cpu)
    with pytest.raises(ModelError, match=r"takes 2\.0 MiB of memory in float32, and 1\.0 MiB are free"):
        check_memory(tmp_path, half, whole, cpu)
    monkeypatch.setattr(precision, "memory_bytes", lambda: 1 << 19)
    with pytest.raises(ModelError, match=r"takes 1\.0 MiB of memory in bfloat16, and 512\.0 KiB are free") as raised:
        check_memory(tmp_path, half, half, cpu)
    assert "bfloat16, which" not in str(raised.value)
    monkeypatch.setattr(precision, "_MEMORY", tmp_path / "missing")
    check_memory(tmp_path, half, half, cpu)
