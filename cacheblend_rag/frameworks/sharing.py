"""Shares engines: equal arguments give the same engine, which stays open until the process ends."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from cacheblend_rag.blending.settings import is_whole
from cacheblend_rag.engines.models import dtype_named
from cacheblend_rag.errors import InputError

if TYPE_CHECKING:
    from cacheblend_rag.engines.base import BlendEngine

EngineName = Literal["transformers", "vllm"]
"""Names of the engines that run a model in this process."""

HERE: Final = "transformers"
BUNDLED: Final = "bundled"

_opened: dict[tuple[Any, ...], BlendEngine] = {}
_opening = threading.Lock()


def shared_engine(
    model: str | Path | None = None,
    *,
    engine: EngineName = HERE,
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
    """Return the engine for these arguments; callers with equal arguments share one engine.

    If neither ``model`` nor ``base_url`` is given, the environment variable ``CACHEBLEND_BASE_URL`` or else
    ``CACHEBLEND_MODEL`` supplies one. Without ``store``, a local model has the store of ``CACHEBLEND_STORE``, or else
    RAM alone. The engine is closed when the process ends; an engine that was closed before is opened anew.

    Args:
        model: A directory, a GGUF file, a hub name, ``"smollm2"`` or ``"bundled"``; with ``base_url`` the name of the
            model that the server must serve.
        engine: Name of the engine that runs a local model.
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
    opened_as = locals().copy()
    found = _named(**opened_as)
    if found._reopen is None:
        found._reopen = partial(shared_engine, **opened_as)
    return found


def _named(
    model: str | Path | None,
    engine: EngineName,
    store: str | Path | None,
    device: str | None,
    dtype: str | None,
    writer: str | Path | None,
    threads: int | None,
    base_url: str | None,
    api_key: str | None,
    timeout_s: float | None,
    max_retries: int | None,
) -> BlendEngine:
    if engine not in get_args(EngineName):
        raise InputError(f"engine is {engine!r}; it is 'transformers', 'vllm', or an engine of yours.")
    check_run_options(dtype, threads)
    if model is None and base_url is None:
        base_url = os.environ.get("CACHEBLEND_BASE_URL")
        model = None if base_url else os.environ.get("CACHEBLEND_MODEL")
        if not base_url and not model:
            raise InputError(
                "There is neither a model nor a server. Give model= (a directory, a GGUF file, a hub name, 'smollm2' or "
                "'bundled') or base_url=, or set CACHEBLEND_MODEL or CACHEBLEND_BASE_URL."
            )
    if base_url:
        elsewhere = engine if engine != HERE else None
        local = {"store": store, "device": device, "dtype": dtype, "writer": writer, "threads": threads}
        _refuse("the model runs on the server", **local, engine=elsewhere)
        given = {"api_key": api_key, "timeout_s": timeout_s, "max_retries": max_retries}
        connection: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        from cacheblend_rag.engines.remote import RemoteEngine

        served = None if model is None else str(model)
        return _shared(
            ("server", base_url, served, *connection.items()),
            partial(RemoteEngine, base_url, model=served, **connection),
        )
    _refuse("the model runs in this process", api_key=api_key, timeout=timeout_s, max_retries=max_retries)
    named = None if str(model) == BUNDLED else str(model)
    kept = str(store or os.environ.get("CACHEBLEND_STORE") or "") or None
    here: dict[str, Any] = {"dtype": dtype, "writer": None if writer is None else str(writer)}
    if engine == "vllm":
        _refuse("vLLM chooses for itself", device=device, threads=threads)
        from cacheblend_rag.engines.vllm import VLLMEngine

        return _shared(("vllm", named, kept, *here.values()), partial(VLLMEngine, named, store=kept, **here))
    import torch

    from cacheblend_rag.engines.transformers import TransformersEngine

    if threads is not None and threads != torch.get_num_threads():
        torch.set_num_threads(threads)
    here |= {"dtype": dtype and dtype_named(dtype), "device": device}
    return _shared((HERE, named, kept, *here.values()), partial(TransformersEngine, named, store=kept, **here))


def check_run_options(dtype: Any = None, threads: Any = None) -> None:
    """Raise an error for values with which no model can run, before a model is loaded.

    Raises:
        InputError: ``dtype`` names no dtype that a model runs in, or ``threads`` is no number of threads.
    """
    if dtype is not None:
        if not isinstance(dtype, str):
            raise InputError(f"dtype is {dtype!r:.200}; give its name: 'float32', 'bfloat16' or 'float16'.")
        dtype_named(dtype)
    if threads is not None and not (is_whole(threads) and threads >= 1):
        raise InputError(f"threads is {threads!r:.200}; give a whole number from 1 on.")


def _shared(key: tuple[Any, ...], start: Callable[[], BlendEngine]) -> BlendEngine:
    found = _opened.get(key)  # an open engine is returned without waiting while another model loads
    if found is None or found.closed:
        with _opening:
            found = _opened.get(key)
            if found is None or found.closed:
                found = _opened[key] = start()
    return found


def _refuse(why: str, **arguments: object) -> None:
    if given := [f"{name}=" for name, value in arguments.items() if value is not None]:
        raise InputError(f"{', '.join(given)} cannot be used: {why}. Leave it out.")


@atexit.register
def _close() -> None:
    for engine in _opened.values():
        engine.close()
