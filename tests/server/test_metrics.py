"""Tests the counted metrics, and how reasons become labels."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client import CollectorRegistry

from cacheblend_rag.blending.outcome import ChunkLoad, ChunkOutcome, PromptOutcome, Usage
from cacheblend_rag.engines.results import PrecomputeReport
from cacheblend_rag.server.observing import ReuseMetrics, reason_label
from tests.outcomes import in_place


def test_finished_prompts_are_counted_by_mode_and_reason() -> None:
    registry = CollectorRegistry()
    metrics = ReuseMetrics(registry)
    blend = PromptOutcome(
        mode="blend",
        reason="stored KV for 3 of 6 chunks",
        usage=Usage(1100, 850, 150, 250),
        load_s=0.002,
        blend_s=0.2,
        loaded_bytes=4096,
        chunks=(
            ChunkOutcome("a", 10, 500, "reused", 150, load=ChunkLoad("redis", 3000, 0.5)),
            ChunkOutcome("b", 510, 500, "reused", load=ChunkLoad("redis", 1000, 0.25)),
            ChunkOutcome("c", 1010, 80, "missing", 80, ("kv",)),
        ),
        header=ChunkLoad("ram", 96, 0.0),
    )
    metrics.finished(blend, "default")
    metrics.finished(blend, "default")
    plain = PromptOutcome(
        mode="prefill",
        reason="no stored KV for any of the 12 chunks",
        usage=Usage(70, 0, 0, 70),
    )
    metrics.finished(plain, "default")
    metrics.precomputed(PrecomputeReport(2, 3, 700, 0.1, {"x": "no room"}), "default")

    def value(name: str, tenant: str | None = "default", **labels: str) -> float | None:
        return registry.get_sample_value(
            f"cacheblend_{name}", labels if tenant is None else {"tenant": tenant, **labels}
        )

    assert value("requests_total", mode="blend") == 2
    assert value("reused_tokens_total") == 1700
    assert value("recomputed_tokens_total") == 300
    assert value("computed_tokens_total") == 570
    assert value("loaded_tokens_total") == 2000
    assert value("loaded_bytes_total") == 8192
    assert value("tier_loaded_bytes_total", tier="redis") == 8000
    assert value("tier_loaded_bytes_total", tier="ram") == 192
    assert value("tier_read_seconds_total", tier="redis") == 1.5
    assert value("missing_chunks_total") == 2
    assert value("blend_seconds_count", None) == 2
    assert value("blend_seconds_sum", None) == 0.4
    assert value("fallbacks_total", reason="no stored KV for any of the N chunks") == 1
    assert value("precomputed_chunks_total", result="failed") == 1
    assert value("precomputed_tokens_total") == 700
    assert value("tier_loaded_chunks_total", tier="redis") == 4
    assert value("tier_loaded_chunks_total", tier="ram") == 0  # the header is no chunk
    metrics.finished(plain, "acme")
    assert (value("computed_tokens_total"), value("computed_tokens_total", "acme")) == (570, 70)


def test_the_controllers_decisions_are_counted_with_expected_and_measured_seconds() -> None:
    registry = CollectorRegistry()
    metrics = ReuseMetrics(registry)
    for mode, computed, expected, took in (
        ("blend", (), 0.25, 0.5),
        ("blend", ("a",), 0.25, 0.5),
        ("blend", ("a", "b"), 0.5, None),  # a request without statistics is not compared
        ("prefill", ("a", "b"), 1.0, 1.5),
        ("prefill", (), None, 9.0),  # the controller made no decision
    ):
        report = PromptOutcome(mode, "", Usage(70, 0, 0, 70), chunks=in_place(*computed), expected_s=expected)  # type: ignore[arg-type]
        metrics.finished(report, "acme", took)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"cacheblend_{name}", labels)

    decided = {
        name: value("decisions_total", tenant="acme", decision=name)
        for name in ("blended", "partly_in_place", "prefilled")
    }
    assert decided == {"blended": 1, "partly_in_place": 2, "prefilled": 1}
    assert value("expected_first_token_seconds_sum") == 1.5
    assert value("decided_first_token_seconds_sum") == 2.5
    assert value("decided_first_token_seconds_count") == 3


def test_reason_labels_contain_no_numbers_of_single_prompts() -> None:
    labels = {reason_label(f"no stored KV for any of the {n} chunks: {n} of them") for n in range(50)}
    assert len(labels) == 1
    decided = "stored KV for 4 of 4 chunks; none of it is used (expected in {} s, an ordinary prefill in {} s)"
    assert {reason_label(decided.format(s, s)) for s in ("0.5", "3", "1e-05")} == {
        "stored KV for N of N chunks; none of it is used"
    }


def test_first_tokens_are_timed_by_mode_and_a_tier_is_shown_as_out_until_it_is_back() -> None:
    registry = CollectorRegistry()
    metrics = ReuseMetrics(registry)
    report = PromptOutcome("blend", "", Usage(2, 1, 0, 1))
    metrics.finished(report, "default", 0.25, {"redis": True, "s3": False})

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"cacheblend_{name}", labels)

    assert (value("tier_out", tier="redis"), value("tier_out", tier="s3")) == (1, 0)
    metrics.finished(report, "default", 0.5, {"redis": False})
    assert value("tier_out", tier="redis") == 0
    assert value("first_token_seconds_sum", mode="blend") == 0.75
    assert value("first_token_seconds_count", mode="prefill") is None
    for status in (429, 429, 507):
        metrics.refused("acme", status)
    assert value("refused_requests_total", tenant="acme", status="429") == 2


def test_the_server_page_lists_all_metrics_with_and_without_a_tenant_label() -> None:
    page = (Path(__file__).parents[2] / "docs/server.md").read_text("utf-8")
    by_tenant, _, others = page.partition("## Metrics")[2].partition("\n## ")[0].partition("Without that label")
    labels = {each._name: each._labelnames for each in vars(ReuseMetrics(CollectorRegistry())).values()}

    def named(text: str) -> set[str]:
        found = re.findall(r"`(?:cacheblend)?_([a-z_]+)", text)
        return {f"cacheblend_{name.removesuffix('_total')}" for name in found}

    assert named(by_tenant) == {name for name, those in labels.items() if "tenant" in those}
    assert named(others) == {name for name, those in labels.items() if "tenant" not in those}
