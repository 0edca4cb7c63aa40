"""Draws the paper's figures on your own model (paper sections 3 to 7)."""

from __future__ import annotations

from cacheblend_lab.evaluation.figures.base import Figure, FigureContext
from cacheblend_lab.evaluation.figures.make import FIGURES, make_figures, parse_numbers

__all__ = ["FIGURES", "Figure", "FigureContext", "make_figures", "parse_numbers"]
