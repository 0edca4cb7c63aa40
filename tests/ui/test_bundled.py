"""Tests the numbers of the page on the bundled model and documents."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

pytest.importorskip("playwright.sync_api", reason="playwright is not installed; make setup installs it")
pytest.importorskip("gradio", reason="Gradio is not installed; make setup installs it")

from playwright.sync_api import expect

from cacheblend_rag.calibrate.why import shown_deviations
from cacheblend_rag.demo.bundle import bundled_corpus, bundled_questions
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.ui.launch import serve as launch
from cacheblend_rag.ui.workspace import Choices
from tests.conftest import free_port
from tests.ui.browser import LONG_MS, Tab, overflow

pytestmark = pytest.mark.slow

CROSS = next(question for question in reversed(bundled_questions()) if question.kind == "cross")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A page as `cacheblend ui` opens it without options, with one bundled document, indexed once for all tests here."""
    home, seed = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("seed")
    shutil.copy(bundled_corpus() / CROSS.source, seed / CROSS.source)
    choices = Choices(
        load_engine=lambda store: TransformersEngine(store=store),
        store=lambda: home / "example",
        why=shown_deviations,
        seed=seed,
        sampling=SamplingParams(max_tokens=48),
    )
    address, workspace = launch(choices, free_port(), browser=False, block=False)
    yield address
    import gradio

    workspace.close()
    gradio.close_all()


def number(text: str) -> int:
    return int(text.replace(",", ""))


def test_an_answer_cites_its_source_and_every_panel_shows_the_computed_tokens(url: str, open_tab: Any) -> None:
    tab: Tab = open_tab(url)
    tab.page.get_by_text(CROSS.question, exact=True).wait_for()  # the page offers this question as an example
    tab.ready("bundled")
    said, mark = re.fullmatch(r"(.*?)\.? \[(\d)\]", tab.ask(CROSS.question), re.DOTALL).groups()  # type: ignore[union-attr]
    assert said == CROSS.answer
    source = tab.page.locator("#cb-sources .cb-card .cb-text").nth(int(mark) - 1)
    assert CROSS.answer in (source.text_content() or "")
    recomputed = sources_and_the_fate_of_every_token(tab)
    every_method_computes_what_it_promises(tab)
    as_many_tokens_are_marked_as_were_recomputed(tab, recomputed)
    all_panels_fit(tab, "dark", "dark")


def sources_and_the_fate_of_every_token(tab: Tab) -> int:
    """Return how many tokens were recomputed."""
    sources = tab.page.locator("#cb-sources")
    expect(sources.locator(".cb-card")).to_have_count(6)
    assert set(sources.locator(".cb-tag").all_inner_texts()) == {"exact", "reused"}
    bar = sources.get_by_role("img").get_attribute("aria-label") or ""
    fates = {name: number(count) for name, count in re.findall(r"(\w+) ([\d,]+)", bar)}
    prompt = number(re.search(r"([\d,]+) tokens", sources.locator(".cb-numbers").text_content() or "").group(1))  # type: ignore[union-attr]
    assert set(fates) == {"exact", "reused", "recomputed", "text"} and sum(fates.values()) == prompt
    assert fates["recomputed"] > 50
    tab.shot("ui-answer")
    return fates["recomputed"]


def every_method_computes_what_it_promises(tab: Tab) -> None:
    tab.panel("Compare").page.locator("#cb-compare").click()
    methods = tab.page.locator(".cb-method")
    expect(methods).to_have_count(4, timeout=LONG_MS)
    found = {}
    for method in methods.all():
        name = method.locator("h4").inner_text().splitlines()[0]
        computed, prompt = map(number, re.findall(r"([\d,]+) of ([\d,]+) tokens", method.inner_text())[0])
        found[re.split(r" (?:same|another)", name)[0]] = (method.locator("p").first.inner_text(), computed, prompt)
    full, prefix, reuse, blend = (found[n] for n in ("full recompute", "prefix caching", "full KV reuse", "blend"))
    assert full[0].rstrip(".") == blend[0].rstrip(".") == CROSS.answer != reuse[0]
    assert full[1] == full[2] > prefix[1] > blend[1] > reuse[1]
    tab.shot("ui-compare")


def as_many_tokens_are_marked_as_were_recomputed(tab: Tab, recomputed: int) -> None:
    tab.panel("Why").page.locator("#cb-why").click()
    reasons = tab.page.locator("#cb-reasons")
    expect(reasons.locator(".cb-key")).to_be_visible(timeout=LONG_MS)
    marked = number(re.search(r"recomputed ([\d,]+) tokens", reasons.locator(".cb-key").inner_text()).group(1))  # type: ignore[union-attr]
    assert marked == recomputed
    assert len("".join(reasons.locator(".cb-tokens .cb-marked").all_inner_texts())) > marked  # whole words are marked
    reasons.locator(".cb-key").evaluate("element => element.scrollIntoView()")
    tab.shot("ui-why")


def all_panels_fit(tab: Tab, name: str, scheme: Literal["light", "dark"]) -> None:
    """Check the width of all panels with their answers, comparisons and explanations."""
    tab.page.emulate_media(color_scheme=scheme)
    for panel, shown in (("Sources", "#cb-sources .cb-gain"), ("Compare", ".cb-methods"), ("Why", ".cb-key")):
        tab.panel(panel)
        expect(tab.page.locator(shown)).to_be_visible()
        assert overflow(tab.page) <= 0, (name, panel)
        tab.page.locator("#cb-chat" if panel == "Sources" else shown).evaluate("element => element.scrollIntoView()")
        tab.shot(f"ui-{name}" if panel == "Sources" else f"ui-{name}-{panel.lower()}")


def test_all_panels_fit_phones(url: str, open_tab: Any) -> None:
    tab: Tab = open_tab(url, viewport={"width": 390, "height": 860}, color_scheme="dark").ready()
    tab.ask(CROSS.question)
    tab.panel("Compare").page.locator("#cb-compare").click()
    expect(tab.page.locator(".cb-method")).to_have_count(4, timeout=LONG_MS)
    tab.panel("Why").page.locator("#cb-why").click()
    expect(tab.page.locator(".cb-key")).to_be_visible(timeout=LONG_MS)
    all_panels_fit(tab, "phone-dark", "dark")
    all_panels_fit(tab, "phone", "light")


def test_dropped_documents_are_reused_by_the_first_question(url: str, open_tab: Any, tmp_path: Path) -> None:
    tab: Tab = open_tab(url).ready()
    documents = [tmp_path / f"{topic}.md" for topic in ("tower", "bridge", "mill")]
    for document in documents:
        document.write_text(f"The {document.stem} was built long ago. It stands by the river, and people like it.\n")
    tab.drop(*documents)
    expect(tab.page.locator("#cb-progress li.cb-done")).to_have_count(3, timeout=LONG_MS)
    tab.ask("What stands by the river?")
    cards = tab.page.locator("#cb-sources summary").filter(has_text=re.compile("tower|bridge|mill"))
    expect(cards).to_have_count(3)
    assert {text for card in cards.all() for text in card.locator(".cb-tag").all_inner_texts()} <= {"exact", "reused"}
    tab.shot("ui-documents")
    for document in documents:
        tab.documents().filter(has_text=document.name).locator("input").check()
    tab.page.locator("#cb-delete").click()
    expect(tab.page.locator("#cb-progress li.cb-removed")).to_have_count(3)
