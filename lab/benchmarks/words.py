"""Lists sentences of docstrings, comments and pages that begin with a word that points outside the sentence.

Run ``python lab/benchmarks/words.py``; the exit status is 1 if there are any. Questions may begin with such a word.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
CODE = (
    "cacheblend_rag",
    "lab/cacheblend_lab",
    "lab/training",
    "lab/benchmarks",
    "tests",
    "lab/lab_tests",
    *map(str, ROOT.glob("integrations/*/*_*")),
    *map(str, ROOT.glob("integrations/*/tests")),
)
PAGES = ("README.md", "CONTRIBUTING.md", "docs", "lab/README.md", *map(str, ROOT.glob("integrations/*/README.md")))
BEGINS = re.compile(r"(What|Of|Whose|Whom|That|Such|Which|Those|(?:With|Without|By|From) which)\b")
_NOT_PROSE = re.compile(r"^```[\s\S]*?^```|^    .+$|^\|.*$", re.MULTILINE)
_PARAGRAPHS = re.compile(r"\n\s*\n|\n\s*[-*] |\n\s*\w+:\s")
_TECHNICAL = ("# type:", "# noqa", "# fmt")


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a docstring, a comment or a page's prose."""
    for paragraph in _PARAGRAPHS.split(text):
        yield from re.split(r"(?<=[.:;!?])\s+", " ".join(paragraph.split()).lstrip("*_- "))


def prose(file: Path) -> Iterator[str]:
    """Yield the docstrings and comments of a Python file, or the text of a page without code blocks and tables."""
    text = file.read_text("utf-8")
    if file.suffix != ".py":
        yield _NOT_PROSE.sub("", text)
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value
    block: list[str] = []
    last = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith(_TECHNICAL):
            if token.start[0] != last + 1 or not token.line.lstrip().startswith("#"):
                yield " ".join(block)
                block = []
            block.append(token.string.lstrip("# "))
            last = token.start[0]
    yield " ".join(block)


def found() -> Iterator[str]:
    """Yield ``file: sentence`` for each sentence that begins with such a word."""
    files = [file for place in CODE for file in sorted((ROOT / place).rglob("*.py"))]
    for place in PAGES:
        path = ROOT / place
        files += [path] if path.is_file() else sorted(path.rglob("*.md"))
    for file in files:
        if not {"_build", "generated"} & set(file.parts):
            for text in prose(file):
                for sentence in sentences(text):
                    if BEGINS.match(sentence) and not sentence.endswith("?"):
                        yield f"{file.relative_to(ROOT)}: {sentence[:100]}"


if __name__ == "__main__":
    lines = list(found())
    print("\n".join(lines) or "No sentence begins with such a word.")
    sys.exit(bool(lines))
