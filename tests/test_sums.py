"""Tests that the sum of an unchanged file is remembered, and that every change is noticed."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from cacheblend_rag import homes
from cacheblend_rag.homes import remembered_sum


class Sum:
    """Reads a file and counts its reads."""

    def __init__(self, file: Path):
        self.file, self.read = file, 0

    def __call__(self) -> str:
        return remembered_sum("text", [self.file], self._compute)

    def _compute(self) -> str:
        self.read += 1
        return self.file.read_text()


@pytest.fixture
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sum:
    monkeypatch.setenv("CACHEBLEND_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(homes, "_SETTLED_S", -1.0)
    file = tmp_path / "weights"
    file.write_text("aaaa")
    return Sum(file)


def test_an_unchanged_file_is_read_once(known: Sum) -> None:
    assert [known() for _ in range(3)] == ["aaaa"] * 3
    assert known.read == 1


def test_sums_of_two_kinds_are_kept_apart(known: Sum) -> None:
    assert known() == "aaaa"
    assert remembered_sum("length", [known.file], lambda: "4") == "4"
    assert known() == "aaaa"
    assert known.read == 1


def test_a_file_that_has_changed_is_read_again_even_if_size_and_time_are_set_back(known: Sum) -> None:
    before = known.file.stat()
    assert known() == "aaaa"
    known.file.write_text("aaab")
    os.utime(known.file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert known() == "aaab"
    other = known.file.with_name("other")
    other.write_text("aaac")
    other.replace(known.file)
    assert known() == "aaac"


def test_the_sum_of_a_just_changed_file_is_not_remembered(known: Sum, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(homes, "_SETTLED_S", 3600.0)
    assert [known(), known()] == ["aaaa"] * 2
    assert known.read == 2
    monkeypatch.setattr(time, "time", lambda: known.file.stat().st_ctime + 3601)
    assert [known(), known()] == ["aaaa"] * 2
    assert known.read == 3


@pytest.mark.parametrize("harm", ["no folder can be made", "no JSON", "no sum"])
def test_a_sum_that_cannot_be_remembered_is_computed(known: Sum, tmp_path: Path, harm: str) -> None:
    if harm == "no folder can be made":
        (tmp_path / "home").write_text("a file")
    else:
        known()
        (kept,) = (tmp_path / "home" / "sums").iterdir()
        kept.write_text("[" if harm == "no JSON" else "7")
    assert known() == "aaaa"
    assert known.read == 1 + (harm != "no folder can be made")
    with pytest.raises(FileNotFoundError):
        remembered_sum("text", [tmp_path / "gone"], lambda: "x")
