"""Times how soon the page of `cacheblend ui` shows an answer: `python lab/benchmarks/page_latency.py [--json]`.

The bundled model answers the bundled questions; a real Chromium records when each piece of an answer is on the page.
The benchmark needs `make browser`, and the extras `ui` and `dev`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from playwright.sync_api import expect, sync_playwright

from cacheblend_rag import TransformersEngine
from cacheblend_rag.calibrate.why import shown_deviations
from cacheblend_rag.demo.bundle import bundled_corpus, bundled_questions
from cacheblend_rag.engines.base import BlendEngine
from cacheblend_rag.ui.launch import serve
from cacheblend_rag.ui.workspace import Choices

BOT = "#cb-chat .bot.message, #cb-chat .message.bot"
LONG_MS = 300_000
# Records the time whenever the last answer on the page has changed.
WATCH = """() => {
  window.seen = [];
  new MutationObserver(() => {
    const bots = document.querySelectorAll('BOT');
    const text = bots.length ? bots[bots.length - 1].innerText.trim() : '';
    const last = window.seen.at(-1);
    if (!last || last[1] !== bots.length || last[2] !== text) window.seen.push([Date.now(), bots.length, text]);
  }).observe(document.body, {childList: true, subtree: true, characterData: true});
}""".replace("BOT", BOT)


class Noting:
    """Patches an engine to record, for each piece of an answer, seconds since the epoch and the text so far."""

    def __init__(self, engine: BlendEngine):
        self.said: list[list[tuple[float, str]]] = []
        self._stream = engine.stream
        engine.stream = self.stream  # type: ignore[method-assign]

    def stream(self, *arguments: Any, **options: Any) -> Iterator[Any]:
        """Stream as the engine does, and record each piece."""
        self.said.append([])
        text = ""
        for event in self._stream(*arguments, **options):
            text += event.text
            if event.text.strip():
                self.said[-1].append((time.time(), text.strip()))
            yield event


def delays(said: list[tuple[float, str]], seen: list[tuple[float, str]]) -> list[float]:
    """Return for each piece the seconds until the page showed the text up to the piece's end."""
    return [next(at for at, shown in seen if shown.startswith(text)) - when for when, text in said]


def measure(questions: list[str]) -> dict[str, float]:
    """Ask the questions on the page; return the first paint's time and the pieces' delays, in milliseconds."""
    noting: list[Noting] = []

    def load(directory: Path) -> BlendEngine:
        engine = TransformersEngine(store=directory)
        noting.append(Noting(engine))
        return engine

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        home = Path(folder)
        url, workspace = serve(
            Choices(load, lambda: home / "store", shown_deviations, bundled_corpus()), port, False, False
        )
        page = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"]).new_page()
        page.goto(url)
        page.wait_for_function("performance.getEntriesByName('first-contentful-paint').length")
        paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
        expect(page.locator("#cb-status")).to_contain_text("Model", timeout=LONG_MS)
        page.evaluate(WATCH)
        for number, question in enumerate(questions, 1):
            page.locator("#cb-question textarea").fill(question)
            page.locator("#cb-question textarea").press("Enter")
            expect(page.locator(BOT)).to_have_count(number, timeout=LONG_MS)
            expect(page.locator("#cb-question .submit-button")).to_be_visible(timeout=LONG_MS)
        seen = page.evaluate("window.seen")
        workspace.close()
    found = []
    for number, said in enumerate(noting[0].said, 1):
        found += delays(said, [(at / 1e3, text) for at, bots, text in seen if bots == number])
    found.sort()
    return {
        "first_paint_ms": round(paint),
        "pieces": len(found),
        "delay_ms_median": round(1e3 * statistics.median(found), 1),
        "delay_ms_p90": round(1e3 * found[int(0.9 * (len(found) - 1))], 1),
        "delay_ms_max": round(1e3 * found[-1], 1),
    }


def main() -> None:
    """Measure and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--questions", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    result = measure([row.question for row in bundled_questions()[: given.questions]])
    print(json.dumps(result) if given.json else "\n".join(f"{name:>18}  {value:,}" for name, value in result.items()))


if __name__ == "__main__":
    main()
