"""Starts vLLM's OpenAI server with a blending engine, and shuts the server down cleanly."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
from argparse import Namespace
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import psutil

from cacheblend_rag.errors import CacheBlendError, InputError
from cacheblend_rag.server.amounts import most_characters
from cacheblend_rag.server.arguments import api_keys, model_info, parse
from cacheblend_rag.server.forking import compute_on_one_thread, forked_engine
from cacheblend_rag.server.keys import NO_QUOTA, Admission, Key, Keys, read_keys
from cacheblend_rag.server.middleware import DEFAULT_HELD_LIMIT, NAMES, RequestLimits
from cacheblend_rag.server.observing import ReuseMetrics, share_logging
from cacheblend_rag.server.options import ServeOptions, elapsed, tell
from cacheblend_rag.server.tenants import PerNamespace, ServedTenants, StandIn, calling
from cacheblend_rag.store import KVStore, open_store
from cacheblend_rag.store.files import DEFAULT_NAME

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.datastructures import State
    from vllm.v1.engine.async_llm import AsyncLLM

    from cacheblend_rag.engines.vllm.arguments import Launch

_log = logging.getLogger("vllm.cacheblend")  # child of vLLM's logger, which vLLM's flags configure
MOST_ANSWERS = "128"
"""Most answers, or beams, to one prompt of a request, as in OpenAI's API; vLLM's own limit is 16,384."""
_DRAIN_S, _SETTLE_S = 5.0, 60.0
_POLL_S = 0.05
_ENGINE = (
    "Starting vLLM's engine, whose lines have the time of day: it loads the model, compiles it (the first start; later ones "
    "find that) and passes the parity gate; workers beside it import vLLM once more."
)


def serve(options: ServeOptions, flags: Sequence[str]) -> None:
    """Serve until SIGTERM or SIGINT, then end the process; running requests get ``--shutdown-timeout`` seconds to end.

    Raises:
        InputError: A flag is not supported, or the server cannot listen on the address.
        ModelError: The model cannot be loaded.
        StoreError: The store cannot be used.
    """
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")  # before vLLM reads the variable; child processes inherit it
    os.environ.setdefault("VLLM_MAX_N_SEQUENCES", MOST_ANSWERS)
    with _without_collecting():
        threads = compute_on_one_thread()
        tell("Reading the flags and the model's files.")
        args, launch = parse(options, flags)

        import uvloop
        import vllm.entrypoints.launchers.api_server.app_state
        import vllm.entrypoints.launchers.api_server.entry
        import vllm.entrypoints.launchers.app
        import vllm.v1.engine.async_llm  # noqa: F401
        from vllm.logger import configure_logging_from_args

        from cacheblend_rag.engines.vllm.starting import end_now
        from cacheblend_rag.engines.vllm.versions import server_startup

    server_startup().cli_env_setup()
    configure_logging_from_args(args)
    share_logging()
    with suppress(KeyboardInterrupt):  # stopped before the server had started
        uvloop.run(_serve(options, args, launch, threads))
    end_now()


@contextmanager
def _without_collecting() -> Iterator[None]:
    """Suspend garbage collection during imports and exempt the imported objects later: collecting takes a tenth of the time."""
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


async def _serve(options: ServeOptions, args: Namespace, launch: Launch, threads: int) -> None:
    signal.signal(signal.SIGTERM, _stop_starting)
    address, sock = _listen(args)
    stopped: Coroutine[Any, Any, None] | None = None
    try:
        # A broken store is reported before a model is loaded.
        store = open_store(launch.store, ram_budget=0, disk_budget=options.disk_budget)
        tell(_ENGINE)
        with store:
            async with _started(forked_engine(args, sock, threads), launch, options.verbose) as llm:
                stopped = await _serve_engine(options, args, launch, llm, store, address, sock)
            await stopped
    finally:
        sock.close()


async def _serve_engine(
    options: ServeOptions,
    args: Namespace,
    launch: Launch,
    llm: AsyncLLM,
    store: KVStore,
    address: str,
    sock: socket.socket,
) -> Coroutine[Any, Any, None]:
    from cacheblend_rag.engines.vllm.client import connect

    tell("Opening what is registered, and the routes.")
    client = await connect(llm, launch, store, write_back=options.write_back)
    workers = psutil.Process().children(recursive=True)
    limits = guard(options, args, client.context_window)
    keys = limits.keys
    tenants = ServedTenants.open(client, options.store, keys.tenants, options.max_chunks, keys.quotas)
    tenants.watch()
    known = 0
    for served in tenants.each.values():
        known += len(served.client.registry)
        for warning in served.catalogue.warnings:
            _log.warning(warning)
    try:
        app = await build_app(options, args, llm, tenants, limits)
        line = f"Serving {client.fingerprint.name} on {address}: {known} chunks known in {options.store}."
        announcing = asyncio.create_task(announce(app.state, line))
        try:
            return await _listen_and_serve(app, sock, args)
        finally:
            announcing.cancel()
    finally:
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(tenants.drain(), _DRAIN_S)
        await tenants.settle(workers, _SETTLE_S)
        tenants.close()


async def announce(state: Any, line: str) -> None:
    """Log ``line`` and the duration of the start once the server answers, after vLLM's log lines about its routes."""
    while not getattr(getattr(state, "server", None), "started", False):  # uvicorn's own flag, which has no callback
        await asyncio.sleep(_POLL_S)
    _log.info("%s The start took %.0f s.", line, elapsed())


async def build_app(
    options: ServeOptions, args: Namespace, llm: AsyncLLM, tenants: ServedTenants, limits: RequestLimits
) -> FastAPI:
    """Return vLLM's application with blending, the chunk routes, and the checks of :func:`guard` on all routes."""
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app as build_vllm_app

    from cacheblend_rag.server.bodies import stop_at_first
    from cacheblend_rag.server.middleware import answer_errors
    from cacheblend_rag.server.routes import chunk_router
    from cacheblend_rag.server.served_engine import ServedEngine

    metrics = ReuseMetrics()
    served: Any = ServedEngine(llm, tenants, metrics)
    tasks = await llm.get_supported_tasks()
    app = build_vllm_app(args, tasks, llm.model_config)
    stop_at_first(app)
    app.state.limits = replace(limits, refused=metrics.refused)
    answer_errors(app)
    await init_app_state(served, app.state, args, tasks)
    _blend(app.state, tenants)
    model = model_info(tenants.each[DEFAULT_NAME].client, options, args)
    app.include_router(chunk_router(tenants, metrics, model))
    return app


def guard(options: ServeOptions, args: Namespace, window: int) -> RequestLimits:
    """Add our middleware to vLLM's arguments and return its limits; the context window has ``window`` tokens.

    Raises:
        InputError: The file of keys cannot be used.
    """
    args.middleware = [*args.middleware, *NAMES]
    # Otherwise vLLM's own check, which covers only /v1, would refuse every key but VLLM_API_KEY.
    args.api_key = api_keys(args)
    keys = Keys(tuple(map(Key.of, args.api_key))) if options.keys is None else read_keys(options.keys)
    local = not (keys.keys or args.uds or options.allow_no_key)
    return RequestLimits(
        keys,
        options.max_request_size,
        characters=most_characters(window),
        local=local,
        held=max(DEFAULT_HELD_LIMIT, 4 * options.max_request_size),
        admissions={tenant.name: Admission(keys.quotas.get(tenant.name, NO_QUOTA)) for tenant in keys.tenants},
    )


def _blend(state: State, tenants: ServedTenants) -> None:
    """Give vLLM's handlers our renderer, and wrap the chat and completion handlers so that answers contain reports."""
    from cacheblend_rag.server.renderer import BlendRenderer
    from cacheblend_rag.server.served_engine import ReportingHandler

    inner = state.online_renderer
    renderer = StandIn(
        PerNamespace({name: BlendRenderer(inner, own.client, own.catalogue) for name, own in tenants.each.items()})
    )
    names = (
        "openai_serving_chat",
        "openai_serving_chat_batch",
        "openai_serving_completion",
        "openai_serving_responses",
    )
    for name in (*names, "anthropic_serving_messages", "cohere_serving_chat_v2"):
        if (handler := getattr(state, name)) is not None:
            handler.online_renderer = renderer
    if state.openai_serving_chat is not None:
        state.openai_serving_chat = ReportingHandler(state.openai_serving_chat)
        state.openai_serving_completion = ReportingHandler(state.openai_serving_completion)
    hide_paths(state.openai_serving_models)


def hide_paths(models: Any) -> None:
    """Make vLLM's list of models show the paths of model files to the operator only."""
    list_all = models.show_available_models

    async def show_available_models() -> Any:
        found = await list_all()
        if not calling.get().operator:
            for card in found.data:
                card.root = card.id
        return found

    models.show_available_models = show_available_models


async def _listen_and_serve(app: FastAPI, sock: socket.socket, args: Namespace) -> Coroutine[Any, Any, None]:
    from vllm import envs
    from vllm.entrypoints.launchers.launcher import serve_http
    from vllm.entrypoints.launchers.utils.server_utils import get_uvicorn_log_config

    log_config = get_uvicorn_log_config(args)
    logging_options: dict[str, Any] = {} if log_config is None else {"log_config": log_config}
    stopped: Coroutine[Any, Any, None] = await serve_http(
        app,
        sock=sock,
        enable_ssl_refresh=args.enable_ssl_refresh,
        host=args.host,
        port=args.port,
        http="h11",  # httptools reads request lines and headers of any size, and decoding them blocks all requests
        log_level=args.uvicorn_log_level,
        access_log=not args.disable_uvicorn_access_log,
        timeout_keep_alive=envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE,
        ssl_keyfile=args.ssl_keyfile,
        ssl_certfile=args.ssl_certfile,
        ssl_ca_certs=args.ssl_ca_certs,
        ssl_cert_reqs=args.ssl_cert_reqs,
        ssl_ciphers=args.ssl_ciphers,
        h11_max_incomplete_event_size=args.h11_max_incomplete_event_size,
        h11_max_header_count=args.h11_max_header_count,
        **logging_options,
    )
    return stopped


def _listen(args: Namespace) -> tuple[str, socket.socket]:
    from vllm.entrypoints.launchers.launcher import setup_server

    try:
        address, sock = setup_server(args, reuse_port=False)
        return str(address), sock
    except OSError as error:
        where = args.uds or f"{args.host}:{args.port}"
        raise InputError(f"Cannot listen on {where}: {error.strerror or error}. Choose another --port.") from error
    except KeyError as error:
        raise InputError(str(error.args[0])) from error


@asynccontextmanager
async def _started(engine: Any, launch: Launch, verbose: bool) -> AsyncIterator[AsyncLLM]:
    """Start vLLM's engine; raises StartError with a message of a few lines if the start fails."""
    from cacheblend_rag.engines.vllm.starting import StartError, StartLog, forget_what_is_compiled

    log = StartLog(verbose)
    async with AsyncExitStack() as stack:
        try:
            with log:
                llm: AsyncLLM = await stack.enter_async_context(engine)
        except CacheBlendError:
            raise
        except Exception as error:  # whatever vLLM raises
            why, note = log.why(error, "; --verbose shows it"), forget_what_is_compiled(error)
            raise StartError(launch.fingerprint.name, error, why, note) from error
        yield llm


def _stop_starting(*_: object) -> None:
    raise KeyboardInterrupt
