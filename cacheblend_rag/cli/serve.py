"""Runs `cacheblend serve`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from cacheblend_rag.console.engines import store_directory, with_model
from cacheblend_rag.console.groups import BudgetOptions, ModelOptions, takes_groups
from cacheblend_rag.errors import InputError
from cacheblend_rag.server.options import ServeFlags, ServeOptions, tell

_Store = Annotated[
    Path | None,
    typer.Option(
        "--store",
        help="Directory of the KV store and of the chunks it knows, also -s (default: the user's cache directory).",
    ),
]
_SHORT = {"-m": "--model", "-s": "--store"}
_FLAGS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": ["-h", "--help"]}


serve = typer.Typer(add_completion=False)


@serve.command(context_settings=_FLAGS)
@takes_groups
def _serve(context: typer.Context, *, store: _Store = None, how: ServeFlags, budgets: BudgetOptions) -> None:
    """Serve the OpenAI API over vLLM, with blending and /v1/chunks.

    Any flag of vLLM's server may follow: --port, --api-key, --tensor-parallel-size, --max-model-len...
    The server listens on this machine only (127.0.0.1); --host 0.0.0.0 needs an API key (CACHEBLEND_API_KEY or --api-key).
    """
    tell("Importing vLLM.")
    import cacheblend_rag.engines.vllm  # noqa: F401  (first: its error names what to install if vLLM is missing)
    from cacheblend_rag.server.launch import serve as run

    short, flags = _take_short(context.args)
    if "--model" in short:
        how = replace(how, model=short["--model"])
    directory = store_directory(Path(short["--store"]) if "--store" in short else store)
    chosen = with_model(ModelOptions(how.model, writer=how.writer), directory)
    if chosen.dtype is not None:
        flags = ["--dtype", chosen.dtype, *flags]  # the last --dtype counts
    how = replace(how, model=chosen.model, writer=chosen.writer)
    ram, disk = budgets.nbytes()
    budgets.note(directory)
    if how.ratio is not None and not 0 <= how.ratio <= 1:
        raise InputError(f"--ratio {how.ratio}: give a value from 0 (full KV reuse) to 1 (full recompute).")
    run(ServeOptions(**vars(how), store=directory, ram_budget=ram, disk_budget=disk), flags)


def _take_short(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Separate ``-m MODEL`` and ``-s DIR``, which all commands share, from the arguments for vLLM.

    Raises:
        InputError: One of the two flags has no value.
    """
    taken: dict[str, str] = {}
    left: list[str] = []
    rest = iter(arguments)
    for each in rest:
        if each not in _SHORT:
            left.append(each)
            continue
        value = next(rest, None)
        if value is None:
            raise InputError(f"{each} ({_SHORT[each]}) takes a value.")
        taken[_SHORT[each]] = value
    return taken, left
