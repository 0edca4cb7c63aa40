"""Runs a notebook's cells in the process of the tests, which has imported already what they import."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

import nbformat
from IPython.core.displayhook import DisplayHook
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config


class _Silent(DisplayHook):
    """Leaves a value to whoever ran the cell, in place of printing it."""

    def write_output_prompt(self) -> None:
        pass

    def write_format_data(self, format_dict: Any, md_dict: Any = None) -> None:
        pass


class _Shell(InteractiveShell):
    displayhook_class = _Silent


def read(file: Path) -> list[Any]:
    """Return a notebook's code cells, with the outputs that they were saved with."""
    return [cell for cell in nbformat.read(file, as_version=4).cells if cell.cell_type == "code"]


def run(cells: list[Any], command: Callable[[str], object] | None = None) -> list[Any]:
    """Run code cells one after the other; return them with what they print now and the values that they end with.

    ``command`` is called with each line of the cells that begins with "!", in place of a system's shell.
    """
    settings = Config({"HistoryManager": {"enabled": False}})
    shell = _Shell(user_module=ModuleType("notebook"), config=settings)
    if command is not None:
        shell.system = lambda line: command(shell.var_expand(line))
    ran = []
    for cell in cells:
        with redirect_stdout(StringIO()) as said:
            done = shell.run_cell(cell.source)
        done.raise_error()
        outputs = [nbformat.v4.new_output("stream", name="stdout", text=said.getvalue())]
        if done.result is not None:
            shown = shell.display_formatter.format(done.result)[0]
            outputs.append(nbformat.v4.new_output("execute_result", shown, execution_count=len(ran) + 1))
        ran.append(nbformat.v4.new_code_cell(cell.source, outputs=outputs))
    shell.reset(new_session=False)
    return ran


def printed(cell: Any) -> str:
    """Return what a cell printed."""
    return "".join(output["text"] for output in cell.outputs if output.get("name") == "stdout")


def values(cells: list[Any]) -> list[str]:
    """Return what the cells' last expressions gave."""
    found = (output for cell in cells for output in cell.outputs)
    return [output["data"]["text/plain"] for output in found if output["output_type"] == "execute_result"]
