"""Runs vLLM in this process as a blend engine: all callers share an AsyncLLM, which has a separate event loop."""

from __future__ import annotations

import asyncio
import queue
import shutil
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.protocol import EngineClient
from vllm.v1.engine.async_llm import AsyncLLM

from cacheblend_rag.blending.gate import GateReport
from cacheblend_rag.blending.settings import BlendSettings
from cacheblend_rag.engines.base import BlendEngine, Prompt, Request
from cacheblend_rag.engines.entries import Ranking, chosen_ranking
from cacheblend_rag.engines.results import EventQueue, Item, PrecomputeReport, StreamEvent
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.vllm.arguments import Launch, prepare
from cacheblend_rag.engines.vllm.asking import ask_gate
from cacheblend_rag.engines.vllm.client import BlendClient
from cacheblend_rag.engines.vllm.starting import StartError, forget_what_is_compiled, spawn_if_forking_fails
from cacheblend_rag.errors import InputError
from cacheblend_rag.homes import from_home
from cacheblend_rag.prompts.chunk import Chunk
from cacheblend_rag.prompts.prompt import Header
from cacheblend_rag.store import KVStore, open_store
from cacheblend_rag.store.opening import is_urls

T = TypeVar("T")


class _LLM(AsyncLLM):
    """Extends vLLM's engine, which :meth:`VLLMEngine.close` shuts down."""

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        """Shut down, except at the interpreter's end: without vLLM's modules a shutdown would print a traceback."""
        if not ending():
            self.shutdown()


class VLLMEngine(BlendClient, BlendEngine):
    """Answers prompts of text and chunks with vLLM, whose scheduler batches the requests from all threads.

    The engine starts its own vLLM. Any thread or event loop may call the engine.

    Attributes:
        store: The store, opened in this process; vLLM's workers read and write the same directory.
        loop: The event loop in which vLLM's client runs.

    Example:
        Precompute chunks, then answer a question from the chunks::

            with VLLMEngine("smollm2", store="kv") as engine:
                chunks = split_text(text, engine.tokenizer)
                engine.precompute(chunks)
                print(engine.generate(BlendPrompt((*chunks, "Question: Who is the captain? Answer:"))).text)
    """

    supports_json_schema: ClassVar[bool] = True
    store: KVStore
    device: torch.device
    dtype: torch.dtype

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        store: str | Path | None = None,
        header: Header | None = None,
        ratio: float | None = None,
        dtype: str | torch.dtype | None = None,
        write_back: bool = True,
        ranking: Ranking | None = None,
        ram_budget: int | None = None,
        disk_budget: int | None = None,
        writer: str | Path | None = None,
        **vllm_arguments: Any,
    ):
        """Start vLLM and run the parity gate.

        Args:
            model: Directory, GGUF file, hub name or ``"smollm2"``; None for the bundled model.
            store: Directory of the store, or addresses of its tiers (:func:`open_store`); None for a temporary
                directory, which :meth:`close` removes.
            header: Text or tokens in front of the first chunk of your prompts; None takes the header of
                :func:`rag_header`.
            ratio: Default recompute ratio; None takes the ratio of the model's profile.
            dtype: Dtype of the model; None means the model's own dtype, but fp32 on a CPU that is not faster in bf16.
            write_back: Whether to precompute, after an answer, the chunks of its prompt that the store lacked.
            ranking: When to measure static deviations, as for :class:`TransformersEngine`.
            ram_budget: Bytes of KV that each worker holds in RAM in front of the disk; None for the worker's share of a
                quarter of the machine's memory.
            disk_budget: Bytes of KV on disk.
            writer: KV writer that computes the KV of chunks, as for :class:`TransformersEngine`.
            vllm_arguments: Any other engine argument of vLLM (``tensor_parallel_size``, ``max_model_len``...).

        Raises:
            InputError: An argument is one that the engine sets itself, ``ranking`` is unknown, or the writer was made
                for another model.
            ModelError: The model cannot be loaded, or vLLM does not start.
            StoreError: The store cannot be opened.
        """
        self._temporary = Path(tempfile.mkdtemp(prefix="cacheblend-")) if store is None else None
        where = self._temporary or (store if isinstance(store, str) and is_urls(store) else from_home(store or ""))
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="cacheblend-vllm", daemon=True)
        self._thread.start()
        try:
            budgets: dict[str, Any] = {"ram_budget": ram_budget, "disk_budget": disk_budget}
            launch = prepare(
                model, where, header=header, ratio=ratio, dtype=dtype, writer=writer, **budgets, **vllm_arguments
            )
            ranking = chosen_ranking(ranking, launch.profile.policy)
            opened = _opened(where, disk_budget)
            llm, gate = self._run(_start(launch))
            super().__init__(llm, launch, opened, gate, write_back=write_back, ranking=ranking)
        except BaseException:
            self._stop()
            raise

    def _become(self) -> None:
        """Give the view its own background tasks; see :class:`BlendEngine`."""
        self._background = set()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def precompute(self, chunks: Sequence[Chunk], progress: Callable[[int], None] | None = None) -> PrecomputeReport:
        """See :class:`BlendEngine`; vLLM's scheduler batches ordinary requests of ``[header] + chunk``."""
        self.check_open()
        return self._run(self.register(chunks, progress))

    def precompute_first(self, chunks: Sequence[Chunk]) -> PrecomputeReport:
        self.check_open()
        return self._run(self.store_own(chunks))

    def stream(
        self, prompt: Prompt | Request, sampling: SamplingParams | None = None, settings: BlendSettings | None = None
    ) -> Iterator[StreamEvent]:
        return self._pump(self.request(prompt, sampling, settings))

    def _pump(self, request: Request) -> Iterator[StreamEvent]:
        events: queue.Queue[Item] = queue.Queue()
        work = asyncio.run_coroutine_threadsafe(_forward(self.events(request), events.put), self.loop)
        try:
            while (item := events.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            work.cancel()

    async def astream(
        self, prompt: Prompt | Request, sampling: SamplingParams | None = None, settings: BlendSettings | None = None
    ) -> AsyncIterator[StreamEvent]:
        """See :class:`BlendEngine`; cancelling the consumer aborts the request."""
        request = await asyncio.to_thread(self.request, prompt, sampling, settings)
        arriving = EventQueue()
        work = asyncio.run_coroutine_threadsafe(_forward(self.events(request), arriving.put), self.loop)
        try:
            async for event in arriving.events():
                yield event
        finally:
            work.cancel()

    def flush(self) -> None:
        self._run(self.drain())

    def reset_prefix_cache(self) -> None:
        self._run(self.llm.reset_prefix_cache())

    def close(self) -> None:
        """Stop vLLM, finish pending writes and close the store; closing a view does nothing."""
        if self._closed or self._root is not None:
            return
        self._closed = True
        self._run(self._shutdown())
        self.store.close()
        self._stop()

    async def _shutdown(self) -> None:
        every: list[VLLMEngine] = [self, *self._views.values()]
        for each in every:
            await each.drain()
        await _shut_down(self.llm)
        # Garbage collection shuts vLLM down once more, and must not wait for the interpreter's end.
        for each in every:
            del each.llm

    def _stop(self) -> None:
        """Stop the event loop, and remove a temporary store."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)


def _opened(where: Path | str, disk_budget: int | None) -> KVStore:
    """Open the store for this process, which reads no KV: only the workers hold KV in RAM.

    Raises:
        InputError: The store consists of RAM alone.
    """
    store = open_store(where, ram_budget=0, disk_budget=disk_budget)
    if not store.lasts:
        raise InputError(
            f"{where!r} is RAM alone, which vLLM's processes do not share; add file:///... or another tier."
        )
    return store


async def _start(launch: Launch) -> tuple[AsyncLLM, GateReport]:
    """Start vLLM in this event loop; return vLLM's client and the report of the parity gate in vLLM's workers."""
    spawn_if_forking_fails()
    try:
        llm = _LLM.from_engine_args(AsyncEngineArgs(**launch.arguments))
    except Exception as error:  # whatever vLLM raises
        note = forget_what_is_compiled(error)
        raise StartError(launch.fingerprint.name, error, str(error), note) from error
    try:
        return llm, await ask_gate(llm, launch)
    except BaseException:  # the traceback refers to vLLM, and would keep the memory of vLLM's processes in use
        await _shut_down(llm)
        raise


async def _shut_down(llm: EngineClient) -> None:
    # The call blocks until vLLM's processes have stopped; no other task needs the event loop any more.
    llm.shutdown()
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)


async def _forward(events: AsyncIterator[StreamEvent], put: Callable[[Item], None]) -> None:
    try:
        async for event in events:
            put(event)
        put(None)
    except BaseException as error:  # passed to the consumer, which raises the error again
        put(error)
        if isinstance(error, asyncio.CancelledError):
            raise
