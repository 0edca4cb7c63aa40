"""Tests that retrieved texts belong to their runs, and that their fate in a prompt is reported correctly."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheblend_rag.blending.outcome import ChunkOutcome, Fate, Lack, PromptOutcome, Usage
from cacheblend_rag.engines.results import Generation, Timings
from cacheblend_rag.errors import AlteredChunkError
from cacheblend_rag.frameworks import retrieved
from cacheblend_rag.frameworks.retrieved import OnMiss, RetrievalLog, RetrievalReport, find_retrieved
from cacheblend_rag.frameworks.uses import json_forms, uses_of
from cacheblend_rag.prompts.chunk import Chunk, chunk_id
from cacheblend_rag.prompts.prompt import BlendPrompt, text_prompt
from tests.fake_engine import FakeEngine

BELL = (
    'The "bell" of Marlow was cast in 1822 by two brothers & their aunt, and cracked in the first frost of that winter.\n'
    "The café has kept its pieces in the crypt ever since."
)
SHIP = "The ship that brought the brothers home was sold for timber in Oakcliff, where her figurehead hangs over an inn door."
EITHER = "Bells and ships: " + BELL


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


def found(
    engine: FakeEngine,
    text: str,
    *items: tuple[str, ...],
    known: tuple[str, ...] = (BELL, SHIP),
    on_miss: OnMiss = "warn",
    run: str | None = "run",
) -> tuple[BlendPrompt, RetrievalReport]:
    log = RetrievalLog()
    log.begin("run", None)
    log.note(run, items or [(BELL,), (SHIP,)])
    uses_of(engine).register(engine, known)
    return find_retrieved(engine, lambda: text_prompt(engine.tokenizer, text, engine.registry), log, "run", on_miss)


def places(engine: FakeEngine, text: str, *items: tuple[str, ...], known: tuple[str, ...] = (BELL, SHIP)) -> list[str]:
    return [place or "" for place in found(engine, text, *items, known=known)[1].places.values()]


class TestRuns:
    def test_a_run_finds_the_texts_that_its_sibling_runs_retrieved(self) -> None:
        log = RetrievalLog()
        for root in ("a", "b"):
            log.begin(root, None)
            log.begin(f"{root} retriever", root)
            log.note(f"{root} retriever", [(root,)])
        for root in ("a", "b"):
            log.end(f"{root} retriever")
            log.begin(f"{root} model", root)
            assert log.of(f"{root} model") == [(root,)]
        assert log.loose == []
        log.end("a")
        assert log.loose == [("a",)]

    def test_a_nested_retrievers_texts_are_replaced_by_those_of_the_outer_retriever(self) -> None:
        log = RetrievalLog()
        for run, parent in (("root", None), ("outer", "root"), ("inner", "outer")):
            log.begin(run, parent)
        log.note("inner", [("whole",)])
        log.end("inner")
        log.note("outer", [("cut",)])
        log.end("outer")
        assert log.of("root") == [("cut",)]
        log.begin("postprocessor", "root")
        log.note("postprocessor", [("rewritten",)], replace=True)
        log.end("postprocessor")
        assert log.of("root") == [("rewritten",)]

    def test_the_log_forgets_the_oldest_runs_that_never_end(self) -> None:
        log = RetrievalLog()
        for number in range(retrieved._MOST_RUNS + 500):
            log.begin(number, None)
            log.note(number, [(str(number),)])
        assert len(log._parents) == retrieved._MOST_RUNS
        assert len(log.loose) == retrieved._MOST_LOOSE
        log.end("never begun")
        log.note("never begun", [("loose",)])
        assert log.loose[-1] == ("loose",)
        assert log.of(None) == log.of("never begun") == []


class TestPlaces:
    def test_only_an_unaltered_retrieved_text_is_found(self, engine: FakeEngine) -> None:
        assert places(engine, f"Notes: {BELL} Question: who?") == [chunk_id(BELL), ""]
        assert places(engine, f"Notes: {SHIP} {BELL}") == [chunk_id(BELL), chunk_id(SHIP)]
        for changed in (BELL[:100], BELL.upper(), BELL.replace(" the ", "\nthe "), "Who cast the bell of Marlow?"):
            assert places(engine, f"Notes: {changed}") == ["", ""]

    @pytest.mark.parametrize("ascii_alone", [True, False])
    def test_the_json_form_of_a_retrieved_text_becomes_a_chunk(self, engine: FakeEngine, ascii_alone: bool) -> None:
        text = json.dumps([{"text": BELL}, {"text": SHIP}], ensure_ascii=ascii_alone)
        prompt, report = found(engine, text)
        form = json.dumps(BELL, ensure_ascii=ascii_alone)[1:-1]
        assert [part.text for part in prompt.segments if isinstance(part, Chunk)] == [form, SHIP]
        assert report == RetrievalReport({chunk_id(BELL): chunk_id(form), chunk_id(SHIP): chunk_id(SHIP)})
        assert chunk_id(form) in engine.registry
        uses_of(engine).forget(engine, [chunk_id(BELL)])
        assert chunk_id(form) not in engine.registry

    def test_a_retrieved_text_is_found_inside_a_larger_chunk(self, engine: FakeEngine) -> None:
        assert places(engine, EITHER, (BELL,), known=(BELL, EITHER)) == [chunk_id(EITHER)]

    def test_a_retrieved_text_is_found_in_any_of_its_forms(self, engine: FakeEngine) -> None:
        forms = (f"page: 3\n\n{BELL}", BELL)
        assert places(engine, f"Source 1: {BELL}", forms, known=forms[:1]) == [chunk_id(BELL)]

    def test_a_prompt_does_not_register_an_unknown_text(self, engine: FakeEngine) -> None:
        assert places(engine, f"{BELL} {json.dumps(BELL)}", (BELL,), known=()) == [""]
        assert not len(engine.registry)

    def test_a_text_retrieved_outside_any_run_counts_only_if_the_prompt_contains_it(self, engine: FakeEngine) -> None:
        _, report = found(engine, f"Notes: {BELL}", run=None, on_miss="error")
        assert report == RetrievalReport({chunk_id(BELL): chunk_id(BELL)})


def test_one_warning_or_error_gives_the_number_of_chunks_that_are_not_reused(
    engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    found(engine, f"{BELL} {SHIP}")
    found(engine, "No notes.", on_miss="ignore")
    assert not caplog.records
    found(engine, "No notes.")
    found(engine, "No notes.")
    (record,) = caplog.records
    assert (record.levelno, record.name) == (logging.WARNING, "cacheblend_rag.misses")
    assert f"2 of 2 retrieved chunks cannot be reused, the first of them {chunk_id(BELL)}" in record.getMessage()
    with pytest.raises(AlteredChunkError, match="1 of 2 retrieved chunks") as error:
        found(engine, BELL, on_miss="error")
    assert error.value.chunk_id == chunk_id(SHIP)


def test_an_answer_reports_the_fate_of_each_retrieved_chunk() -> None:
    def told(a: Fate, b: Fate, lacks: tuple[Lack, ...] = ()) -> list[Any]:
        chunks = (ChunkOutcome("a", 1, 2, a), ChunkOutcome("b in JSON", 4, 2, b, lacks=lacks))
        outcome = PromptOutcome("blend", "", Usage(9, 0, 0, 9), chunks=chunks)
        report = RetrievalReport({"a": "a", "b": "b in JSON", "c": None})
        said = report.answered(Generation.of(outcome, "", (), "stop", Timings(0.0, 0.0)))
        assert (said["retrieved"], [each["id"] for each in said["chunks"]]) == (3, ["a", "b", "c"])
        return [said["summary"], said["reused"], *(each["status"] for each in said["chunks"])]

    lost = "not_reused"
    assert told("exact", "reused") == ["2 of 3 retrieved chunks reused", 2, "reused", "reused", lost]
    assert told("reused", "missing", ("kv",)) == [
        "1 of 3 retrieved chunks reused, 1 not stored yet",
        1,
        "reused",
        "not_stored",
        lost,
    ]
    assert told("recomputed", "reused") == ["1 of 3 retrieved chunks reused", 1, lost, "reused", lost]
    assert told("recomputed", "recomputed") == ["0 of 3 retrieved chunks reused", 0, lost, lost, lost]
    # The prefix cache had the chunk's KV, which is missing in the store.
    assert told("recomputed", "exact", ("kv",)) == ["1 of 3 retrieved chunks reused", 1, lost, "reused", lost]
    nothing = Generation.of(PromptOutcome("blend", "", Usage(9, 0, 0, 9)), "", (), "stop", Timings(0.0, 0.0))
    assert RetrievalReport().answered(nothing) == {"summary": "", "retrieved": 0, "reused": 0, "chunks": []}


@given(st.text())
def test_json_forms_decode_to_the_text_and_differ_from_it(text: str) -> None:
    forms = json_forms(text)
    assert text not in forms
    assert len(set(forms)) == len(forms)
    assert all(json.loads(f'"{form}"') == text for form in forms)
