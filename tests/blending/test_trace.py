"""The trace of a blend: what it says of loading and computing must be what happened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers as hf

from cacheblend_rag.blending.settings import BlendSettings
from cacheblend_rag.blending.trace import Trace
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.errors import InputError
from cacheblend_rag.store import DiskStore
from tests.blending.families import _BASE, make_model
from tests.blending.prompts import Scene, engine_for

SCENE = Scene()


def traced(root: Path, settings: BlendSettings) -> tuple[Any, list[dict[str, Any]]]:
    """The answer, and the events of its trace as a file has them."""
    model = make_model(hf.Qwen3Config(**_BASE, head_dim=16))
    with engine_for(model, SCENE, store=DiskStore(root / "kv"), rank="now") as engine:
        engine.precompute(SCENE.chunks)
        engine.trace = Trace()
        answer = engine.generate(SCENE.prompt, SamplingParams(max_tokens=3), settings)
        engine.trace.write(root / "trace.json")
    return answer, json.loads((root / "trace.json").read_text())["traceEvents"]


def of(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == "X" and event["cat"] == kind]


@pytest.mark.parametrize(
    ("policy", "passes"),
    [("hkvd", ["dense", "sparse"]), ("static", ["sparse"]), ("static-query", ["question", "sparse"])],
)
def test_every_layer_is_loaded_before_it_is_computed(tmp_path: Path, policy: str, passes: list[str]) -> None:
    answer, events = traced(tmp_path, BlendSettings(ratio=0.3, policy=policy, check_layers=(2,)))
    loads, computed = of(events, "loading"), [e for e in of(events, "computing") if "pass" in e["args"]]
    layers = _BASE["num_hidden_layers"]
    assert [e["args"]["pass"] for e in computed if e["args"]["layer"] == 0] == passes
    assert sorted(e["args"]["layer"] for e in computed if e["args"]["pass"] == "sparse") == list(range(layers))
    for event in computed:
        of_layer = [load for load in loads if load["args"]["layer"] == event["args"]["layer"]]
        assert of_layer
        assert all(load["ts"] + load["dur"] <= event["ts"] for load in of_layer)
    # Each chunk that the answer says was loaded, as often as it says by its bytes; all from the tier that it says.
    want = {load.chunk_id or "header": (load.tier, load.nbytes) for load in answer.loads}
    assert {load["args"]["chunk"] for load in loads} == set(want)
    for chunk, (tier, nbytes) in want.items():
        own = [load["args"] for load in loads if load["args"]["chunk"] == chunk]
        assert {args["tier"] for args in own} == {tier}
        assert abs(sum(args["bytes"] for args in own) - nbytes) < layers


def test_events_of_one_track_follow_each_other_or_lie_in_each_other(tmp_path: Path) -> None:
    _, events = traced(tmp_path, BlendSettings(ratio=0.3, policy="hkvd"))
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names[0] == "computing"
    assert len(names) >= 2
    for track in names:
        open_until: list[float] = []
        for event in (event for event in events if event["ph"] == "X" and event["tid"] == track):
            while open_until and open_until[-1] <= event["ts"]:
                open_until.pop()
            assert not open_until or event["ts"] + event["dur"] <= open_until[-1] + 1e-3
            open_until.append(event["ts"] + event["dur"])


def test_a_prefill_and_the_answers_tokens_are_recorded_too(tmp_path: Path) -> None:
    _, events = traced(tmp_path, BlendSettings(reuse="off"))
    found = [event["name"] for event in of(events, "computing")]
    assert found == ["prefill", "token of the answer", "token of the answer"]
    assert of(events, "loading") == []


def test_a_file_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot be written to .*none/trace\.json"):
        Trace().write(tmp_path / "none" / "trace.json")
