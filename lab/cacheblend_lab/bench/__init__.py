"""Measures the results of `cacheblend bench`: time to first token, throughput, the rate of indexing."""

from __future__ import annotations

from cacheblend_lab.bench.controller import ControllerSettings, bench_controller
from cacheblend_lab.bench.indexing import IndexSettings, ScoreSettings, bench_index, bench_score
from cacheblend_lab.bench.shapes import ShapesSettings, bench_shapes
from cacheblend_lab.bench.streams import StreamsSettings, bench_streams
from cacheblend_lab.bench.throughput import ThroughputSettings, bench_throughput
from cacheblend_lab.bench.ttft import TTFTSettings, bench_ttft
from cacheblend_lab.bench.workbench import BenchModel, open_workbench
from cacheblend_lab.workbench import Workbench
from cacheblend_rag.calibrate.measure import drop_page_cache

__all__ = [
    "BenchModel",
    "ControllerSettings",
    "IndexSettings",
    "ScoreSettings",
    "ShapesSettings",
    "StreamsSettings",
    "TTFTSettings",
    "ThroughputSettings",
    "Workbench",
    "bench_controller",
    "bench_index",
    "bench_score",
    "bench_shapes",
    "bench_streams",
    "bench_throughput",
    "bench_ttft",
    "drop_page_cache",
    "open_workbench",
]
