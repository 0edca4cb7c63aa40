"""Tests the example chatbot, a starting point for users' own chatbots, in a real browser."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright.sync_api", reason="playwright is not installed; make setup installs it")
pytest.importorskip("gradio", reason="Gradio is not installed; make setup installs it")

from playwright.sync_api import expect

from cacheblend_rag.rag.pipeline import RagPipeline
from tests.ui.conftest import free_port
from tests.ui.scripted import ScriptedEngine

pytestmark = pytest.mark.slow

FILE = Path(__file__).parents[2] / "examples" / "chatbot" / "chatbot.py"


def load() -> Any:
    spec = importlib.util.spec_from_file_location("chatbot_example", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example_answers_follow_ups_with_sources_and_takes_documents(open_tab: Any, tmp_path: Path) -> None:
    import gradio

    notes = tmp_path / "notes.md"
    notes.write_text("The Marlow observatory was founded in 1911.")
    more = tmp_path / "ships.txt"
    more.write_text("The Ivory Anchor sails at dawn.")
    engine = ScriptedEngine()
    with RagPipeline(engine, tmp_path / "store") as rag:
        url = load().serve(rag, [notes], free_port(), block=False)
        tab = open_tab(url)
        question = tab.page.locator("#question textarea")
        for asked in ("When was it founded?", "And by whom?"):
            question.fill(asked)
            question.press("Enter")
            expect(tab.page.get_by_text(f"About {asked} word1 word2 word3 word4 word5 word6")).to_be_visible()
            expect(tab.page.locator("#sources")).to_contain_text("notes.md, chunk 0")
        assert "Question: When was it founded?" in engine.asked[-1]
        tab.page.locator("#files input[type=file]").set_input_files(str(more))
        expect(tab.page.locator("#report")).to_contain_text("ships.txt: indexed")
        assert tab.elsewhere == []
        gradio.close_all()
