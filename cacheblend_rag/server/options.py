"""Defines the options of `cacheblend serve` beside vLLM's flags, and reports the progress of a start."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import psutil
import typer

DEFAULT_BODY_LIMIT = 32 << 20
DEFAULT_MAX_CHUNKS = 1_000_000


def _nbytes(size: str | int) -> int:
    if isinstance(size, int):
        return size
    # Imported here: the module imports torch, for which the help and the first message should not wait.
    from cacheblend_rag.store.opening import parse_size

    return parse_size(size)


@dataclass(frozen=True)
class ServeFlags:
    """Holds the flags that only the server has; sizes are in bytes."""

    # No flag has a short form, which would match letters of vLLM's own flags. The command itself parses ``-m`` and ``-s``.
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            help=(
                "Model: smollm2, a model directory, a GGUF file or a hub name, also -m (default: the "
                "index's model, else smollm2)."
            ),
        ),
    ] = None
    writer: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="KV writer that computes the chunks' KV: a directory that `cacheblend learn` has made, probe "
            "(needs no training) or none (default: the index's writer, else the model's own, which "
            "smollm2 has).",
        ),
    ] = None
    ratio: Annotated[
        float | None,
        typer.Option(
            help="Recompute ratio, 0 (full KV reuse) to 1 (full recompute) (default: the model profile's).",
            rich_help_panel="Blending",
        ),
    ] = None
    instruction: Annotated[
        str | None,
        typer.Option(
            help=(
                "Instruction at the start of your prompts; the KV of chunks is computed behind this text "
                "(default: the library's own)."
            )
        ),
    ] = None
    write_back: Annotated[
        bool, typer.Option(help="After an answer, store the KV of the prompt's chunks that the store lacked.")
    ] = True
    max_request_size: Annotated[
        int,
        typer.Option(help="Largest request body (default: 32MiB).", parser=_nbytes, metavar="SIZE", show_default=False),
    ] = DEFAULT_BODY_LIMIT
    max_chunks: Annotated[
        int, typer.Option(min=1, help="Maximum number of chunks registered with POST /v1/chunks.")
    ] = DEFAULT_MAX_CHUNKS
    kv_memory: Annotated[
        int | None,
        typer.Option(
            help=(
                "Memory of vLLM's KV cache, such as 4GiB (default: vLLM's share of a GPU; on a CPU, room "
                "for four prompts of full length)."
            ),
            parser=_nbytes,
            metavar="SIZE",
        ),
    ] = None
    verbose: Annotated[
        bool, typer.Option("--verbose", help="If vLLM does not start, show the complete output of its processes.")
    ] = False
    keys: Annotated[
        Path | None,
        typer.Option(
            help="TOML file of API keys: tables 'key' (value or sha256; role: ask, write or admin; tenant) and 'tenant' (quotas)."
        ),
    ] = None
    allow_no_key: Annotated[
        bool, typer.Option("--allow-no-key", help="Listen beyond this machine (--host) although no API key is set.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class ServeOptions(ServeFlags):
    """Adds the options that the command derives from flags shared with other commands.

    Attributes:
        store: Directory of the KV store, the index and the registered chunks.
        ram_budget: Bytes of KV held in RAM by each worker.
        disk_budget: Bytes of KV on disk.
    """

    store: Path
    ram_budget: int | None = None
    disk_budget: int | None = None


def flag_names() -> list[str]:
    """Return all flags of the command that are not vLLM's."""
    return ["--no-write-back", "--kv", "--encrypt", *(f"--{f.name.replace('_', '-')}" for f in fields(ServeOptions))]


def elapsed() -> float:
    """Return how many seconds this process has been running."""
    return time.time() - float(psutil.Process().create_time())


def tell(stage: str) -> None:
    """Print the stage that begins now on stderr, after the seconds since the process began; ``stage`` is not escaped."""
    sys.stderr.write(f"{elapsed():5.1f} s  {stage}\n")
    sys.stderr.flush()
