"""Imports Triton so that its interpreter can run kernels where there is no GPU."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

# Triton wants to know when it is imported, and vLLM imports it; what the tests start must not know: there, blends do without
# kernels. A run that was itself told to interpret goes on so.
INTERPRETED = find_spec("triton") is not None and not Path("/dev/nvidiactl").exists()
if INTERPRETED and "TRITON_INTERPRET" not in os.environ:
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.language  # noqa: F401

    del os.environ["TRITON_INTERPRET"]
