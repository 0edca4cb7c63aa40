"""Loads the page's own style sheet and scripts, which lie beside this file."""

from __future__ import annotations

from importlib.resources import files


def asset(name: str) -> str:
    """Return the text of one of them."""
    return (files("cacheblend_rag.ui") / name).read_text(encoding="utf-8")
