"""Tests figures in separate files."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from cacheblend_lab.plotting import figure, render_svg, save_figure


def test_a_figure_file_has_its_title_and_enough_pixels_for_print(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with figure(6.0, 3.6) as (made, axes):
        axes.plot([0, 1], [1, 0])
    on_page = render_svg(made)
    save_figure(made, tmp_path / "figure-12", "Figure 12. Quality against TTFT")
    width, _ = struct.unpack(">II", (tmp_path / "figure-12.png").read_bytes()[16:24])
    assert width == 1200
    assert made.get_suptitle() == "Figure 12. Quality against TTFT"
    assert len((tmp_path / "figure-12.svg").read_text()) > len(on_page) + 1000  # the page lacks the title's glyphs
