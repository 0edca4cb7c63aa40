"""Tests the page in a real browser, with an engine that each test controls."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright.sync_api", reason="playwright is not installed; make setup installs it")
pytest.importorskip("gradio", reason="Gradio is not installed; make setup installs it")

from playwright.sync_api import expect

from cacheblend_rag.blending.settings import BlendSettings
from cacheblend_rag.calibrate.why import shown_deviations
from cacheblend_rag.engines.base import BlendEngine
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.errors import ServerError
from cacheblend_rag.rag.pipeline import RagPipeline
from cacheblend_rag.ui.workspace import Choices
from tests.ui.browser import Tab, overflow
from tests.ui.scripted import ScriptedEngine

pytestmark = pytest.mark.slow

NOTES = "The Marlow observatory was founded in 1911. Its director is Ada Brenmoor.\n\nThe harbour <b>lies</b> below it."


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    file = tmp_path / "notes.md"
    file.write_text(NOTES)
    return file


@pytest.fixture
def choices(tmp_path: Path, engine: ScriptedEngine, notes: Path) -> Choices:
    """A page on a collection with one document."""
    store = tmp_path / "store"
    with RagPipeline(engine, store, chunk_tokens=24) as pipeline:
        pipeline.index([notes])
    return choices_for(engine, store)


def choices_for(engine: BlendEngine, store: Path, load: Callable[[Path], BlendEngine] | None = None) -> Choices:
    return Choices(load or (lambda _: engine), lambda: store, shown_deviations, sampling=SamplingParams(32))


def test_the_page_opens_before_the_model_is_loaded_and_a_question_waits(
    serve: Any, open_tab: Any, engine: ScriptedEngine, choices: Choices
) -> None:
    loaded = threading.Event()

    def load(_: Path) -> BlendEngine:
        loaded.wait()
        return engine

    url, _ = serve(choices_for(engine, choices.store(), load))
    tab: Tab = open_tab(url)
    expect(tab.page.locator("#cb-status")).to_contain_text("Loading the model")
    tab.begin("Who is the director?")
    expect(tab.answers.last).to_contain_text("Waiting for the model")
    loaded.set()
    expect(tab.answers.last).to_contain_text("About Who is the director?")
    tab.ready("fake").idle()
    assert tab.elsewhere == []  # this includes fonts, scripts and counters


def answering(serve: Any, open_tab: Any, engine: ScriptedEngine, choices: Choices, word: int) -> Tab:
    """Return a page on which the answer to "Who?" has reached a word and waits."""
    engine.free = False
    url, _ = serve(choices)
    tab: Tab = open_tab(url).ready().begin("Who?")
    engine.let(word + 1)
    expect(tab.answers.last).to_contain_text(f"word{word}")
    return tab


def test_an_answer_is_streamed_and_stop_ends_it_at_once(
    serve: Any, open_tab: Any, engine: ScriptedEngine, choices: Choices
) -> None:
    tab = answering(serve, open_tab, engine, choices, 2)
    expect(tab.answers.last).not_to_contain_text("word3")
    expect(tab.page.locator("#cb-sources")).to_contain_text("notes.md")  # the sources are shown before the answer
    tab.stop()
    tab.idle()
    engine.let(10)
    expect(tab.answers.last).to_contain_text("word2 (stopped)")
    expect(tab.page.locator("#cb-sources")).to_contain_text("Stopped before its end")
    assert "word4" in tab.ask("And then?")  # the released words serve the next question
    assert engine.closed_streams == 2


def test_a_question_after_stop_is_asked_before_the_stopped_answer_has_ended(
    serve: Any, open_tab: Any, engine: ScriptedEngine, choices: Choices
) -> None:
    tab = answering(serve, open_tab, engine, choices, 1)
    tab.stop().idle().begin("And then?")  # the stream has not reached its next word
    expect(tab.answers).to_have_count(2)
    fewest = tab.fewest_answers()
    tab.begin("And then?")  # the second press of Enter
    expect(tab.question).to_have_value("")
    engine.let(9)
    expect(tab.answers.last).to_contain_text("word6")
    tab.idle()
    expect(tab.answers.first).to_contain_text("word1 (stopped)")
    assert engine.closed_streams == 2
    assert fewest() == 2  # neither the stopped answer's end nor the second press removes an answer


def test_escape_stops_the_answer_and_a_slash_focuses_the_question(
    serve: Any, open_tab: Any, engine: ScriptedEngine, choices: Choices
) -> None:
    engine.free = False
    url, _ = serve(choices)
    tab: Tab = open_tab(url).ready()
    tab.page.locator("#cb-new").focus()
    tab.page.keyboard.press("/")
    expect(tab.question).to_be_focused()
    tab.page.keyboard.type("Who?")
    tab.page.keyboard.press("Enter")
    engine.let(2)
    expect(tab.answers.last).to_contain_text("word1")
    tab.page.keyboard.press("Escape")
    tab.idle()
    engine.let(1)
    expect(tab.answers.last).to_contain_text("(stopped)")
    card = tab.page.locator("#cb-sources .cb-card summary").first
    card.focus()
    tab.page.keyboard.press("Enter")
    expect(tab.page.locator("#cb-sources .cb-text").first).to_be_visible()


def test_a_reloaded_tab_keeps_its_conversation_and_shares_it_with_no_other_tab(
    serve: Any, open_tab: Any, engine: ScriptedEngine, choices: Choices
) -> None:
    url, _ = serve(choices)
    one: Tab = open_tab(url).ready()
    one.ask("First of one")
    one.ask("And since when?")
    said = r"Question: First of one\s*Answer: About First.* word6\s+Question: And since when\?"
    assert re.search(said, engine.asked[-1], re.DOTALL), "a follow-up is answered in the context of what was said"
    two: Tab = open_tab(url, beside=one).ready()
    expect(two.answers).to_have_count(0)
    engine.free = False
    one.begin("Second of one")
    two.begin("First of two")
    engine.let(40)
    for tab, asked, other in ((one, "Second of one", "of two"), (two, "First of two", "of one")):
        expect(tab.answers.last).to_contain_text(f"About {asked}")
        tab.idle()
        expect(tab.chat).not_to_contain_text(other)
    one.page.reload()
    expect(one.answers).to_have_count(3)
    expect(one.answers.last).to_contain_text("About Second of one")
    expect(one.page.locator("#cb-sources")).to_contain_text("notes.md")
    one.page.locator("#cb-new").click()
    expect(one.answers).to_have_count(0)
    expect(two.answers).to_have_count(1)


def test_documents_are_added_with_progress_skipped_with_a_reason_and_deleted(
    serve: Any, open_tab: Any, tmp_path: Path, choices: Choices
) -> None:
    ships, empty, image = tmp_path / "ships.txt", tmp_path / "empty.txt", tmp_path / "harbour.png"
    ships.write_text("The Ivory Anchor sails at dawn. Her cargo is salt.")
    empty.touch()
    image.write_bytes(b"\x89PNG")
    url, workspace = serve(choices)
    tab: Tab = open_tab(url).ready().drop(ships, empty, image)
    progress = tab.page.locator("#cb-progress li")
    expect(progress.nth(0)).to_contain_text("indexed")
    expect(progress.nth(0)).to_contain_text("chunk")
    expect(progress.nth(1)).to_contain_text("it is empty")
    expect(progress.nth(2)).to_contain_text("its type (.png) is not among")
    for line in progress.all():
        expect(line).to_be_visible()
    expect(tab.documents()).to_have_count(2)
    kept = workspace.collection().directory / "documents"
    assert [file.name for file in kept.iterdir()] == ["ships.txt"]
    tab.ask("What does the Ivory Anchor carry?")
    expect(tab.page.locator("#cb-sources")).to_contain_text("ships.txt")
    tab.drop(ships)
    expect(progress.filter(has_text="ships.txt")).to_contain_text("unchanged")
    tab.documents().filter(has_text="ships.txt").locator("input").check()
    tab.page.locator("#cb-delete").click()
    expect(tab.documents()).to_have_count(1)
    assert list(kept.iterdir()) == []


def test_broken_and_oversized_files_are_reported_visibly(
    serve: Any, open_tab: Any, tmp_path: Path, choices: Choices, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cacheblend_rag.ui.launch._LARGEST_FILE", "2kb")
    broken, large = tmp_path / "broken.pdf", tmp_path / "large.txt"
    broken.write_bytes(b"%PDF-1.4 and no more")
    large.write_text("The harbour lies below. " * 200)
    url, _ = serve(choices)
    tab: Tab = open_tab(url).ready().drop(broken)
    expect(tab.page.get_by_text("broken.pdf")).to_be_visible()
    expect(tab.page.locator("#cb-progress li")).to_be_visible()
    tab.drop(large)
    expect(tab.page.get_by_text("large.txt")).to_be_visible()
    expect(tab.documents()).to_have_count(1)
    tab.page.locator("#cb-delete").click()
    expect(tab.page.get_by_text("Choose the documents to delete first.")).to_be_visible()


def test_an_image_on_another_machine_is_not_fetched(
    serve: Any, open_tab: Any, engine: ScriptedEngine, choices: Choices
) -> None:
    asked: list[str] = []

    class Elsewhere(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)

    other = ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere)
    threading.Thread(target=other.serve_forever, daemon=True).start()
    name = f"http://127.0.0.1:{other.server_port}"
    engine.says_first = f"Here: ![secret]({name}/markdown.png) <img src='{name}/tag.png'>"
    url, _ = serve(choices)
    tab: Tab = open_tab(url).ready()
    tab.ask("Who?")
    images = tab.answers.last.locator("img")
    expect(images).to_have_count(2)
    tab.page.wait_for_function("[...document.querySelectorAll('#cb-chat img')].every(image => image.complete)")
    other.shutdown()
    assert asked == []


def test_the_chosen_reuse_is_used_for_the_next_answer(
    serve: Any, open_tab: Any, engine: ScriptedEngine, choices: Choices
) -> None:
    url, _ = serve(choices)
    tab: Tab = open_tab(url).ready()
    tab.ask("Who?")
    tab.page.get_by_label("Reuse of stored KV").click()
    tab.page.get_by_role("option", name="fast").click()
    tab.ask("And when?")
    assert engine.settings == [BlendSettings(), BlendSettings(quality="fast")]
    expect(tab.page.locator("#cb-sources .cb-gain")).to_be_visible()
    numbers = tab.page.locator("#cb-sources .cb-numbers")
    expect(numbers).to_be_hidden()
    tab.page.get_by_text("Numbers", exact=True).click()
    expect(numbers).to_be_visible()


def test_a_server_that_is_down_is_reported_and_can_be_retried(
    serve: Any, open_tab: Any, engine: ScriptedEngine, choices: Choices
) -> None:
    down = [True]

    def load(_: Path) -> BlendEngine:
        if down[0]:
            raise ServerError("No server answers at http://localhost:8000/v1. Start one with `cacheblend serve`.")
        return engine

    url, _ = serve(choices_for(engine, choices.store(), load))
    tab: Tab = open_tab(url)
    expect(tab.page.get_by_role("alert")).to_contain_text("Start one with `cacheblend serve`")
    assert "No server answers" in tab.ask("Who?")
    down[0] = False
    tab.page.locator("#cb-try-again").click()
    tab.ready()
    expect(tab.page.locator("#cb-try-again")).to_be_hidden()
    engine.failure = ServerError("The server went away.")  # the server also fails during an answer
    assert tab.ask("Who?") == "Not answered. The server went away."
    engine.failure = None
    assert tab.ask("Who?").startswith("About Who?")


def test_a_store_of_another_model_and_an_empty_store_are_reported(
    serve: Any, open_tab: Any, engine: ScriptedEngine, tmp_path: Path, notes: Path
) -> None:
    with RagPipeline(ScriptedEngine(name="other"), tmp_path / "theirs", chunk_tokens=24) as pipeline:
        pipeline.index([notes])
    url, _ = serve(choices_for(engine, tmp_path / "theirs"))
    expect(open_tab(url).page.get_by_role("alert")).to_contain_text("was made for the model other")
    url, _ = serve(choices_for(engine, tmp_path / "empty"))
    assert "Nothing is indexed yet. Drop files" in open_tab(url).ready().ask("Who?")


def test_the_page_fits_a_phone_and_follows_the_systems_colours(serve: Any, open_tab: Any, choices: Choices) -> None:
    url, _ = serve(choices)
    tab: Tab = open_tab(url, viewport={"width": 360, "height": 800}, color_scheme="dark").ready()
    # An open panel of documents would cover the conversation.
    expect(tab.page.locator("#cb-side")).not_to_be_in_viewport(ratio=0.5)
    tab.ask("Who is the director of the observatory, whose name is long enough to be broken into lines?")
    tab.page.locator("#cb-sources .cb-card summary").first.click()
    for width in (360, 768, 1400):
        tab.page.set_viewport_size({"width": width, "height": 800})
        assert overflow(tab.page) <= 0, width
    assert brightness(tab) < 200
    tab.page.emulate_media(color_scheme="light")
    tab.page.reload()
    assert brightness(tab.ready()) > 200


def brightness(tab: Tab) -> int:
    """Return the sum of the background's red, green and blue."""
    background = tab.page.evaluate("getComputedStyle(document.body).backgroundColor")
    return sum(map(int, re.findall(r"\d+", background)[:3]))
