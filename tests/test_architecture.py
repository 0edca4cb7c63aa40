"""Tests that docs/architecture.md describes the tree, that imports go down its floors, and that documents name real paths."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest
from benchmarks.house import (
    all_imports,
    circles,
    double_classes,
    imported_names,
    long_files,
    long_functions,
    modules,
)

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "cacheblend_rag"
LAB = ROOT / "lab"
DOCUMENT = ROOT / "docs/architecture.md"
TEXT = DOCUMENT.read_text("utf-8")
FACES = {"__init__", "__main__"}
OUTSIDE = {"benchmarks", "cacheblend_lab", "lab", "tests", "training"}


def picture() -> dict[str, int]:
    """Return each folder and root module of the picture, and the floor it stands on."""
    floors: dict[str, int] = {}
    floor = 0
    section = TEXT.partition("## The house")[2].partition("\n## ")[0]
    for line in section.splitlines():
        if found := re.match(r" {3}(?P<floor>[ \d]\d|  )  (?P<name>[a-z]+)(\.py)? ", line):
            floor = int(found["floor"]) if found["floor"].strip() else floor
            floors[found["name"]] = floor
    return floors


FLOORS = picture()
MODULES = modules()


@cache
def parts() -> set[str]:
    """Return the folders and root modules of the package."""
    folders = {entry.parent.name for entry in PACKAGE.glob("*/__init__.py")}
    return folders | {entry.stem for entry in PACKAGE.glob("*.py")}


def imports() -> Iterator[tuple[str, str, str]]:
    """Yield (importing part, imported part, where) for every import between parts, inside functions too."""
    for module in MODULES.values():
        inside = module.file.relative_to(PACKAGE)
        part = inside.parts[0] if len(inside.parts) > 1 else inside.stem
        for node in module.nodes:
            for name in imported_names(node, module.package):
                first, _, rest = name.partition(".")
                target = rest.partition(".")[0] if rest.partition(".")[0] in parts() else "__init__"
                if first == "cacheblend_rag" and target != part:
                    yield part, target, f"{inside}:{node.lineno} imports {name}"
                assert first not in OUTSIDE, f"{inside} imports {first}, which is not in the wheel"


def test_the_picture_names_exactly_the_folders_and_root_modules() -> None:
    assert set(FLOORS) == parts() - FACES
    for face in FACES:
        assert f"`{face}.py`" in TEXT


def test_the_package_has_at_most_20_parts_on_consecutive_floors() -> None:
    assert len(parts()) <= 20
    assert sorted(set(FLOORS.values())) == list(range(1, max(FLOORS.values()) + 1))


def test_imports_go_only_to_lower_floors() -> None:
    wrong = []
    for part, target, where in imports():
        if part in FACES:
            continue
        if target == "__init__":
            if not where.endswith(" cacheblend_rag.__version__"):
                wrong.append(f"{where}: inside the package nothing but __version__ comes from its face")
        elif FLOORS[target] >= FLOORS[part]:
            wrong.append(f"{where}: {target} is on floor {FLOORS[target]}, {part} on floor {FLOORS[part]}")
    assert not wrong, "\n".join(wrong)


def test_relative_and_absolute_imports_are_both_seen() -> None:
    package = ("cacheblend_rag", "store")
    seen = {
        source: imported_names(ast.parse(source).body[0], package)
        for source in (
            "from .. import cli",
            "from ..console import options",
            "from . import kv",
            "import cacheblend_rag.cli",
        )
    }
    assert list(seen.values()) == [
        ["cacheblend_rag.cli"],
        ["cacheblend_rag.console.options"],
        ["cacheblend_rag.store.kv"],
        ["cacheblend_rag.cli"],
    ]


NO_VERB = re.compile(
    r"(What|Who|Whose|Whom|Which|How|Where|When|Why|Whether|Of|For|From|To|In|On|At|By|With|Behind|Between|Without|"
    r"Every|Everything|All|Once|If|That)\b"
)


@pytest.mark.parametrize("folder", ["cacheblend_rag", "lab", "integrations"])
def test_docstrings_begin_with_a_plain_statement(folder: str) -> None:
    wrong = []
    known = {module.file: module.nodes for module in MODULES.values()}
    for file in sorted((ROOT / folder).rglob("*.py")):
        if not {"tests", "lab_tests"} & set(file.relative_to(ROOT).parts):
            nodes = known.get(file) or ast.walk(parsed(file))
            wrong += [f"{file.relative_to(ROOT)}: {first}" for first in openings(nodes)]
    assert wrong == []


@pytest.mark.parametrize("folder", ["tests", "lab", "examples", "docs", "integrations"])
def test_module_docstrings_begin_with_a_plain_statement(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    wrong = [f"{file.relative_to(ROOT)}: {first}" for file in files for first in openings([parsed(file)])]
    assert wrong == []


def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text("utf-8"))


def openings(nodes: Iterable[ast.AST]) -> list[str]:
    """Return the first lines of docstrings that begin with a word of NO_VERB."""
    texts = (ast.get_docstring(node) for node in nodes if isinstance(node, DOCUMENTED))
    return [text.splitlines()[0] for text in texts if text and NO_VERB.match(text)]


DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def test_a_docstring_without_a_verb_is_found() -> None:
    source = '"""Of reading."""\nclass A:\n    """Reads."""\n    def b(self):\n        """What it is."""\n'
    assert openings(ast.walk(ast.parse(source))) == ["Of reading.", "What it is."]


def undocumented(trees: Iterable[ast.Module]) -> list[str]:
    """Return the public methods that have no docstring and override no documented method."""
    classes = (node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef))
    known = {each.name: each for each in classes}  # class names are unique
    named = {name: [base for b in each.bases if (base := base_name(b)) in known] for name, each in known.items()}
    said = {name: {m.name for m in methods(each) if ast.get_docstring(m)} for name, each in known.items()}

    def inherited(name: str) -> set[str]:
        return said[name].union(*map(inherited, named[name]))

    public = [name for name in known if not name.startswith("_")]
    wanted = {name: {m.name for m in methods(known[name]) if not m.name.startswith("_")} for name in public}
    return sorted(f"{name}.{method}" for name in public for method in wanted[name] - inherited(name))


def methods(of: ast.ClassDef) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    yield from (node for node in of.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))


def base_name(node: ast.expr) -> str:
    node = node.value if isinstance(node, ast.Subscript) else node
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def test_every_public_method_has_a_docstring_or_overrides_a_documented_method() -> None:
    assert undocumented(module.tree for module in MODULES.values()) == []


def test_an_undocumented_public_method_is_found() -> None:
    source = """
class A:
    def told(self):
        "Tell."
    def silent(self): ...
    def _hidden(self): ...
class B(A):
    def told(self): ...
    def own(self): ...
class _C:
    def silent(self): ...
"""
    assert undocumented([ast.parse(source)]) == ["A.silent", "B.own"]


def test_no_file_and_no_function_exceeds_its_length_limit() -> None:
    assert long_files(MODULES) == {}
    assert long_functions(MODULES) == {}  # this excludes Triton's kernels


OTHERS = [ROOT / "lab/cacheblend_lab", *sorted(ROOT.glob("integrations/*/*_cacheblend"))]


@pytest.mark.parametrize("package", OTHERS, ids=lambda package: package.name)
def test_the_other_packages_obey_the_rules_for_length_names_and_circles(package: Path) -> None:
    own = modules(package)
    imports = all_imports(own)
    assert len(own) > 5
    assert (long_files(own), long_functions(own), double_classes(own)) == ({}, {}, {})
    assert circles(imports.at_once, imports.in_functions) == []


TENANT = re.compile(r"\btenants?\b", re.IGNORECASE)


def test_only_the_server_and_listed_files_mention_tenants() -> None:
    """Inner code works on a view within a namespace."""
    aware = {str(file.relative_to(PACKAGE)) for file in PACKAGE.rglob("*.py") if TENANT.search(file.read_text("utf-8"))}
    # These files hold the flag, its output, a span's attribute, and error messages that name a tenant.
    inside = {"cli/store.py", "console/options.py", "engines/spans.py", "store/source.py", "store/files.py"}
    assert {name for name in aware if not name.startswith("server/")} <= inside
    assert len(aware) <= 15


def test_no_two_classes_share_a_name() -> None:
    assert double_classes(MODULES) == {}


def test_no_imports_form_a_circle() -> None:
    imports = all_imports(MODULES)
    assert circles(imports.at_once, imports.in_functions) == []


def test_import_circles_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}}) == []
    assert circles({"a": {"b"}, "b": {"c"}}, {"c": {"b"}}) == [["b", "c"]]


PAGES = [page for page in sorted(ROOT.glob("docs/**/*.md")) if not {"_build", "generated"} & set(page.parts)]
DOCUMENTS = [DOCUMENT, ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES]


def named_paths(document: Path) -> set[str]:
    """Return the files, folders and links that a document names, and the files of modules that it runs."""
    text = document.read_text("utf-8")
    files = re.findall(r"(?<![\w/.])[\w/]+\.py\b", text)
    folders = re.findall(r"`([\w./]+/)`", text)
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    modules = re.findall(r"python -m ((?:cacheblend_rag|cacheblend_lab|training)(?:\.\w+)*)", text)
    return {*files, *folders, *links, *(program_file(module) for module in modules if "." in module)}


def program_file(module: str) -> str:
    """Return the file that `python -m` runs: a module, or the main file of a package."""
    path = module.replace(".", "/")
    return f"{path}/__main__.py" if any((place / path).is_dir() for place in (ROOT, LAB)) else f"{path}.py"


@pytest.mark.parametrize(
    "document", dict.fromkeys(DOCUMENTS), ids=lambda document: document.relative_to(ROOT).as_posix()
)
def test_every_path_in_the_documents_exists(document: Path) -> None:
    places = (PACKAGE, ROOT, LAB, document.parent)
    missing = [name for name in sorted(named_paths(document)) if not any((place / name).exists() for place in places)]
    assert not missing


def test_every_class_in_the_document_exists() -> None:
    named = set(re.findall(r"`([A-Z]\w*[a-z]\w*)`", TEXT))
    nodes = (node for module in MODULES.values() for node in module.nodes)
    defined = {node.name for node in nodes if isinstance(node, ast.ClassDef)}
    assert len(named) > 10
    assert named <= defined
