"""`cacheblend serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cacheblend_rag.cli import options
from cacheblend_rag.cli.app import app
from cacheblend_rag.cli.groups import BudgetOptions, takes_groups

# Long names alone: a short -s or -m would swallow letters of vLLM's own short flags.
_Model = Annotated[
    str | None, typer.Option("--model", help="Model directory or hub name (default: the bundled model).")
]
_Store = Annotated[
    Path | None,
    typer.Option(
        "--store", help="Directory of the KV store and of the chunks it knows (default: the user's cache directory)."
    ),
]
_FLAGS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": ["-h", "--help"]}


@app.command(context_settings=_FLAGS)
@takes_groups
def serve(
    context: typer.Context,
    *,
    model: _Model = None,
    store: _Store = None,
    ratio: options.Ratio = None,
    instruction: Annotated[
        str | None,
        typer.Option(help="First sentence of your prompts, which chunks are computed behind (default: the usual one)."),
    ] = None,
    write_back: Annotated[
        bool, typer.Option(help="Store the KV of chunks that a prompt held but the store did not.")
    ] = True,
    budgets: BudgetOptions,
    max_request_size: Annotated[str, typer.Option(help="Largest request body, as 32MiB.")] = "32MiB",
    kv_memory: Annotated[
        str | None,
        typer.Option(
            help="Memory of vLLM's KV cache, as 4GiB (default: vLLM's share of a GPU; on a CPU four prompts of full length)."
        ),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="If vLLM does not start, show all that its processes say about it.")
    ] = False,
) -> None:
    """Serve the OpenAI API over vLLM, with blending and /v1/chunks.

    Any flag of vLLM's server may follow: --port, --api-key, --tensor-parallel-size, --max-model-len...
    """
    from cacheblend_rag.server.arguments import ServeOptions
    from cacheblend_rag.server.launch import serve as run

    ram, disk = budgets.nbytes()
    if ratio is not None and not 0 <= ratio <= 1:
        from cacheblend_rag.errors import InputError

        raise InputError(f"--ratio {ratio}: give a value from 0 (full KV reuse) to 1 (full recompute).")
    chosen = ServeOptions(
        options.store_directory(store),
        model,
        instruction,
        ratio,
        write_back,
        ram,
        disk,
        options.nbytes(max_request_size),
        options.nbytes(kv_memory) if kv_memory else None,
        verbose,
    )
    run(chosen, context.args)
