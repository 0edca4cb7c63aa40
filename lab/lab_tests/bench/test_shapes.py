"""`bench shapes`: for all shapes of prompts, no quality runs more tokens than a prefill with prefix caching."""

from __future__ import annotations

import json

import pytest

from cacheblend_lab.bench import BenchModel, ShapesSettings, bench_shapes, open_workbench
from cacheblend_rag.blending.controller import GAIN
from cacheblend_rag.blending.costs import ComputeCost, Costs
from cacheblend_rag.errors import InputError

TINY = BenchModel(random_weights="llama:2x256", device="cpu")
SETTINGS = ShapesSettings(fronts=(0, 100), chunks=(1, 6), chunk_tokens=(20, 60), questions=(5, 150), repeat=1)


@pytest.fixture(autouse=True)
def _chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cacheblend_rag.blending.controller.GAIN", GAIN)


@pytest.mark.slow
@pytest.mark.parametrize("cold", [False, True])
def test_no_quality_computes_more_than_a_prefill_with_prefix_caching(cold: bool) -> None:
    with open_workbench(TINY) as place:
        place.engine.costs = Costs(place.engine.num_layers, ComputeCost(0.0, 1e-3, 0.0), {}, calibrated=False)
        result = json.loads(json.dumps(bench_shapes(place, ShapesSettings(**{**vars(SETTINGS), "cold": cold}))))
    rows = result["rows"]
    assert len(rows) == 2**4 * 3
    for row in rows:
        assert row["work"] <= 1 + 1e-9, row
        assert row["mode"] == "prefill" or row["quality"] == "exact" or row["usage"]["reused_tokens"] > 0
    stale = [row for row in rows if row["usage"]["recomputed_tokens"]]
    assert {row["quality"] for row in stale} == {"high", "fast"}
    assert max(row["work"] for row in stale) <= 1 / GAIN + 0.05, "rounding of counts"
    warm = 100 if not cold else 0
    assert all(row["usage"]["kept_tokens"] >= warm for row in rows if row["front"] == 100)
    quick = [row for row in rows if (row["chunks"], row["chunk_tokens"], row["question"]) == (6, 60, 5)]
    assert all(row["work"] < 0.7 for row in quick if row["quality"] != "exact"), (
        "where there is much to gain, it blends"
    )


def test_repeat_0_is_refused() -> None:
    with pytest.raises(InputError, match="repeat"):
        ShapesSettings(repeat=0)
