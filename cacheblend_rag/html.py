"""HTML to readable text: paragraphs, list items and table rows as a reader would type them."""

from __future__ import annotations

from collections.abc import Iterator

from bs4 import BeautifulSoup
from bs4.element import NavigableString, PreformattedString, Tag

_INVISIBLE = {"script", "style", "noscript", "template", "svg", "head", "iframe", "object", "select", "textarea"}
_BLOCKS = {
    *("address", "article", "aside", "blockquote", "body", "caption", "dd", "details", "dialog", "div", "dl", "dt"),
    *("fieldset", "figcaption", "figure", "footer", "form", "h1", "h2", "h3", "h4", "h5", "h6", "header", "hr", "html"),
    *("main", "nav", "ol", "p", "pre", "section", "summary", "table", "tbody", "tfoot", "thead", "ul"),
}
_LINES = {"li": "- ", "tr": ""}
_HEADINGS = {f"h{level}": "#" * level + " " for level in range(1, 7)}


def html_to_text(html: bytes | str) -> tuple[str, str | None]:
    """Return the readable text of a page and its title.

    The encoding is taken from the BOM or the page's own declaration. Headings become Markdown headings, so that chunking
    keeps them with what they head. The title is the first paragraph unless the page shows it anyway.
    """
    soup = BeautifulSoup(html, "html.parser")
    title = " ".join(soup.title.get_text().split()) if soup.title else ""
    text = _Writer().write(soup)
    if title and title not in text:
        text = f"{title}\n\n{text}".rstrip()
    return text, title or None


class _Writer:
    def __init__(self) -> None:
        self._out: list[str] = []
        self._line: list[str] = []
        self._gap = ""
        self._bullet = ""
        self._items = 0

    def write(self, root: Tag) -> str:
        # A stack of its own, because hostile pages nest deeper than Python recurses.
        stack: list[tuple[Tag, Iterator[object]]] = [(root, iter(root.children))]
        preformatted = 0
        while stack:
            tag, children = stack[-1]
            child = next(children, None)
            if child is None:
                stack.pop()
                preformatted -= tag.name == "pre"
                self._close(tag)
            elif isinstance(child, Tag):
                if child.name not in _INVISIBLE:
                    preformatted += child.name == "pre"
                    self._open(child)
                    stack.append((child, iter(child.children)))
            elif isinstance(child, NavigableString) and not isinstance(child, PreformattedString):
                self._text(str(child), preformatted > 0)
        self._flush("\n\n")
        return "".join(self._out)

    def _open(self, tag: Tag) -> None:
        if tag.name == "br":
            self._flush("\n")
        elif tag.name in _BLOCKS:
            self._flush("\n" if self._items else "\n\n")
            self._bullet = _HEADINGS.get(tag.name, self._bullet)
        elif tag.name in _LINES:
            self._flush("\n")
            self._bullet = _LINES[tag.name]
            self._items += 1
        elif tag.name in ("td", "th") and self._line:
            self._line.append(" | ")

    def _close(self, tag: Tag) -> None:
        if tag.name == "pre":
            self._emit("".join(self._line).rstrip(), "\n\n")
        elif tag.name in _BLOCKS:
            self._flush("\n" if self._items else "\n\n")
            self._bullet = "" if tag.name in _HEADINGS else self._bullet
        elif tag.name in _LINES:
            self._flush("\n")
            self._items -= 1

    def _text(self, text: str, preformatted: bool) -> None:
        if not preformatted:
            self._line.append(text)
            return
        for index, line in enumerate(text.split("\n")):
            if index:
                written = "".join(self._line).rstrip()
                self._emit(written, "\n" if written else "\n\n")
            self._line.append(line)

    def _flush(self, gap: str) -> None:
        self._emit(" ".join("".join(self._line).split()), gap)

    def _emit(self, line: str, gap: str) -> None:
        self._line = []
        if line:
            self._out += [self._gap if self._out else "", self._bullet, line]
            self._gap, self._bullet = gap, ""
        elif len(gap) > len(self._gap):
            self._gap = gap
