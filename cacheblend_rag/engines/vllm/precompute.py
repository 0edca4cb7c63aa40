"""Precomputing chunks in vLLM: ordinary requests ``[header] + chunk``, whose KV the workers copy out and write."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from vllm import SamplingParams as VLLMSampling

from cacheblend_rag.engines.entries import Entries
from cacheblend_rag.engines.precompute import plan_precompute
from cacheblend_rag.engines.results import PrecomputeReport
from cacheblend_rag.engines.vllm.messages import PARAMS
from cacheblend_rag.prompts.chunk import Chunk

if TYPE_CHECKING:
    from vllm.engine.protocol import EngineClient
    from vllm.outputs import RequestOutput

# Requests in flight: enough for vLLM's scheduler to fill its batches.
_IN_FLIGHT = 64
_POLL_S = 0.005


class Precompute:
    """Computes each entry once, however many callers ask for it at the same time. Lives in the client's event loop."""

    def __init__(self, llm: EngineClient, entries: Entries, context_window: int, names: Iterator[str]):
        """Ask ``llm``, under request ids from ``names``."""
        self._llm, self._entries, self._context_window, self._names = llm, entries, context_window, names
        self._written: dict[str, str] = {}
        self._computing: dict[tuple[int, ...], asyncio.Future[str]] = {}

    async def run(self, chunks: Sequence[Chunk], progress: Callable[[int], None] | None) -> PrecomputeReport:
        """See :meth:`BlendEngine.precompute`."""
        begin = time.perf_counter()
        plan = await asyncio.to_thread(plan_precompute, chunks, self._entries, self._context_window, progress)
        failed = dict(plan.failed)
        slots = asyncio.Semaphore(_IN_FLIGHT)

        async def one(token_ids: tuple[int, ...]) -> None:
            async with slots:
                why = await self._compute_once(token_ids)
            if not token_ids:
                return
            if why:
                failed[plan.chunks[token_ids]] = why
            if progress is not None:
                progress(1)

        async with asyncio.TaskGroup() as group:
            for token_ids in plan.token_ids:
                group.create_task(one(token_ids))
        return plan.report(failed, time.perf_counter() - begin)

    async def _compute_once(self, token_ids: tuple[int, ...]) -> str:
        """Return why an entry is not in the store, or an empty string."""
        running = self._computing.get(token_ids)
        if running is None:
            running = self._computing[token_ids] = asyncio.ensure_future(self._compute(token_ids))
            running.add_done_callback(lambda _: self._computing.pop(token_ids, None))
        return await asyncio.shield(running)  # one caller that goes away does not end it for the others

    async def _compute(self, token_ids: tuple[int, ...]) -> str:
        header = self._entries.header_ids
        prompt = {"prompt_token_ids": [*header, *token_ids]}
        save = {PARAMS: {"save": len(header) if token_ids else 0}}
        sampling = VLLMSampling(max_tokens=1, temperature=0, detokenize=False, extra_args={"kv_transfer_params": save})
        last: RequestOutput | None = None
        async for output in self._llm.generate(prompt, sampling, next(self._names)):  # type: ignore[arg-type]
            last = output
        if last is None or last.outputs[0].finish_reason not in {"length", "stop"}:
            return "vLLM ended its request before its KV was complete"
        keys = [str(key) for key in self._entries.written_keys(token_ids)]
        pause = 0.0
        while not all(key in self._written for key in keys):
            await asyncio.sleep(pause)
            for rank in await self._llm.collective_rpc("cacheblend_written"):
                self._written.update(rank)
            pause = _POLL_S
        return next(filter(None, [self._written.pop(key) for key in keys]), "")
