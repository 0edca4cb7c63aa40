"""Tests the line that announces a server's address, and that only the operator sees its paths."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

pytest.importorskip("starlette", reason="the server's libraries come with vLLM")

from cacheblend_rag.server import launch, options
from cacheblend_rag.server.tenants import Caller, calling


async def test_the_address_is_logged_once_the_server_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_POLL_S", 0)
    said: list[str] = []
    monkeypatch.setattr(launch, "elapsed", lambda: 27.3)
    monkeypatch.setattr(launch, "_log", SimpleNamespace(info=lambda text, *values: said.append(text % values)))
    state = SimpleNamespace()
    task = asyncio.create_task(launch.announce(state, "Serving acme on http://127.0.0.1:8000."))
    for server in (None, SimpleNamespace(started=False)):
        state.server = server
        for _ in range(3):
            await asyncio.sleep(0)
        assert not said
    state.server.started = True
    await asyncio.wait_for(task, 600)
    assert said == ["Serving acme on http://127.0.0.1:8000. The start took 27 s."]


@pytest.mark.parametrize("operator", [True, False])
async def test_only_the_operator_sees_the_models_path(operator: bool) -> None:
    class Models:
        async def show_available_models(self) -> SimpleNamespace:
            return SimpleNamespace(data=[SimpleNamespace(id="acme/model", root="/home/ann/models")])

    models = Models()
    launch.hide_paths(models)
    token = calling.set(Caller("acme", operator))
    (card,) = (await models.show_available_models()).data
    calling.reset(token)
    assert (card.id, card.root) == ("acme/model", "/home/ann/models" if operator else "acme/model")


def test_a_progress_line_begins_with_the_seconds_since_the_command_was_typed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = options.elapsed()
    options.tell("Importing vLLM.")
    options.tell("Reading the flags.")
    out, said = capsys.readouterr()
    first, second = (line.split(" s  ") for line in said.splitlines())
    assert (out, first[1], second[1]) == ("", "Importing vLLM.", "Reading the flags.")
    assert before - 0.1 <= float(first[0]) <= float(second[0])
