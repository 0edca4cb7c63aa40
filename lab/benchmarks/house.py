"""Counts lines, long files, long functions, duplicate class names and import cycles of the package.

Run ``python lab/benchmarks/house.py``.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PACKAGE = ROOT / "cacheblend_rag"
FILE_LINES, FUNCTION_LINES = 400, 60


@dataclass(frozen=True)
class Module:
    """Holds a parsed file of the package.

    Attributes:
        name: Full module name.
        file: Path of the file.
        lines: Number of lines.
        tree: Syntax tree.
        root: Folder of the package.
    """

    name: str
    file: Path
    lines: int
    tree: ast.Module
    root: Path = PACKAGE

    @property
    def place(self) -> str:
        return self.file.relative_to(self.root).as_posix()

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """Return every node of the tree."""
        return tuple(ast.walk(self.tree))

    @cached_property
    def package(self) -> tuple[str, ...]:
        """Return the name parts of the package that relative imports start from."""
        return (self.root.name, *self.file.relative_to(self.root).parent.parts)


def modules(root: Path = PACKAGE) -> dict[str, Module]:
    """Return all modules of the package in the folder ``root``, by name."""
    found = {}
    for file in sorted(root.rglob("*.py")):
        parts = (root.name, *file.relative_to(root).with_suffix("").parts)
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = file.read_text("utf-8")
        found[name] = Module(name, file, text.count("\n"), ast.parse(text), root)
    return found


def imported_names(node: ast.AST, package: tuple[str, ...]) -> list[str]:
    """Return the full names that an import statement imports; relative imports start from ``package``."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    base = [*package[: len(package) - node.level + 1]] if node.level else []
    module = ".".join([*base, *([node.module] if node.module else [])])
    return [f"{module}.{alias.name}" for alias in node.names]


@dataclass
class Imports:
    """Holds the modules that each module imports: at once, in functions, and only for the type checker."""

    at_once: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    in_functions: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    for_types: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))


def all_imports(known: dict[str, Module]) -> Imports:
    """Read the imports of all modules."""
    imports = Imports()
    for module in known.values():
        for node, kind in _statements(module.tree, "at_once"):
            for name in imported_names(node, module.package):
                target = name if name in known else name.rpartition(".")[0]
                if target in known and target != module.name:
                    getattr(imports, kind)[module.name].add(target)
    return imports


def _statements(node: ast.AST, kind: str) -> Iterator[tuple[ast.AST, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):  # an expression has no statements
            continue
        yield child, kind
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and kind == "at_once":
            yield from _statements(child, "in_functions")
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for statement in child.body:
                yield statement, "for_types"
            for statement in child.orelse:
                yield statement, kind
                yield from _statements(statement, kind)
        else:
            yield from _statements(child, kind)


def circles(*graphs: dict[str, set[str]]) -> list[list[str]]:
    """Return the import cycles over all ``graphs``: groups of modules that import each other, directly or not."""
    edges: dict[str, set[str]] = defaultdict(set)
    for graph in graphs:
        for source, targets in graph.items():
            edges[source] |= targets
    reached = {module: _reached(module, edges) for module in edges}
    groups = {
        tuple(sorted(other for other in ahead if module in reached.get(other, ()))): None
        for module, ahead in sorted(reached.items())
        if module in ahead
    }
    return [list(group) for group in groups]


def _reached(module: str, edges: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    left = [module]
    while left:
        new = edges.get(left.pop(), set()) - found
        found |= new
        left += new
    return found


def long_files(known: dict[str, Module]) -> dict[str, int]:
    """Return the files with more than ``FILE_LINES`` lines, with their numbers of lines."""
    return {module.place: module.lines for module in known.values() if module.lines > FILE_LINES}


def long_functions(known: dict[str, Module]) -> dict[str, int]:
    """Return the functions of more than ``FUNCTION_LINES`` lines without decorators and docstring, but for Triton kernels."""
    found = {}
    for module in known.values():
        for node in module.nodes:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            lines = (node.end_lineno or 0) - node.lineno + 1
            if ast.get_docstring(node) is not None:
                lines -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
            if lines <= FUNCTION_LINES:
                continue
            if not any(ast.unparse(each).startswith("triton.") for each in node.decorator_list):
                found[f"{module.place}: {node.name}"] = lines
    return found


def double_classes(known: dict[str, Module]) -> dict[str, list[str]]:
    """Return the names that several classes have, with the classes' files."""
    places: dict[str, list[str]] = defaultdict(list)
    for module in known.values():
        for node in module.nodes:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(module.place)
    return {name: files for name, files in places.items() if len(files) > 1}


def _listed(heading: str, found: list[str]) -> None:
    print(f"{heading}: {len(found)}")
    for line in found:
        print(f"    {line}")


def print_counts() -> None:
    """Print all counts."""
    known = modules()
    lines = {module.place: module.lines for module in known.values()}
    print(f"lines: {sum(lines.values()):,}; files: {len(lines)}")
    by_folder: dict[str, int] = defaultdict(int)
    for place, count in lines.items():
        by_folder[place.partition("/")[0]] += count
    print("    " + ", ".join(f"{part} {count:,}" for part, count in sorted(by_folder.items(), key=lambda at: -at[1])))
    _listed(f"files over {FILE_LINES} lines", [f"{place} {count}" for place, count in long_files(known).items()])
    functions = [f"{place} {count}" for place, count in long_functions(known).items()]
    _listed(f"functions over {FUNCTION_LINES} lines, kernels aside", functions)
    doubles = [f"{name}: {', '.join(files)}" for name, files in double_classes(known).items()]
    _listed("class names that stand twice", doubles)
    imports = all_imports(known)
    for heading, found in (
        ("circles between files", circles(imports.at_once)),
        ("circles with imports in functions", circles(imports.at_once, imports.in_functions)),
        (
            "circles with imports for the type checker",
            circles(imports.at_once, imports.in_functions, imports.for_types),
        ),
    ):
        _listed(heading, [" <-> ".join(each.removeprefix("cacheblend_rag.") for each in group) for group in found])


if __name__ == "__main__":
    print_counts()
