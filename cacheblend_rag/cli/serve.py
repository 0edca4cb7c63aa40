"""`cacheblend serve`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from cacheblend_rag.console import options
from cacheblend_rag.console.bundled import warn_of_bundled_model
from cacheblend_rag.console.groups import BudgetOptions, takes_groups

# Long names alone, and -m and -s by hand: a short option would swallow letters of vLLM's own short flags.
_Model = Annotated[
    str | None, typer.Option("--model", help="Model directory or hub name, also -m (default: the bundled model).")
]
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
def _serve(
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
    max_chunks: Annotated[
        int, typer.Option(min=1, help="How many chunks may be registered with POST /v1/chunks.")
    ] = 1_000_000,
    kv_memory: Annotated[
        str | None,
        typer.Option(
            help="Memory of vLLM's KV cache, as 4GiB (default: vLLM's share of a GPU; on a CPU four prompts of full length)."
        ),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="If vLLM does not start, show all that its processes say about it.")
    ] = False,
    keys: Annotated[
        Path | None,
        typer.Option(
            "--keys",
            help="TOML file of [[key]] tables: value (or sha256), role (ask, write or admin), tenant; and of [[tenant]] tables.",
        ),
    ] = None,
    allow_no_key: Annotated[
        bool,
        typer.Option("--allow-no-key", help="Listen beyond this machine (--host) although no API key is set."),
    ] = False,
) -> None:
    """Serve the OpenAI API over vLLM, with blending and /v1/chunks.

    Any flag of vLLM's server may follow: --port, --api-key, --tensor-parallel-size, --max-model-len...
    It listens to this machine alone (127.0.0.1); --host 0.0.0.0 needs an API key (CACHEBLEND_API_KEY or --api-key).
    """
    import cacheblend_rag.engines.vllm  # noqa: F401  (first: it says what to install where vLLM is missing)
    from cacheblend_rag.server.arguments import ServeOptions
    from cacheblend_rag.server.launch import serve as run

    short, flags = _take_short(context.args)
    model, store = short.get("--model", model), Path(short["--store"]) if "--store" in short else store
    if model is None:
        warn_of_bundled_model()
    ram, disk = budgets.nbytes()
    budgets.note(options.store_directory(store))
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
        max_chunks,
        options.nbytes(kv_memory) if kv_memory else None,
        verbose,
        keys,
        allow_no_key,
    )
    run(chosen, flags)


def _take_short(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Take ``-m MODEL`` and ``-s DIR``, which mean here what they mean everywhere, from what is left for vLLM.

    Raises:
        InputError: One of them has no value.
    """
    from cacheblend_rag.errors import InputError

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
