"""Defines options that several commands share."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from cacheblend_rag.blending.policies import POLICIES
from cacheblend_rag.homes import from_home

_of_model = partial(typer.Option, rich_help_panel="Model")
_of_blending = partial(typer.Option, rich_help_panel="Blending")
_of_answers = partial(typer.Option, rich_help_panel="Answer")

Model = Annotated[
    str | None,
    _of_model(
        "--model",
        "-m",
        help="Model: smollm2, a model directory, a GGUF file or a hub name (default: the index's model, else "
        "smollm2; bundled for the bundled documents and for commands that read no documents).",
    ),
]
Engine = Annotated[
    Literal["transformers", "vllm"],
    _of_model(help="Engine that runs the model: transformers, or vLLM in this process."),
]
Device = Annotated[str | None, _of_model(help="cpu, cuda, cuda:1... (default: cuda if there is one).")]
DType = Annotated[
    str | None,
    _of_model(help="float32, bfloat16 or float16 (default: the model's, or float32 on a CPU slower in it)."),
]
Threads = Annotated[int | None, _of_model(help="CPU threads (default: torch's choice).")]
Writer = Annotated[
    str | None,
    _of_model(
        metavar="DIR",
        help="KV writer that computes the chunks' KV: a directory that `cacheblend learn` has made, probe "
        "(needs no training) or none (default: the index's writer, else the model's own, which smollm2 "
        "has).",
    ),
]
Server = Annotated[
    str | None,
    _of_model(
        help="Address of a running `cacheblend serve`, such as http://HOST:PORT, which answers instead of a "
        "model loaded here; CACHEBLEND_API_KEY has the API key."
    ),
]
Store = Annotated[
    Path | None,
    typer.Option(
        "--store", "-s", help="Directory of the index and the KV store (default: the user's cache directory)."
    ),
]
Ratio = Annotated[
    float | None,
    _of_blending(help="Recompute ratio, 0 (full KV reuse) to 1 (full recompute) (default: the model profile's)."),
]
BlendRatio = Annotated[
    str | None,
    _of_blending(
        help="Recompute ratio, 0 (full KV reuse) to 1 (full recompute), or auto: the model profile's, and more for text unlike "
        "that of its calibration (default: the model profile's)."
    ),
]
Policy = Annotated[
    str | None, _of_blending(help=f"Token-selection policy: {', '.join(POLICIES)} (default: the model profile's).")
]
Quality = Annotated[
    Literal["full", "exact", "high", "fast"] | None,
    _of_blending(
        help="Quality, in place of the three options above: high (the model profile's blend), fast (recomputes "
        "less: sooner and less accurate), exact (reuses only KV that changes nothing) or full (reuses "
        "nothing) (default: high, or exact if calibration found no blend that is good enough)."
    ),
]
Ranking = Annotated[
    Literal["now", "lazy", "off"] | None,
    _of_blending(
        help="When to rank each chunk's tokens for the policies static and static-query: now (with the chunk's KV), lazy (after "
        "the first answer that needs the ranking) or off (default: now, if the profile's policy is one of the two)."
    ),
]
CheckLayers = Annotated[
    str | None,
    _of_blending(help="Layers at which KV deviation is measured, as 1 or 1,3 (default: the model profile's)."),
]
Retriever = Annotated[
    Path | None,
    typer.Option(help="Directory of a query encoder that `cacheblend tune-retriever` has made for the index."),
]
K = Annotated[int, typer.Option("--k", "-k", min=1, help="Chunks to retrieve.")]
MaxTokens = Annotated[int, _of_answers(min=1, help="Maximum number of tokens in the answer.")]
Temperature = Annotated[float, _of_answers(min=0.0, help="0 is greedy.")]
TopP = Annotated[float, _of_answers(help="Probability mass of nucleus sampling, above 0 and at most 1.")]
Seed = Annotated[int | None, _of_answers(help="Seed that makes sampling repeatable.")]
AsJSON = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on stdout.")]


RamBudget = Annotated[
    str | None,
    _of_blending(
        help="RAM for KV, such as 4GiB; 0 for none (default: the budget in --kv, else a quarter of the memory; "
        "none for a single question)."
    ),
]
DiskBudget = Annotated[
    str | None,
    _of_blending(
        help=(
            "Disk space for KV, such as 100GiB; the store remembers the value (default: the remembered "
            "value, else half of the free space)."
        )
    ),
]

KV = Annotated[
    str | None,
    _of_blending(
        "--kv",
        help="Tiers that hold the store's KV, fastest first: "
        "ram://8GiB,file:///nvme/kv?budget=500GiB,redis://host:6379/0,s3://bucket/prefix. The store "
        "remembers the tiers (default: the remembered tiers, else RAM and the store's own directory).",
    ),
]

NAMESPACE_FLAG = "--tenant"
Namespace = Annotated[
    str,
    typer.Option(
        NAMESPACE_FLAG,
        help="Tenant that owns the index and the KV. Only requests with the tenant's API keys find the "
        "tenant's documents, and an encrypted store encrypts the tenant's KV with a key of its own.",
    ),
]
Encrypt = Annotated[
    Path | None,
    _of_blending(
        help="Encrypt the store's KV in all tiers except RAM, with the keys that `cacheblend store keygen` "
        "made in this directory. The store remembers the directory, as encrypt= in the addresses of --kv."
    ),
]


def _where_it_is(embedding: str | None) -> str | None:
    """Return a directory's absolute path, because the index records it; return any other name unchanged."""
    if embedding is not None and (at := from_home(embedding)).is_dir():
        return str(at.resolve())
    return embedding


Embedding = Annotated[
    str | None,
    typer.Option(
        callback=_where_it_is,
        help="sentence-transformers model for retrieval, or its directory (default: the index's own, else all-MiniLM-L6-v2).",
    ),
]
