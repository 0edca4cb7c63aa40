"""Kills replicas of one store at random under load: no answer is wrong, and no stored chunk is lost.

``make faults`` runs this test, since two hundred kills take half an hour; `tests/store/test_crash.py` kills writers in every run.
"""

from __future__ import annotations

import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from itertools import count, permutations
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest

from cacheblend_rag.store import DiskStore
from tests.engines.contract import TEXTS
from tests.outcomes import missing_in
from tests.server.running import RunningServer

pytest.importorskip("vllm", reason="vLLM is not installed; make setup installs it")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.environ.get("CACHEBLEND_FAULTS") != "full", reason="takes long; run it with make faults"),
]

REPLICAS, KILLS = 3, int(os.environ.get("CACHEBLEND_KILLS", "200"))
ORDERS = list(permutations(TEXTS))
# An answer at ratio 0 uses only stored KV, an answer at ratio 1 uses none.
BLENDS: tuple[dict[str, Any], ...] = ({"ratio": 0.0}, {"ratio": 1.0})
_numbers = count()


def ask(server: RunningServer, order: tuple[str, ...], blend: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
    """Return the answer over chunks in an order that vLLM's prefix cache does not hold, and its report."""
    fields = {"prompt": "\n\n".join([*order, "Question: Who?"]), "max_tokens": 6, "temperature": 0}
    fields |= {"return_token_ids": True, "cacheblend": blend, "cache_salt": uuid4().hex}
    answer = server.post("/v1/completions", fields)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    return found["choices"][0]["token_ids"], found["usage"]["cacheblend"]


class Load:
    """Asks and registers on one replica, which may be killed at any time, and records wrong answers."""

    def __init__(self, server: RunningServer, want: dict[Any, list[int]]):
        self.server, self.want = server, want
        self.answered, self.stored = 0, list[str]()
        self.wrong: list[str] = []

    def run(self, stop: threading.Event) -> None:
        chance = random.Random(id(self))
        # The pause leaves the two cores time to start a server, which would otherwise take most of a minute.
        while not stop.wait(chance.uniform(0, 0.5)):
            # The replica may be starting again after a kill.
            with suppress(httpx.TransportError):
                self._step(chance)

    def _step(self, chance: random.Random) -> None:
        order, blend = chance.choice(ORDERS), chance.choice(BLENDS)
        tokens, report = ask(self.server, order, blend)
        if missing_in(report) or report["mode"] != "blend":
            self.wrong.append(f"what was stored is lost: {report}")
        if tokens != self.want[order, blend["ratio"]]:
            self.wrong.append(f"{tokens} over {order} at {blend}")
        self.answered += 1
        text = f"Entry {next(_numbers)}: the ships of the harbour were counted again."
        answer = self.server.post("/v1/chunks", {"texts": [text]})
        assert answer.status_code == 200, answer.text
        self.stored += [chunk["id"] for chunk in answer.json()["data"] if chunk["stored"]]


def test_killed_replicas_give_no_wrong_answer_and_lose_no_stored_chunk(server_model: Path, tmp_path: Path) -> None:
    store, chance = tmp_path / "store", random.Random(5)
    servers = [RunningServer(server_model, store) for _ in range(REPLICAS)]
    with ThreadPoolExecutor(REPLICAS) as pool, ExitStack() as opened:
        list(pool.map(opened.enter_context, servers))
        assert servers[0].post("/v1/chunks", {"texts": TEXTS}).json()["report"]["computed"] == len(TEXTS)
        want = {(order, 0.0): ask(servers[0], order, BLENDS[0])[0] for order in ORDERS}
        want |= {(order, 1.0): ask(servers[0], order, {"quality": "full"})[0] for order in ORDERS}
        assert len({tuple(tokens) for tokens in want.values()}) > 1
        stop, loads = threading.Event(), [Load(server, want) for server in servers]
        running = [pool.submit(load.run, stop) for load in loads]
        opened.callback(stop.set)
        for kill in range(KILLS):
            load = chance.choice(loads)
            assert load.server.process is not None
            load.server.process.join(timeout=chance.uniform(0, 1.0))
            load.server.kill()
            # The new server gets another port: a client's connection may have taken the old port.
            load.server = opened.enter_context(RunningServer(server_model, store))
            print(f"{kill + 1} kills, {sum(load.answered for load in loads)} answers", flush=True)  # noqa: T201
            assert [line for load in loads for line in load.wrong] == []
        stop.set()
        for each in running:
            each.result()
        assert [line for load in loads for line in load.wrong] == []
        assert all(load.answered and load.stored for load in loads)
        for name in (name for load in loads for name in load.stored):
            assert loads[0].server.get(f"/v1/chunks/{name}").json()["stored"]
    with DiskStore(store) as left:
        assert left.verify(repair=False).damaged == ()
