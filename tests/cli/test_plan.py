"""`store calibrate` and `store plan` on the command line."""

from __future__ import annotations

import pytest

from tests.command_line import as_json

pytestmark = pytest.mark.slow


def test_store_calibrate_lets_auto_decide(run, model_dir, tmp_path):
    """From nothing: index, calibrate, ask at auto; the answer says what the controller expected."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.txt").write_text("The observatory was founded in 1911. " * 40, encoding="utf-8")
    where = ("--store", tmp_path / "store", "--model", model_dir)
    assert run("index", tmp_path / "docs", *where).exit_code == 0
    costs = as_json(run("store", "calibrate", *where, "--json"))
    assert set(costs["tiers"]) == {"ram", "disk"}
    assert {tier["tier"] for tier in costs["plan"]["tiers"]} == {"ram", "disk"}
    answer = as_json(run("ask", "When was it founded?", *where, "--ratio", "auto", "--json"))
    assert "an ordinary prefill in" in answer["reason"]


PRICES = "[compute]\nhour = 2.5\n[ram]\ngib_month = 3\n[s3]\ngib_month = 0.02\nbytes_per_s = 5e7\nlatency_s = 0.03\n"


def test_store_plan_says_what_a_corpus_costs_where(run, model_dir, tmp_path):
    (tmp_path / "prices.toml").write_text(PRICES, encoding="utf-8")
    asked = ("store", "plan", "--model", model_dir, "--prices", tmp_path / "prices.toml", "--chunks", "1e6")
    refused = run(*asked)
    assert refused.exit_code == 2 and "Run `cacheblend store calibrate`" in refused.stderr
    said = run("store", "calibrate", "--store", tmp_path / "store", "--model", model_dir).stdout
    assert "GB/s" in said
    assert "A prompt of 6 chunks of 512 tokens takes" in said
    plan = as_json(run(*asked, "--per-month", "1e5", "--ratio", "0.15", "--json"))
    assert plan["ratio"] == 0.15 and plan["cheapest"] in ("ram", "s3", None)
    assert [tier["tier"] for tier in plan["tiers"]] == ["s3", "ram"]
    assert plan["tiers"][1]["keeping"] == pytest.approx(150 * plan["tiers"][0]["keeping"])
    shown = run(*asked).stdout
    assert "1,000,000 chunks of 512 tokens, 0 prompts a month of 6 chunks" in shown
    assert "no KV kept" in shown and "computing" in shown
