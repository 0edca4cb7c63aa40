"""Tests conversations and rendering without a browser."""

from __future__ import annotations

import errno
import re
import shutil
from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from cacheblend_rag.blending.outcome import Mode
from cacheblend_rag.calibrate.why import shown_deviations, token_texts
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.prompts.chunk import make_chunk
from cacheblend_rag.rag.pipeline import RagPipeline
from cacheblend_rag.rag.planning import IndexPlan, TooMuchKVError
from cacheblend_rag.ui import render
from cacheblend_rag.ui.collection import Collection, FileState
from cacheblend_rag.ui.conversation import Conversation, Exchange, Tabs
from cacheblend_rag.ui.workspace import Choices, Workspace
from tests.conftest import thinking
from tests.fake_engine import FakeEngine
from tests.ui.scripted import ScriptedEngine

pytestmark = pytest.mark.slow


@pytest.fixture
def collection(tmp_path: Path) -> Collection:
    notes = tmp_path / "<b>notes.md"
    notes.write_text("The harbour <script>alert(1)</script> lies below.")
    collection = Collection(tmp_path / "store", RagPipeline(ScriptedEngine(), tmp_path / "store", chunk_tokens=64))
    collection.pipeline.index([notes])
    return collection


@pytest.fixture
def choices(tmp_path: Path) -> Choices:
    return Choices(lambda _: ScriptedEngine(), lambda: tmp_path, shown_deviations, sampling=SamplingParams(8))


def ask(conversation: Conversation, question: str, collection: Collection, choices: Choices) -> Iterator[Exchange]:
    exchange = conversation.begin(question)
    assert exchange is not None
    return conversation.answer(exchange, collection, choices)


def test_a_stopped_answer_becomes_a_turn_and_a_failed_answer_does_not(collection: Collection, choices: Choices) -> None:
    conversation = Conversation()
    engine = collection.pipeline.engine
    assert isinstance(engine, ScriptedEngine)
    engine.failure = ValueError("odd")
    failed = list(ask(conversation, "One?", collection, choices))[-1]
    assert failed.outcome == "failed" and "Unexpected ValueError: odd. This is a bug" in failed.text
    engine.failure = None
    for exchange in ask(conversation, "Two?", collection, choices):
        if "word2" in exchange.text:
            conversation.stop()
    assert exchange.outcome == "stopped" and exchange.text.endswith("word2") and exchange.generation is None
    done = list(ask(conversation, "Three?", collection, choices))[-1]
    assert done.outcome == "done" and done.generation is not None
    assert [turn.question for turn in conversation.turns()] == ["Two?", "Three?"]


def test_a_new_question_stops_the_previous_answer(collection: Collection, choices: Choices) -> None:
    conversation = Conversation()
    first = ask(conversation, "One?", collection, choices)
    next(first), next(first)
    list(ask(conversation, "Two?", collection, choices))
    assert [e.outcome for e in first][-1] == "stopped"
    assert [each.outcome for each in conversation.exchanges] == ["stopped", "done"]


def test_a_models_thoughts_are_not_shown_as_its_answer(tmp_path: Path, choices: Choices) -> None:
    engine, conversation = FakeEngine(tokenizer=thinking()), Conversation()
    (tmp_path / "notes.md").write_text("The harbour lies below.")
    collection = Collection(tmp_path / "store", RagPipeline(engine, tmp_path / "store"))
    collection.pipeline.index([tmp_path / "notes.md"])
    engine.says = ("Hm.", "</think>", "\n\nBelow.")
    assert [each.text for each in map(copy, ask(conversation, "Where?", collection, choices))] == [
        "",
        "Below.",
        "Below.",
    ]
    assert [turn.answer for turn in conversation.turns()] == ["Below."]
    engine.says = ("Hm.",)
    (*_, cut) = ask(conversation, "Who?", collection, choices)
    assert cut.text == "" and "still thinking after 2 tokens" in render.answer(cut)


def test_a_repeated_question_is_ignored_until_its_answer_is_stopped_or_done(
    collection: Collection, choices: Choices
) -> None:
    conversation = Conversation()
    exchange = conversation.begin("One? ")
    assert exchange is not None
    assert conversation.begin("One?") is None  # no part of the answer exists yet
    conversation.stop()
    again = conversation.begin("One?")
    assert again is not None and again is not exchange
    assert [e.outcome for e in conversation.answer(exchange, collection, choices)] == ["stopped"]
    assert list(conversation.answer(again, collection, choices))[-1].outcome == "done"
    assert conversation.begin("One?") is not None


def test_enter_pressed_twice_before_the_model_is_loaded_asks_once(choices: Choices) -> None:
    gr = pytest.importorskip("gradio")
    from cacheblend_rag.ui.chat import ChatPanel

    with gr.Blocks():
        panel = ChatPanel(Workspace(choices), Tabs(), gr.Textbox(), [])
    first = panel.ask("Who?", "tab")
    assert "Waiting for the model" in str(next(first))
    again = [list(updates) for updates in panel.ask("Who?", "tab")]
    assert again == [[panel.question]]  # an answer without updates would empty the page
    first.close()


def test_html_in_documents_questions_and_file_names_is_escaped(collection: Collection, choices: Choices) -> None:
    conversation = Conversation()
    done = list(ask(conversation, "<i>Who?", collection, choices))[-1]
    assert done.generation is not None
    shown = (
        render.answer(done)
        + render.comparison([("<u>", done.generation)], 1)
        + render.files([FileState("<b>x", "skipped", "<b>")])
        + render.error("<b>")
        + render.status("<b>", True)
    )
    assert not [tag for tag in ("<script", "<b>notes", "<b>x", "<i>W", "<u>") if tag in shown]
    assert "&lt;script&gt;alert(1)" in shown


def test_an_answer_cites_its_source_and_the_sentence_nearest_to_the_question_is_marked(
    tmp_path: Path, choices: Choices
) -> None:
    pytest.importorskip("gradio")
    from cacheblend_rag.ui.chat import messages

    note = tmp_path / "note.md"
    note.write_text(
        "# Harbour\n\nIt lies below. Nobody swims there.\n\nThe director of the <b>observatory is Ada Brenmoor."
    )
    engine = ScriptedEngine(words=0)
    collection = Collection(tmp_path / "store", RagPipeline(engine, tmp_path / "store", chunk_tokens=200))
    collection.pipeline.index([note])
    engine.says_first = "She is Ada Brenmoor. I like tea."
    conversation, shown = Conversation(), []
    for each in ask(conversation, "Who is the director of the observatory?", collection, choices):
        shown.append(render.answer(each))
    assert all("<mark>The director of the &lt;b&gt;observatory is Ada Brenmoor.</mark>" in html for html in shown)
    assert [m["content"] for m in messages(conversation)][1] == "She is Ada Brenmoor. [1] I like tea."
    assert "names the source that shares most words" in shown[-1]
    assert shown[-1].count("<mark>") == 1  # the answer's words stand in the marked sentence
    # The history for the model holds no added citation marks.
    assert conversation.turns()[0].answer == engine.says_first
    engine.says_first = "Nobody."
    for each in ask(conversation, "Who swims there in the observatory?", collection, choices):
        html = render.answer(each)
    assert re.findall("<mark>(.*?)</mark>", html)[-1] == "Nobody swims there."


@pytest.mark.parametrize(
    ("mode", "prefill_s", "said"),
    [
        ("blend", 0.23, "2.3x sooner</b> than a prompt computed whole: first token after 100 ms, not 230 ms"),
        ("blend", 0.08, "No sooner</b> than a prompt computed whole: first token after 100 ms, not 80 ms"),
        ("blend", None, "prompt tokens computed</b>; first token after 100 ms"),
        ("prefill", 0.23, "Computed whole</b>, in 100 ms: nothing is stored."),
    ],
)
def test_the_gain_is_shown_only_if_it_was_measured(
    collection: Collection, choices: Choices, mode: Mode, prefill_s: float | None, said: str
) -> None:
    done = list(ask(Conversation(), "Who?", collection, choices))[-1]
    assert done.generation is not None
    reason = "nothing is stored" if mode == "prefill" else ""
    done.generation = replace(done.generation, mode=mode, prefill_s=prefill_s, reason=reason)
    shown = render.answer(done)
    assert said in shown and ("sooner" in shown) == (mode == "blend" and prefill_s is not None)
    assert shown.index('<details class="cb-more">') < shown.index("not calibrated")


def test_a_file_whose_kv_exceeds_the_store_fails_with_a_remedy(
    tmp_path: Path, collection: Collection, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> NoReturn:
        raise TooMuchKVError(IndexPlan(1, 2574, 2574, 10, kv_bytes=54 << 30, room_bytes=0, capacity_bytes=1 << 30))

    monkeypatch.setattr(collection.pipeline, "index", full)
    (tmp_path / "table.csv").write_text("a,b")
    (state,) = list(collection.add([tmp_path / "table.csv"]))[-1]
    assert state.state == "failed" and "54.0 GiB" in state.note and "--disk-budget" in state.note
    assert "beyond_budget" not in state.note


def test_the_least_recently_used_tabs_are_forgotten_and_unnamed_tabs_are_not_kept() -> None:
    tabs = Tabs()
    first = tabs.get("first")
    first.exchanges.append(Exchange("Who?"))
    for number in range(199):
        tabs.get(str(number))
    assert tabs.get("first") is first
    for number in range(300, 499):
        tabs.get(str(number))
    assert tabs.get("first") is first
    for number in range(500, 701):
        tabs.get(str(number))
    assert tabs.get("first") is not first
    assert tabs.get("") is not tabs.get("")


def test_the_texts_of_a_chunks_tokens_join_to_its_text(any_tokenizer: object) -> None:
    engine = ScriptedEngine(tokenizer=any_tokenizer)
    text = "Ships' logs: naïve café — 東京 🙂\n\n| a | b |"
    chunk = make_chunk(text, engine.tokenizer)
    assert "".join(token_texts(engine, chunk)) == text
    assert len(token_texts(engine, chunk)) == len(chunk.token_ids)


def test_a_copy_in_a_store_with_a_relative_path_is_deleted_with_its_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "note.txt").write_text("The harbour lies below.")
    collection = Collection(Path("store"), RagPipeline(ScriptedEngine(), "store", chunk_tokens=64))
    assert list(collection.add([tmp_path / "note.txt"]))[-1][0].state == "done"
    (copy,) = Path("store/documents").iterdir()
    (document,) = collection.documents()
    assert document.path == str(copy.absolute())
    collection.remove([document.path])
    assert not copy.exists() and not collection.documents()


def test_files_added_by_two_runs_at_once_are_all_indexed(collection: Collection, tmp_path: Path) -> None:
    files = [tmp_path / f"{n}.txt" for n in range(4)]
    for file in files:
        file.write_text(f"Note of {file.stem}.")
    one, two = collection.add(files[:2]), collection.add(files[2:])
    next(one), next(two)
    states = [*list(two)[-1], *list(one)[-1]]
    assert {(state.name, state.state) for state in states} == {(file.name, "done") for file in files}
    assert len(collection.documents()) == 5


def test_a_file_that_cannot_be_copied_fails_and_keeps_its_previous_copy(
    tmp_path: Path, collection: Collection, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [tmp_path / "one.txt", tmp_path / "two.txt"]
    for file in files:
        file.write_text("The harbour lies below.")
    assert [state.state for state in list(collection.add(files))[-1]] == ["done", "done"]
    copy = shutil.copyfile

    def full(source: Path, target: Path) -> None:
        if source.name == "two.txt":
            copy(source, target)
        else:
            Path(target).write_text("The")
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("shutil.copyfile", full)
    for file in files:
        file.write_text("The harbour lies above.")
    states = {state.name: state for state in list(collection.add(files))[-1]}
    assert (states["one.txt"].state, states["two.txt"].state) == ("failed", "done")
    assert "No space left on device" in states["one.txt"].note
    kept = {file.name: file.read_text() for file in (tmp_path / "store/documents").iterdir()}
    assert kept == {"one.txt": "The harbour lies below.", "two.txt": "The harbour lies above."}


def test_chosen_documents_are_removed_although_another_tab_has_removed_some_of_them(
    tmp_path: Path, collection: Collection
) -> None:
    files = [tmp_path / "one.txt", tmp_path / "two.txt"]
    for file in files:
        file.write_text(f"Note {file.stem}.")
    list(collection.add(files))
    chosen = [document.path for document in collection.documents()]
    collection.pipeline.remove(chosen[0])
    collection.remove(chosen)
    assert collection.documents() == [] and not any((tmp_path / "store/documents").iterdir())
