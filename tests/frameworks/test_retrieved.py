"""Tests that what was retrieved belongs to the runs that it was retrieved for, and that its fate in a prompt is told truly."""

from __future__ import annotations

import html

from hypothesis import given
from hypothesis import strategies as st

from cacheblend_rag.frameworks import retrieved
from cacheblend_rag.frameworks.retrieved import RetrievalLog, fates_of, renditions_in
from cacheblend_rag.frameworks.uses import renditions
from cacheblend_rag.prompts.chunk import Chunk, chunk_id

BELL = (
    'The "bell" of Marlow was cast in 1822 by two brothers & their aunt, and cracked in the first frost of that winter.\n'
    "The parish has kept its pieces in the crypt ever since."
)
SHIP = "The ship that brought the brothers home was sold for timber in Oakcliff, where her figurehead hangs over an inn door."


def chunk(text: str) -> Chunk:
    return Chunk(chunk_id(text), text, (1,))


def statuses(*pieces: str | Chunk, of: tuple[str, ...] = (BELL, SHIP)) -> list[str]:
    return [fate.status for fate in fates_of([(text,) for text in of], pieces).fates]


class TestRuns:
    def test_a_run_sees_what_runs_beside_it_in_the_same_one_retrieved(self) -> None:
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

    def test_a_retriever_inside_another_counts_for_nothing(self) -> None:
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

    def test_what_never_ends_is_forgotten_in_the_end(self) -> None:
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


class TestFates:
    def test_whole_altered_and_absent_are_told_apart(self) -> None:
        assert statuses("Notes: ", chunk(BELL), " Question: who?") == ["matched", "absent"]
        assert statuses(f"Notes: {BELL.replace(' the ', ' THE_')}", chunk(SHIP)) == ["altered", "matched"]
        assert statuses(f"Notes: {BELL[:100]}") == ["altered", "absent"]
        assert statuses("Who cast the bell of Marlow in the first frost?") == ["absent", "absent"]

    def test_a_few_words_of_a_text_that_another_shares_are_no_altered_copy_of_it(self) -> None:
        """Documents that were split twice, by different splitters, share nearly all they have."""
        split_again = f"{BELL.removesuffix('in the crypt ever since.')} {SHIP}"
        assert statuses("Who has kept it in the crypt ever since?", of=(BELL, split_again)) == ["absent", "absent"]

    def test_a_text_in_another_case_is_altered(self) -> None:
        for change in (str.upper, str.lower, str.title):
            assert statuses(f"Notes: {change(BELL)}", chunk(SHIP)) == ["altered", "matched"]
            assert statuses(f"Notes: {change(BELL)}") == ["altered", "absent"]

    def test_text_that_a_chunk_holds_is_part_of_it_and_nobody_elses(self) -> None:
        joined = f"{BELL} {SHIP}"
        assert statuses(chunk(joined)) == ["matched", "matched"]
        overlap = f"{BELL[-60:]} {SHIP}"
        assert statuses(chunk(BELL), " ", of=(BELL, overlap)) == ["matched", "absent"]

    def test_a_rendition_that_is_a_chunk_is_the_text(self) -> None:
        (report,) = fates_of([(BELL,)], [chunk(html.escape(BELL))]).fates
        assert (report.status, report.id, report.chunk) == ("matched", chunk_id(BELL), chunk_id(html.escape(BELL)))
        assert fates_of([(BELL,)], [chunk(html.escape(BELL))]).answered([report.chunk]).summary == (
            "1 retrieved, 1 not stored yet"
        )

    def test_other_forms_are_as_good(self) -> None:
        forms = [(f"page: 3\n\n{BELL}", BELL)]
        assert renditions_in(forms, [f"Source 1: {BELL}"]) == [BELL]
        assert fates_of(forms, [chunk(BELL)]).fates[0].status == "matched"

    def test_what_stands_whole_and_is_no_chunk_is_skipped(self) -> None:
        assert statuses(f"Notes: {BELL} Yes, it is.", of=(BELL, "Yes, it is.")) == ["skipped", "skipped"]


@given(st.text(max_size=60), st.text(max_size=60))
def test_a_chunk_that_stands_there_is_matched_whatever_surrounds_it(before: str, behind: str) -> None:
    assert statuses(before, chunk(BELL), behind, of=(BELL,)) == ["matched"]


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=300))
def test_renditions_are_made_from_the_text_alone_and_differ_from_it(text: str) -> None:
    body = text.strip()
    forms = renditions(body)
    assert forms == renditions(body)
    assert body not in forms
    assert len(set(forms)) == len(forms) <= 6
    assert all(form == form.strip() for form in forms)


@given(st.text(max_size=200), st.text(max_size=200))
def test_any_text_can_be_looked_for_in_any_prompt(text: str, prompt: str) -> None:
    assert statuses(prompt, of=(text,)) in (["skipped"], ["altered"], ["absent"], [])
