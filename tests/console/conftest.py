"""Brings the fixtures of the command line to the tests of the parts that all commands share."""

from __future__ import annotations

from tests.command_line import documents, home, model_dir, run  # noqa: F401
