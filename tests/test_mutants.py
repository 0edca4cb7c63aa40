"""Tests that each mutant of the list changes one existing place and names existing tests. `make mutants` tries them."""

from __future__ import annotations

import ast
from collections import Counter

from tests.mutants import ROOT, mutants


def test_each_mutant_changes_one_place_of_its_file_and_leaves_valid_python() -> None:
    found = mutants()
    assert len(found) >= 60
    assert max(Counter((each.file, each.old, each.new) for each in found).values()) == 1
    for each in found:
        ast.parse(each.applied_to((ROOT / each.file).read_text(encoding="utf-8")), each.file)


def test_the_tests_of_every_mutant_exist() -> None:
    for test in {test for each in mutants() for test in each.tests if not test.startswith("-")}:
        path, *names = test.split("::")
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        if names:
            assert names[-1].partition("[")[0] in {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
