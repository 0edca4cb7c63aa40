"""Asking vLLM's workers something, and getting an answer or an error in any case."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.engine.protocol import EngineClient

_LOOK_S = 0.5


async def ask_workers(llm: EngineClient, method: str) -> list[Any]:
    """Return what a method of :class:`~cacheblend_rag.engines.vllm.worker.BlendWorker` says, on each rank.

    vLLM lets a question wait for ever whose engine dies before it answers; here it fails.

    Raises:
        EngineDeadError: vLLM's engine has died.
    """
    asked = asyncio.ensure_future(llm.collective_rpc(method))
    try:
        while not asked.done():
            await asyncio.wait({asked}, timeout=_LOOK_S)
            if llm.errored and not asked.done():
                raise llm.dead_error
        return list(asked.result())
    finally:
        asked.cancel()
