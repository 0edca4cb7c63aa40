"""Register vLLM's kernels for CPUs once in the fork server, because each engine would search all modules for them."""

from __future__ import annotations

from vllm.platforms import current_platform

current_platform.register_triton_kernel_overrides()
type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)
