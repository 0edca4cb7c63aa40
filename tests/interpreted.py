"""Imports Triton so that its interpreter can run kernels where there is no GPU, without what that does for nothing."""

from __future__ import annotations

import os
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# Triton wants to know when it is imported, and vLLM imports it; what the tests start must not know: there, blends do without
# kernels. A run that was itself told to interpret goes on so.
INTERPRETED = find_spec("triton") is not None and not Path("/dev/nvidiactl").exists()
if INTERPRETED and "TRITON_INTERPRET" not in os.environ:
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.language  # noqa: F401

    del os.environ["TRITON_INTERPRET"]


def _quicken() -> None:
    """Leave out two fifths of what interpreting takes."""
    from triton.runtime import interpreter

    # Whether numbers overflow is computed with each sum and product, but asserted in debug mode alone.
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
    # Each call of a function looks for the language's builtins to patch them, and each launch takes the patches back.
    patch, patched = interpreter._patch_lang, set[str]()

    def patch_once(function: Any) -> Any:
        if function.__module__ not in patched:
            patch(function)
            patched.add(function.__module__)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_once


if INTERPRETED:
    _quicken()
