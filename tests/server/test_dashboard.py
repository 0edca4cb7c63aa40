"""Tests that the Grafana dashboard of the examples uses only metrics that a server exports."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from cacheblend_rag.blending.outcome import PromptOutcome, Usage
from cacheblend_rag.server.observing import ReuseMetrics
from tests.outcomes import lacking
from tests.server.running import BODY_LIMIT, RunningServer
from tests.server.test_server import PLAIN, chat, register

DASHBOARD = json.loads((Path(__file__).parents[2] / "examples/grafana/cacheblend.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]
NAME = r"(?:cacheblend_|vllm:)[a-z_]+"
ADDED = {"instance", "le"}  # Prometheus adds instance; buckets have le
ENDINGS = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}


def labels_of(expression: str) -> set[str]:
    chosen = re.findall(r'[{,]\s*(\w+)\s*[=!]~?\s*"', expression)
    grouped = re.findall(r"(?:by|on|ignoring) \(([^)]*)\)", expression)
    return {*chosen, *(name.strip() for group in grouped for name in group.split(","))} - ADDED


@pytest.mark.slow
def test_a_running_server_exports_every_metric_and_label_of_the_dashboard(server: RunningServer) -> None:
    register(server)
    chat(server, PLAIN, cacheblend={"ratio": 0.4})
    chat(server, "No chunk in here.", cacheblend={"ratio": "auto"})
    assert server.post("/v1/chunks", {"texts": ["x" * BODY_LIMIT]}).status_code == 413
    said: dict[str, Any] = {}
    for family in text_string_to_metric_families(server.get("/metrics").text):
        labels = {label for sample in family.samples for label in sample.labels}
        for ending in ENDINGS.get(family.type, ()):
            said[family.name + ending] = labels if family.samples else None
    asked = {name for expression in EXPRESSIONS for name in re.findall(NAME, expression)}
    assert asked <= set(said)
    for expression in EXPRESSIONS:
        known = [said[name] for name in re.findall(NAME, expression)]
        if all(labels is not None for labels in known):
            assert labels_of(expression) <= set().union(*known), expression


def test_panels_work_for_a_tenant_whose_chunks_were_never_found() -> None:
    registry = CollectorRegistry()
    asked = PromptOutcome("prefill", "no stored KV for any of the 1 chunks", Usage(70, 0, 0, 70), chunks=lacking("a"))
    ReuseMetrics(registry).finished(asked, "acme")
    said = {sample.name for family in registry.collect() for sample in family.samples}
    for title, legend in (("Tokens computed by tenant", "{{tenant}}: prompts"), ("Where chunks were found", "nowhere")):
        (panel,) = (panel for panel in PANELS if panel["title"] == title)
        (expression,) = (target["expr"] for target in panel["targets"] if target["legendFormat"] == legend)
        # A division has no result for a series that one of its sides does not have.
        needed = re.sub(rf"\(sum \(rate\({NAME}.*?\) or vector\(0\)\)", "", expression)
        assert set(re.findall(NAME, needed)) <= said, title


def test_legends_show_grouping_labels_and_expressions_have_balanced_brackets() -> None:
    assert len(PANELS) > 12
    for panel in PANELS:
        for target in panel["targets"]:
            expression = target["expr"]
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= labels_of(expression) | ADDED
            for opened, closed in ("()", "[]", "{}"):
                assert expression.count(opened) == expression.count(closed), expression


def test_the_dashboard_shows_the_metrics_of_reuse_and_refusals() -> None:
    shown = {name for expression in EXPRESSIONS for name in re.findall(NAME, expression)}
    wanted = {"requests_total", "reused_tokens_total", "fallbacks_total", "tier_out", "refused_requests_total"}
    wanted |= {"first_token_seconds_bucket", "load_wait_seconds_bucket", "tier_read_seconds_total"}
    assert {f"cacheblend_{name}" for name in wanted} <= shown
