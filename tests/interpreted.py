"""Imports Triton so that its interpreter can run kernels without a GPU, and skips the interpreter's needless work."""

from __future__ import annotations

import os
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# Triton reads this variable at its import, and vLLM imports Triton. Processes that tests start must not inherit the variable:
# their blends use no kernels. A run whose environment sets the variable keeps it.
INTERPRETED = find_spec("triton") is not None and not Path("/dev/nvidiactl").exists()
if INTERPRETED and "TRITON_INTERPRET" not in os.environ:
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.language  # noqa: F401

    del os.environ["TRITON_INTERPRET"]


def _quicken() -> None:
    """Save two fifths of the interpreter's time."""
    from triton.runtime import interpreter

    # The interpreter checks each sum and product for overflow, but asserts the check only in debug mode.
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
    # Each call of a function patches the language's builtins, and each launch removes the patches.
    patch, patched = interpreter._patch_lang, set[str]()

    def patch_once(function: Any) -> Any:
        if function.__module__ not in patched:
            patch(function)
            patched.add(function.__module__)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_once


if INTERPRETED:
    _quicken()
