"""Tests that a call to vLLM's workers ends, even if they fail or die."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from cacheblend_rag.engines.vllm.asking import ask_workers


class Engine(SimpleNamespace):
    """An engine that answers when ``answer`` is set, or dies before."""

    def __init__(self) -> None:
        super().__init__(errored=False, dead_error=RuntimeError("the engine has died"), asked=[])
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def collective_rpc(self, method: str) -> Any:
        self.asked.append(method)
        return await self.answer


async def test_ask_workers_returns_the_answer_of_every_rank() -> None:
    engine = Engine()
    engine.answer.set_result(("first", "second"))
    assert await ask_workers(engine, "which") == ["first", "second"]  # type: ignore[arg-type]
    assert engine.asked == ["which"]


async def test_ask_workers_returns_the_answers_of_every_data_parallel_engine() -> None:
    async def all_of_them(*asked: Any) -> list[list[str]]:
        assert asked[:2] == ("collective_rpc", "which")
        return [["of the first"], ["of the second"]]

    engine = Engine()
    engine.engine_core = SimpleNamespace(core_engines=[b"0", b"1"], call_utility_all_async=all_of_them)
    engine.answer.set_result(["of the first"])
    assert await ask_workers(engine, "which") == ["of the first", "of the second"]  # type: ignore[arg-type]


async def test_ask_workers_raises_if_the_engine_dies_before_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cacheblend_rag.engines.vllm.asking._LOOK_S", 0.001)
    engine = Engine()
    asking = asyncio.ensure_future(ask_workers(engine, "which"))  # type: ignore[arg-type]
    while not engine.asked:
        await asyncio.wait({asking}, timeout=0)
    engine.errored = True
    with pytest.raises(RuntimeError, match="has died"):
        await asyncio.wait_for(asking, 600)
    assert engine.answer.cancelled(), "nothing is left that waits"


async def test_ask_workers_raises_a_workers_error() -> None:
    engine = Engine()
    engine.answer.set_exception(ValueError("no such method"))
    with pytest.raises(ValueError, match="no such"):
        await ask_workers(engine, "which")  # type: ignore[arg-type]
