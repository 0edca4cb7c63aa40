"""Adds the commands that measure and train to `cacheblend`; each command's module is imported when the command runs."""

from __future__ import annotations

COMMANDS = {
    "bench": "cacheblend_lab.commands.bench:bench",
    "demo": "cacheblend_lab.commands.demo:demo",
    "eval": "cacheblend_lab.commands.eval:evaluate_command",
    "figures": "cacheblend_lab.commands.eval:figures",
    "learn": "cacheblend_lab.commands.learn:learn_command",
    "marginal": "cacheblend_lab.commands.marginal:marginal",
    "realm": "cacheblend_lab.commands.realm:realm",
    "tune-retriever": "cacheblend_lab.commands.tune:tune_retriever",
}
"""Maps each command's name to its module and function; equals the entry points in `lab/pyproject.toml`."""
