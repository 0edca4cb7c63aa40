"""Tests that groups of options become single options on the command line, and groups again in the command."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from cacheblend_rag.cli import app
from cacheblend_rag.console.groups import BlendOptions, BudgetOptions, takes_groups
from cacheblend_rag.store import recorded_tiers


@dataclass(frozen=True)
class Inner:
    size: int = 1
    name: str | None = None


@dataclass(frozen=True)
class Outer:
    inner: Inner = field(default_factory=Inner)
    fast: bool = False


BIG = Outer(Inner(size=7))


def call(command, *arguments: str) -> None:
    app = typer.Typer()
    app.command()(takes_groups(command))
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output


def test_a_command_gets_its_groups_filled_from_single_options():
    seen = []

    def command(word: str, *, outer: Outer, last: int = 3) -> None:
        seen.append((word, outer, last))

    call(command, "hello", "--name", "n", "--fast")
    call(command, "hello", "--size", "2", "--last", "4")
    assert seen == [("hello", Outer(Inner(1, "n"), True), 3), ("hello", Outer(Inner(2)), 4)]


def test_an_instance_as_default_changes_the_defaults_of_the_options():
    seen = []

    def command(outer: Outer = BIG) -> None:
        seen.append(outer)

    call(command)
    call(command, "--name", "n")
    assert seen == [BIG, Outer(Inner(7, "n"))]


def test_two_options_of_one_name_are_refused():
    def command(*, inner: Inner, size: int = 3) -> None:
        pass

    with pytest.raises(ValueError, match="size"):
        takes_groups(command)


def test_blend_options_make_the_settings_of_the_engines():
    settings = BlendOptions(0.2, "sink", "1,3").settings()
    assert (settings.ratio, settings.policy, settings.check_layers) == (0.2, "sink", (1, 3))


def test_a_disk_budget_is_recorded_in_the_store_and_a_ram_budget_is_not(
    tmp_path: Path,
) -> None:
    BudgetOptions(ram_budget="0").note(tmp_path)
    assert recorded_tiers(tmp_path) is None
    BudgetOptions(disk_budget="3GiB").note(tmp_path)
    BudgetOptions().note(tmp_path)
    BudgetOptions(ram_budget="1GiB").note(tmp_path)
    shown = CliRunner().invoke(app, ["store", "stats", "--store", str(tmp_path)]).stdout
    assert "in ram://,file://?budget=3GiB" in " ".join(shown.split())
    assert "3.0 GiB" in shown
