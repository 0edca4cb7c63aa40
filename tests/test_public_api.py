"""Tests the public names of `import cacheblend_rag`."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType

import pytest

import cacheblend_rag
from cacheblend_rag import frameworks

ROOT = Path(__file__).parent.parent
PLACES = (
    "README.md",
    "docs/**/*.md",
    "examples/**/*",
    "lab/benchmarks/*.py",
    "integrations/*/*.md",
    "integrations/*/[!t]*/**/*",
)
ENDINGS = {".py", ".md", ".ipynb"}
# These benchmarks measure or make internals: an engine's passes, a registry's memory, a model's file.
_MEASURES = (
    "host_time.py",
    "pooled_quality.py",
    "real_model.py",
    "profile_blend.py",
    "scale.py",
)
INSIDERS = {ROOT / "lab/benchmarks" / name for name in _MEASURES}
# `python -m` names a program, not an import.
DOTTED = re.compile(r"(?<!python -m )\bcacheblend_rag\.(\w+)\.(\w+)")


def test_every_public_name_is_there() -> None:
    for name in set(cacheblend_rag.__all__) - {"VLLMEngine"}:  # VLLMEngine needs vLLM; mypy and the next test check it
        found = getattr(cacheblend_rag, name)
        assert not isinstance(found, (type, FunctionType)) or found.__name__ == name
    with pytest.raises(AttributeError, match="nothing_of_that_name"):
        _ = cacheblend_rag.nothing_of_that_name


def test_the_stub_lists_exactly_the_public_names() -> None:
    stub = ast.parse(Path(cacheblend_rag.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    listed = [name for node in stub.body if isinstance(node, ast.ImportFrom) for name in node.names]
    assert [name.name for name in listed] == cacheblend_rag.__all__
    assert all(name.asname == name.name for name in listed)  # without it, type checkers see no public name


def test_at_most_35_names_are_public() -> None:
    assert len(cacheblend_rag.__all__) <= 35


def test_names_for_frameworks_are_not_public_and_an_integration_uses_each() -> None:
    named = {name for name, found in vars(frameworks).items() if name[0] != "_" and not isinstance(found, ModuleType)}
    assert not named & set(cacheblend_rag.__all__)
    code = [ast.parse(file.read_text("utf-8")) for file in ROOT.glob("integrations/*/*_cacheblend/**/*.py")]
    used = {
        name.name
        for tree in code
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "cacheblend_rag.frameworks"
        for name in node.names
    }
    for page in ROOT.glob("integrations/*/README.md"):  # the READMEs name some of these names
        used.update(re.findall(r"cacheblend_rag\.frameworks\.(\w+)", page.read_text("utf-8")))
    assert len(named) > 10
    assert used == named


def test_documents_and_integrations_name_no_deeper_modules() -> None:
    """Nothing outside the package names a module below its second level."""
    files = [file for place in PLACES for file in ROOT.glob(place) if file.suffix in ENDINGS and file not in INSIDERS]
    assert len(files) > 60
    deeper = [f"{file.relative_to(ROOT)}: {found}" for file in files for found in deep_names(file)]
    assert deeper == []


def deep_names(file: Path) -> Iterator[str]:
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".ipynb":
        text = "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
    elif file.suffix == ".py":
        yield from (name for name in imported(ast.parse(text)) if name.count(".") > 1)
    # Docstrings, notebooks and prose count too; a name that is no module belongs to a second-level module.
    yield from (match[0] for match in DOTTED.finditer(text) if is_module(match[1], match[2]))


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.startswith("cacheblend_rag"))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("cacheblend_rag"):
            # `from cacheblend_rag.prompts import prompt` is an import of cacheblend_rag.prompts.prompt.
            parents = (node.module or "").split(".")[1:]
            yield from (f"{node.module}.{name.name}" for name in node.names if is_module(*parents, name.name))
            yield node.module or ""


def is_module(*names: str) -> bool:
    path = ROOT.joinpath("cacheblend_rag", *names)
    return path.is_dir() or path.with_suffix(".py").is_file()


def test_the_search_finds_names_of_deeper_modules(tmp_path: Path) -> None:
    written = {
        "a.py": "def f():\n    from cacheblend_rag.prompts import prompt\n    import cacheblend_rag.engines.base\n",
        "b.py": "from cacheblend_rag.prompts.chunk import Chunk\n",
        "c.md": "Use `cacheblend_rag.prompts.chunk.chunk_id`, or `python -m cacheblend_rag.calibrate.x`.",
        "d.ipynb": json.dumps({"cells": [{"source": ["from cacheblend_rag.demo.bundle import x"]}]}),
        "e.py": "from cacheblend_rag.store import DiskStore\nfrom cacheblend_rag import Chunk, store\n",
    }
    found = {}
    for name, text in written.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        found[name] = set(deep_names(tmp_path / name))
    assert found == {
        "a.py": {"cacheblend_rag.prompts.prompt", "cacheblend_rag.engines.base"},
        "b.py": {"cacheblend_rag.prompts.chunk"},
        "c.md": {"cacheblend_rag.prompts.chunk"},
        "d.ipynb": {"cacheblend_rag.demo.bundle"},
        "e.py": set(),
    }


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.slow
def test_importing_the_package_and_the_command_line_imports_no_heavy_library() -> None:
    heavy = "print(sorted({'torch', 'transformers', 'faiss', 'sentence_transformers'} & set(sys.modules)))"
    assert run(f"import sys, cacheblend_rag; {heavy}; import cacheblend_rag.cli; {heavy}") == "[]\n[]"
