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
        help="smollm2, a model directory, a GGUF file or a hub name (default: that of the index, else smollm2; "
        "bundled for its own documents, and where none are read).",
    ),
]
Engine = Annotated[
    Literal["transformers", "vllm"], _of_model(help="What runs the model: transformers, or vLLM in process.")
]
Device = Annotated[str | None, _of_model(help="cpu, cuda, cuda:1... (default: cuda if there is one).")]
DType = Annotated[str | None, _of_model(help="float32, bfloat16 or float16 (default: float32 on a CPU).")]
Threads = Annotated[int | None, _of_model(help="CPU threads (default: torch's choice).")]
Writer = Annotated[
    str | None,
    _of_model(
        metavar="DIR",
        help="KV writer, which computes the chunks' KV: what `cacheblend learn` has made; probe, which needs no training; none "
        "(default: the index's, else the one that the model comes with, as smollm2 does).",
    ),
]
Server = Annotated[
    str | None,
    _of_model(
        help="Use a running `cacheblend serve`, as http://HOST:PORT, instead of loading a model; its key is read from "
        "CACHEBLEND_API_KEY."
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
        help="In place of the three above: high (the model profile's blend), fast (recomputes less: sooner, and further off), "
        "exact (reuses only what changes nothing) or full (reuses nothing) (default: high, or exact where calibration found that "
        "no blend is good enough)."
    ),
]
Ranking = Annotated[
    Literal["now", "lazy", "off"] | None,
    _of_blending(
        help="When each chunk's tokens are ranked for the policies static and static-query: with its KV, after the first answer "
        "that needs it, or never (default: now, if the model profile's policy is one of them)."
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
MaxTokens = Annotated[int, _of_answers(min=1, help="Most tokens to answer with.")]
Temperature = Annotated[float, _of_answers(min=0.0, help="0 is greedy.")]
TopP = Annotated[float, _of_answers(help="Nucleus mass, above 0 up to 1.")]
Seed = Annotated[int | None, _of_answers(help="Makes sampling repeatable.")]
AsJSON = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on stdout.")]


RamBudget = Annotated[
    str | None,
    _of_blending(
        help="KV to hold in RAM, as 4GiB; 0 for none (default: what --kv says, else a quarter of the memory; none for a single "
        "question)."
    ),
]
DiskBudget = Annotated[
    str | None,
    _of_blending(
        help="KV to hold on disk, as 100GiB. Noted in the store (default: what is noted, else half of what is free)."
    ),
]

KV = Annotated[
    str | None,
    _of_blending(
        "--kv",
        help="Where the store keeps its KV, fastest first: ram://8GiB,file:///nvme/kv?budget=500GiB,redis://host:6379/0,"
        "s3://bucket/prefix. Noted in the store, so that later commands need not be told "
        "(default: what is noted, else RAM and the store's own directory).",
    ),
]

NAMESPACE_FLAG = "--tenant"
Namespace = Annotated[
    str,
    typer.Option(
        NAMESPACE_FLAG,
        help="Whose index and KV: what is indexed for a tenant is found by requests with its keys alone, and its KV is encrypted "
        "with its own key.",
    ),
]
Encrypt = Annotated[
    Path | None,
    _of_blending(
        help="Encrypt the store's KV, in all tiers but RAM, with the keys in this directory, which `cacheblend store keygen` "
        "makes. Noted in the store, as encrypt= in the addresses of --kv."
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
