"""Run kernels on CPU tensors in Triton's interpreter, and correct its faults in bf16."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.interpreted import INTERPRETED


def interpret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the kernels on a CPU for the length of a test; skip the test if Triton is missing or compiles for a GPU."""
    pytest.importorskip("triton", reason="Triton is not installed; on Linux, make setup installs it")
    if not INTERPRETED:
        pytest.skip("Triton compiles for this machine's GPU")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    _repair()


def _repair() -> None:
    """Round fp32 to the nearest bf16 as devices do, and multiply bf16, which the interpreter treats as integers."""
    from triton.runtime import interpreter

    builder, tl = interpreter.InterpreterBuilder, interpreter.tl
    if hasattr(builder, "repaired"):
        return
    cast, dot = builder.cast_impl, builder.create_dot

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        if (src.dtype.scalar, dst_type.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, src, dst_type)
        rounded = torch.tensor(src.data).bfloat16().view(torch.uint16).numpy()
        return interpreter.TensorHandle(rounded, tl.bfloat16)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, *(cast(self, x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b)), *rest)

    builder.cast_impl, builder.create_dot, builder.repaired = cast_impl, create_dot, True
