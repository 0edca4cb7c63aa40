"""Packages that add something by an entry point and fail are named in the error, at all three entry point groups."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cacheblend_rag.cli import app
from cacheblend_rag.errors import InputError, StoreError
from cacheblend_rag.store import plugins


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str, str], None]:
    """Put a package with one entry point on the path, as an installer leaves it."""

    def put(package: str, group: str, point: str) -> None:
        info = tmp_path / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{group}]\n{point}\n")
        monkeypatch.syspath_prepend(tmp_path)

    return put


def test_an_entry_point_is_found_by_group_and_name(install: Callable[[str, str, str], None]) -> None:
    install("good", "a.group", "dump = json:dumps")
    assert plugins.names("a.group") == {"dump"}
    assert plugins.names("another.group") == set()
    assert plugins.load("a.group", "dump", "tier", lambda dumps: dumps([1])) == "[1]"


def test_a_cacheblend_error_passes_through_unchanged(install: Callable[[str, str, str], None]) -> None:
    def refuse(found: object) -> None:
        raise StoreError("the disk is full")

    install("good", "a.group", "dump = json:dumps")
    with pytest.raises(StoreError, match="the disk is full"):
        plugins.load("a.group", "dump", "tier", refuse)


def test_two_packages_with_the_same_policy_name_are_both_named(install: Callable[[str, str, str], None]) -> None:
    install("one", "a.group", "dump = json:dumps")
    install("other", "a.group", "dump = json:dumps")
    with pytest.raises(InputError, match=r"The tier 'dump' is in several packages, (one and other|other and one)"):
        plugins.load("a.group", "dump", "tier", lambda found: found)


def test_a_command_that_cannot_be_imported_names_its_package(install: Callable[[str, str, str], None]) -> None:
    install("broken", "cacheblend_rag.commands", "odd = no_such_module:odd")
    result = CliRunner().invoke(app, ["odd"])
    assert result.exit_code == InputError.exit_code
    assert "The command 'odd' of the package broken" in result.stderr
    assert "No module named 'no_such_module'" in result.stderr
