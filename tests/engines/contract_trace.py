"""What every engine that records a trace must say in it. Subclass it beside `EngineContract`, whose fixtures it uses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cacheblend_rag.blending.settings import BlendSettings
from cacheblend_rag.blending.trace import Trace
from cacheblend_rag.engines.base import BlendEngine
from cacheblend_rag.engines.results import Generation
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.prompts.prompt import BlendPrompt

THREE = SamplingParams(max_tokens=3)


def traced(
    engine: BlendEngine, prompt: BlendPrompt, settings: BlendSettings, file: Path
) -> tuple[Generation, list[dict[str, Any]]]:
    """The answer, and the events of its trace as a file has them."""
    engine.trace = trace = Trace()
    try:
        answer = engine.generate(prompt, THREE, settings)
    finally:
        engine.trace = None
    trace.write(file)
    return answer, json.loads(file.read_text())["traceEvents"]


def of(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == "X" and event["cat"] == kind]


class TraceContract:
    @pytest.fixture
    def ranked(self, engine, chunks, reopened):
        """The engine with the chunks stored and ranked, which it must read from disk."""
        before, engine.ranking = engine.ranking, "now"
        engine.precompute(chunks)
        engine.ranking = before
        with reopened() as engine:
            yield engine

    @pytest.mark.parametrize(
        ("policy", "passes"),
        [("hkvd", ["dense", "sparse"]), ("static", ["sparse"]), ("static-query", ["question", "sparse"])],
    )
    def test_every_layer_is_loaded_before_it_is_computed(self, ranked, prompt, tmp_path, policy, passes) -> None:
        settings = BlendSettings(ratio=0.3, policy=policy, check_layers=(2,))
        answer, events = traced(ranked, prompt, settings, tmp_path / "out.json")
        loads, computed = of(events, "loading"), [e for e in of(events, "computing") if "pass" in e["args"]]
        layers = ranked.num_layers
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
            assert {args["tier"] for args in own} == {tier} == {"disk"}
            assert abs(sum(args["bytes"] for args in own) - nbytes) < layers

    def test_events_of_one_track_follow_each_other_or_lie_in_each_other(self, ranked, prompt, tmp_path) -> None:
        _, events = traced(ranked, prompt, BlendSettings(ratio=0.3, policy="hkvd"), tmp_path / "out.json")
        names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
        assert names[0] == "computing"
        assert len(names) >= 2
        assert {event["tid"] for event in of(events, "loading")} == set(names) - {0}
        for track in names:
            open_until: list[float] = []
            for event in (event for event in events if event["ph"] == "X" and event["tid"] == track):
                assert event["ts"] >= 0
                while open_until and open_until[-1] <= event["ts"] + 1e-3:
                    open_until.pop()
                assert not open_until or event["ts"] + event["dur"] <= open_until[-1] + 1e-3
                open_until.append(event["ts"] + event["dur"])

    def test_a_prefill_and_the_answers_tokens_are_recorded_too(self, engine, prompt, tmp_path) -> None:
        answer, events = traced(engine, prompt, BlendSettings(quality="full"), tmp_path / "out.json")
        prefill, *tokens = of(events, "computing")
        assert (prefill["name"], prefill["args"]["tokens"]) == ("prefill", answer.usage.prompt_tokens)
        assert {event["name"] for event in tokens} == {"token of the answer"}
        assert 0 < sum(event["args"]["tokens"] for event in tokens) <= 2
        assert of(events, "loading") == []

    def test_without_a_trace_nothing_is_recorded_and_the_answer_is_the_same(self, ranked, prompt, tmp_path) -> None:
        settings = BlendSettings(ratio=0.3, policy="hkvd")
        with_trace, _ = traced(ranked, prompt, settings, tmp_path / "out.json")
        ranked.reset_prefix_cache()
        without = ranked.generate(prompt, THREE, settings)
        assert (without.token_ids, without.usage) == (with_trace.token_ids, with_trace.usage)
