"""The paper's figures on your own model (paper sections 3 to 7)."""

from __future__ import annotations

from cacheblend_rag.evaluation.figures.base import Context, Figure
from cacheblend_rag.evaluation.figures.make import FIGURES, make_figures, parse_numbers

__all__ = ["FIGURES", "Context", "Figure", "make_figures", "parse_numbers"]
