"""What `import cacheblend_rag` promises."""

from __future__ import annotations

import subprocess
import sys

import pytest

import cacheblend_rag


def test_every_public_name_is_there() -> None:
    for name in cacheblend_rag.__all__:
        assert getattr(cacheblend_rag, name).__name__ == name
    with pytest.raises(AttributeError, match="nothing_of_that_name"):
        _ = cacheblend_rag.nothing_of_that_name


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.slow
def test_importing_the_package_and_the_command_line_waits_for_nothing_heavy() -> None:
    heavy = "print(sorted({'torch', 'transformers', 'faiss', 'sentence_transformers'} & set(sys.modules)))"
    assert run(f"import sys, cacheblend_rag; {heavy}") == "[]"
    assert run(f"import sys, cacheblend_rag.cli; {heavy}") == "[]"


@pytest.mark.slow
def test_the_engine_needs_neither_faiss_nor_sentence_transformers() -> None:
    heavy = "print(sorted({'faiss', 'sentence_transformers', 'bs4', 'pypdf'} & set(sys.modules)))"
    assert run(f"import sys; from cacheblend_rag import TransformersEngine; {heavy}") == "[]"
