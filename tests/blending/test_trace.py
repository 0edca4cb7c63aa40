"""A trace's file, and what came from another process. What its events say is in the engines' contract."""

from __future__ import annotations

from pathlib import Path

import pytest

from cacheblend_rag.blending.trace import Recorded, Trace
from cacheblend_rag.errors import InputError


def test_a_file_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot be written to .*none/trace\.json"):
        Trace().write(tmp_path / "none" / "trace.json")


def test_what_another_process_recorded_stands_where_it_happened_on_tracks_of_its_own() -> None:
    mine = Trace()
    began = mine.recorded().began
    mine.add_until(began + 2.0, "loading", "mine", began + 1.0)
    for _ in range(2):
        mine.merge(
            Recorded(
                began + 3.0,
                [
                    {"name": "pass", "cat": "computing", "ph": "X", "pid": 0, "tid": 0, "ts": 0.0, "dur": 5e5},
                    {"name": "a", "cat": "loading", "ph": "X", "pid": 0, "tid": 1, "ts": 1e6, "dur": 1e6},
                    {"name": "b", "cat": "loading", "ph": "X", "pid": 0, "tid": 1, "ts": 2e6, "dur": 1e6},
                    {"name": "c", "cat": "loading", "ph": "X", "pid": 0, "tid": 2, "ts": 2e6, "dur": 1e6},
                ],
            )
        )
    events = [event for event in mine.as_json()["traceEvents"] if event["ph"] == "X"]
    assert {(e["name"], round(e["ts"])) for e in events} == {
        *(("mine", 1_000_000), ("pass", 3_000_000), ("a", 4_000_000), ("b", 5_000_000), ("c", 5_000_000))
    }
    tracks = {name: [e["tid"] for e in events if e["name"] == name] for name in ("mine", "pass", "a", "b", "c")}
    assert tracks == {"mine": [1], "pass": [0, 0], "a": [2, 4], "b": [2, 4], "c": [3, 5]}


def test_it_says_until_when_was_computed() -> None:
    trace = Trace()
    began = trace.recorded().began
    assert trace.recorded().computed_until == began
    trace.add_until(began + 2.0, "computing", "a", began)
    trace.add_until(began + 5.0, "loading", "b", began)
    assert trace.recorded().computed_until == pytest.approx(began + 2.0)
