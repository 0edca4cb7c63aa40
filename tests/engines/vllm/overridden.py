"""Puts vLLM's kernels for CPUs in place in the process that engines are forked from: each would search all modules for them."""

from __future__ import annotations

from vllm.platforms import current_platform

current_platform.register_triton_kernel_overrides()
type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)
