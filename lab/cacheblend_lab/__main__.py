"""Runs `cacheblend` with the commands of the lab from a clone without an installation: `python -m cacheblend_lab`."""

from __future__ import annotations

from cacheblend_lab.commands import COMMANDS
from cacheblend_rag import cli

cli.COMMANDS.update(COMMANDS)
cli.main()
