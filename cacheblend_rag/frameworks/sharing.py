"""Shares engines: equal arguments give the same engine, which stays open until the process ends."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, get_args

from cacheblend_rag.blending.settings import is_whole
from cacheblend_rag.engines.base import BlendEngine
from cacheblend_rag.engines.models import dtype_named
from cacheblend_rag.errors import InputError

EngineName = Literal["transformers", "vllm"]
"""Names of the engines that run a model in this process."""

HERE: Final = "transformers"
BUNDLED: Final = "bundled"

_opened: dict[tuple[Any, ...], BlendEngine] = {}
_opening = threading.Lock()


def shared_engine(
    model: str | Path | None = None,
    *,
    engine: BlendEngine | EngineName | None = None,
    store: str | Path | None = None,
    device: str | None = None,
    dtype: str | None = None,
    writer: str | Path | None = None,
    threads: int | None = None,
    base_url: str | None = None,
    api_key: str | None = None,
    timeout_s: float | None = None,
    max_retries: int | None = None,
) -> BlendEngine:
    """Return a given engine, or the engine that the arguments name; callers with equal arguments share one engine.

    If neither ``model`` nor ``base_url`` is given, the environment variable ``CACHEBLEND_BASE_URL`` or else
    ``CACHEBLEND_MODEL`` supplies one. Without ``store``, a local model has the store of ``CACHEBLEND_STORE``, or else
    RAM alone. The engine is closed when the process ends; an engine that was closed before is opened anew.

    Args:
        model: A directory, a GGUF file, a hub name, ``"smollm2"`` or ``"bundled"``; with ``base_url`` the name of the
            model that the server must serve.
        engine: A given engine, beside which no other argument may be given; or the name of the engine that runs a
            local model, None for transformers.
        store: Store of a local engine, as :class:`TransformersEngine` takes it.
        device: Device of a local model, as :class:`TransformersEngine` takes it; vLLM chooses the device itself.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``; None takes fp32 on a CPU, the model's own elsewhere.
        writer: KV writer that computes chunks' KV, as :class:`TransformersEngine` takes it.
        threads: CPU threads of torch in this process, for all of its models: the last value counts; vLLM chooses
            itself.
        base_url: Address of a `cacheblend serve`.
        api_key: API key of the server; None takes ``CACHEBLEND_API_KEY`` from the environment.
        timeout_s: Longest wait for the next piece of the server's answer, in seconds.
        max_retries: How often a request is sent to the server again.

    Raises:
        InputError: Neither a model nor a server is named, or arguments do not go together.
        ModelError: The model cannot be loaded.
        ServerError: The server does not answer.
        StoreError: The store cannot be opened.
    """
    given = {name: value for name, value in locals().copy().items() if value is not None}
    asked = given.pop("engine", HERE)
    check_engine(asked, given)
    if isinstance(asked, BlendEngine):
        return asked
    kind, arguments = _resolved(asked, given)
    key = kind, frozenset(arguments.items())
    found = _opened.get(key)  # an open engine is returned without waiting while another model loads
    if found is None or found.closed:
        with _opening:
            found = _opened.get(key)
            if found is None or found.closed:
                found = _opened[key] = kind(**arguments)
    if found._reopen is None:
        found._reopen = partial(shared_engine, engine=asked, **given)
    return found


def _resolved(engine: str, given: Mapping[str, Any]) -> tuple[Callable[..., BlendEngine], dict[str, Any]]:
    """Return the class of the engine and the arguments of the class; set the number of threads."""
    found: dict[str, Any] = {name: str(v) if isinstance(v, Path) else v for name, v in given.items()}
    if not found.get("base_url") and "model" not in found:
        if address := os.environ.get("CACHEBLEND_BASE_URL"):
            found["base_url"] = address
        elif model := os.environ.get("CACHEBLEND_MODEL"):
            found["model"] = model
        else:
            raise InputError(
                "There is neither a model nor a server. Give model= (a directory, a GGUF file, a hub name, 'smollm2' or "
                "'bundled') or base_url=, or set CACHEBLEND_MODEL or CACHEBLEND_BASE_URL."
            )
    if found.get("base_url"):
        local = ["store", "device", "dtype", "writer", "threads"]
        _refuse(
            "the model runs on the server", [*local, "engine"] if engine != HERE else local, {**found, "engine": engine}
        )
        from cacheblend_rag.engines.remote import RemoteEngine

        return RemoteEngine, {"url": found.pop("base_url"), **found}
    _refuse("the model runs in this process", ["api_key", "timeout_s", "max_retries"], found)
    found.pop("base_url", None)
    found["model"] = None if found["model"] == BUNDLED else found["model"]
    found["store"] = found.get("store") or os.environ.get("CACHEBLEND_STORE") or None
    if engine == "vllm":
        _refuse("vLLM chooses for itself", ["device", "threads"], found)
        from cacheblend_rag.engines.vllm import VLLMEngine

        return VLLMEngine, found
    import torch

    from cacheblend_rag.engines.transformers import TransformersEngine

    if (threads := found.pop("threads", None)) not in (None, torch.get_num_threads()):
        torch.set_num_threads(threads)
    if "dtype" in found:
        found["dtype"] = dtype_named(found["dtype"])
    return TransformersEngine, found


def check_engine(engine: object, named: Mapping[str, Any]) -> None:
    """Raise an error for arguments of :func:`shared_engine` with which no model can run, before a model is loaded.

    Raises:
        InputError: ``engine`` is neither an engine nor the name of one, ``named`` has values beside a given engine,
            or ``dtype`` or ``threads`` is invalid.
    """
    if isinstance(engine, BlendEngine):
        if given := [name.removesuffix("_s") for name, value in named.items() if value is not None]:
            raise InputError(
                f"{given[0]}= is for a model by name, and an engine is given: give either engine= or {given[0]}=."
            )
        return
    if engine not in (None, *get_args(EngineName)):
        raise InputError(f"engine is {engine!r}; it is 'transformers', 'vllm', or an engine of yours.")
    dtype, threads = named.get("dtype"), named.get("threads")
    if dtype is not None:
        if not isinstance(dtype, str):
            raise InputError(f"dtype is {dtype!r:.200}; give its name: 'float32', 'bfloat16' or 'float16'.")
        dtype_named(dtype)
    if threads is not None and not (is_whole(threads) and threads >= 1):
        raise InputError(f"threads is {threads!r:.200}; give a whole number from 1 on.")


def _refuse(why: str, names: Iterable[str], given: Mapping[str, Any]) -> None:
    if refused := [f"{name.removesuffix('_s')}=" for name in names if name in given]:
        raise InputError(f"{', '.join(refused)} cannot be used: {why}. Leave it out.")


@atexit.register
def _close() -> None:
    for engine in _opened.values():
        engine.close()
