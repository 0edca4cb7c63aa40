"""Tests `store calibrate` on the command line."""

from __future__ import annotations

import pytest

from tests.command_line import as_json

pytestmark = pytest.mark.slow


def test_store_calibrate_measures_the_costs_that_ratio_auto_uses(run, model_dir, tmp_path):
    """An empty store is indexed, calibrated and asked at auto; the answer reports the controller's expectation."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.txt").write_text("The observatory was founded in 1911. " * 40, encoding="utf-8")
    where = ("--store", tmp_path / "store", "--model", model_dir)
    assert run("index", tmp_path / "docs", *where).exit_code == 0
    said = run("store", "calibrate", *where).stdout
    assert "GB/s" in said and "of a prompt of 6 chunks of 512 tokens" in said
    costs = as_json(run("store", "calibrate", *where, "--json"))
    assert set(costs["tiers"]) == {"ram", "disk"}
    assert set(costs["estimates"]) == {"ram", "disk"}
    answer = as_json(run("ask", "When was it founded?", *where, "--ratio", "auto", "--json"))
    assert "an ordinary prefill in" in answer["reason"]
