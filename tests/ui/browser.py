"""Acts on a page for the tests, by the names that people and screen readers see."""

from __future__ import annotations

import os
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Locator, Page, expect

SHOTS = os.environ.get("CACHEBLEND_SCREENSHOTS")
LONG_MS = 300_000
_ANSWERS = ".bot.message, .message.bot"
expect.set_options(timeout=90_000)  # a test may not fail on a busy machine


class Tab:
    """One tab of the page."""

    def __init__(self, page: Page, url: str):
        self.page = page
        self.elsewhere: list[str] = []
        page.on("request", lambda request: self._note(request.url, url))
        page.goto(url)

    def _note(self, requested: str, own: str) -> None:
        if not requested.startswith((own, "data:", "blob:")):
            self.elsewhere.append(requested)

    @property
    def question(self) -> Locator:
        return self.page.locator("#cb-question textarea")

    @property
    def chat(self) -> Locator:
        return self.page.locator("#cb-chat")

    @property
    def answers(self) -> Locator:
        return self.chat.locator(_ANSWERS)

    def ready(self, model: str = "") -> Tab:
        """Wait until the model is loaded."""
        expect(self.page.locator("#cb-status")).to_contain_text(f"Model {model}".strip(), timeout=LONG_MS)
        return self

    def fewest_answers(self) -> Callable[[], int]:
        """Watch the conversation from now on; the returned function gives the fewest answers shown so far."""
        self.page.evaluate(
            """answers => {
                const chat = document.querySelector("#cb-chat"), count = () => chat.querySelectorAll(answers).length;
                window.fewestAnswers = count();
                new MutationObserver(() => { window.fewestAnswers = Math.min(window.fewestAnswers, count()); })
                    .observe(chat, { childList: true, subtree: true });
            }""",
            _ANSWERS,
        )
        return lambda: int(self.page.evaluate("window.fewestAnswers"))

    def begin(self, question: str) -> Tab:
        """Ask without waiting for the answer."""
        self.question.fill(question)
        self.question.press("Enter")
        return self

    def ask(self, question: str) -> str:
        """Ask, wait for the answer's end, and return it."""
        before = self.answers.count()
        self.begin(question)
        expect(self.answers).to_have_count(before + 1, timeout=LONG_MS)
        self.idle()
        return self.answers.last.inner_text().strip()

    def idle(self) -> Tab:
        """Wait until no question is being answered."""
        expect(self.page.locator("#cb-question .submit-button")).to_be_visible(timeout=LONG_MS)
        return self

    def stop(self) -> Tab:
        self.page.locator("#cb-question .stop-button").click()
        return self

    def panel(self, name: str) -> Tab:
        self.page.get_by_role("tab", name=name).click()
        return self

    def drop(self, *files: Path) -> Tab:
        self.page.locator("#cb-upload input[type=file]").set_input_files([str(file) for file in files])
        return self

    def documents(self) -> Locator:
        return self.page.locator("#cb-documents label")

    def shot(self, name: str) -> Tab:
        """Save a screenshot for the documentation if CACHEBLEND_SCREENSHOTS is set."""
        if SHOTS:
            picture = Image.open(BytesIO(self.page.screenshot(animations="disabled")))
            picture.save(Path(SHOTS) / f"{name}.webp", quality=80, method=6)
        return self


def overflow(page: Page) -> int:
    """Return by how many pixels the page is wider than its window."""
    found: Any = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
    return int(found)
