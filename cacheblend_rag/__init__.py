"""Reuses the KV cache of each chunk at any position in a prompt, and recomputes the few tokens that need it."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

# The stub `__init__.pyi` lists the public names. Each line holds one name and the module that defines the name.
_NAME = re.compile(r"^from (?P<module>\S+) import (?P<name>\w+) as (?P=name)$", re.MULTILINE)
_stub = Path(__file__).with_suffix(".pyi").read_text("utf-8")
_homes = {line["name"]: line["module"] for line in _NAME.finditer(_stub)}

__all__ = list(_homes)


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that `cacheblend --help` does not wait for torch."""
    if name not in _homes:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_homes[name]), name)
