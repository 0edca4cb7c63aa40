"""The line that says where the server is comes when it answers, and not before."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

pytest.importorskip("starlette", reason="the server's libraries come with vLLM")

from cacheblend_rag.server import launch


async def test_it_is_said_when_the_server_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_POLL_S", 0)
    said: list[str] = []
    monkeypatch.setattr(launch, "_log", SimpleNamespace(info=said.append))
    state = SimpleNamespace()
    task = asyncio.create_task(launch.announce(state, "Serving acme on http://127.0.0.1:8000."))
    for server in (None, SimpleNamespace(started=False)):
        state.server = server
        for _ in range(3):
            await asyncio.sleep(0)
        assert not said
    state.server.started = True
    await asyncio.wait_for(task, 10)
    assert said == ["Serving acme on http://127.0.0.1:8000."]
