"""Tests of the connector's half in the workers, without a running vLLM: a failure is reported and has no other effect."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed; make setup installs it")

from cacheblend_rag.blending.gate import GateReport
from cacheblend_rag.engines.entries import Entries
from cacheblend_rag.engines.vllm import asking, worker_side
from cacheblend_rag.engines.vllm.asking import IN_FLIGHT
from cacheblend_rag.engines.vllm.messages import BUSY, Save, SaveJob, receipt
from cacheblend_rag.engines.vllm.saving import UNWRITTEN
from cacheblend_rag.engines.vllm.worker_side import WorkerSide
from cacheblend_rag.prompts.chunk import Chunk
from cacheblend_rag.store import MemoryStore
from cacheblend_rag.store.files import Namespace
from cacheblend_rag.store.kv import LayerKV, ModelFingerprint
from cacheblend_rag.store.opening import default_ram_budget


class Store(MemoryStore):
    """A store whose writes fail."""

    def put(self, *_: Any, **__: Any) -> bool:
        raise OSError(116, "Stale file handle")


class Paged:
    """A paged cache of two layers; reading a prompt of one token fails."""

    num_layers, kv_heads = 2, 2
    group_of = (0, 1)
    device = torch.device("cpu")

    def slots(self, group: int, pages: Any, positions: torch.Tensor) -> torch.Tensor:
        return positions + 100 * group

    def read(self, layer: int, slots: torch.Tensor) -> LayerKV:
        if len(slots) == 1:
            raise RuntimeError("out of memory")
        return LayerKV(*(slots[None, :, None].expand(2, -1, 4).float(),) * 2)


class HeldUp(MemoryStore):
    """A store whose writes wait until ``go_on`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()

    def put(self, *args: Any, **options: Any) -> bool:
        assert self.go_on.wait(30)
        return super().put(*args, **options)


def worker(store: MemoryStore) -> WorkerSide:
    entries = Entries(store, ModelFingerprint("0" * 32, "m"), ())
    side = WorkerSide(entries, SimpleNamespace(), SimpleNamespace(), 100.0)  # type: ignore[arg-type]
    side.gate = GateReport(True)
    side.saver.bind(Paged(), None)  # type: ignore[arg-type]
    return side


def saves(count: int, tokens: int = 5) -> list[Save]:
    return [save(tuple(range(n, n + tokens)), 0, tokens) for n in range(count)]


def save(ids: tuple[int, ...], begin: int, end: int, start: int = 0) -> Save:
    return Save(f"request-{ids[0]}", ids, ((1,), (2,)), begin, end, SaveJob(start))


def test_a_failed_write_is_reported_and_the_worker_continues() -> None:
    side = worker(Store())
    side.save(saves(20))
    side.close()
    written = side.saver.take_written()
    assert len(written) == 20
    assert all("Stale file handle" in why for why in written.values())


def test_a_hanging_disk_delays_no_step_and_loses_no_accepted_save() -> None:
    store = HeldUp()
    side = worker(store)
    more = saves(UNWRITTEN + 5)
    side.save(more)  # returns although no entry can be written
    assert list(side.saver.take_written().values()) == [BUSY] * 5
    store.go_on.set()
    side.close()
    assert list(side.saver.take_written().values()) == [""] * UNWRITTEN
    assert store.stats().entries == UNWRITTEN


def test_one_clients_requests_fit_the_limit_of_unwritten_saves() -> None:
    assert IN_FLIGHT <= UNWRITTEN


class Client:
    """vLLM as `Precompute` uses it: every request ends at once, with the given receipts."""

    errored = False

    def __init__(self, receipts: list[str]):
        self.receipts, self.prompts = receipts, 0

    async def generate(self, *_: Any) -> Any:
        self.prompts += 1
        yield SimpleNamespace(outputs=[SimpleNamespace(finish_reason="length")], kv_transfer_params=None)

    async def collective_rpc(self, _: str) -> list[dict[str, str]]:
        key = Entries(MemoryStore(), ModelFingerprint("0" * 32, "m"), ()).own_key((1, 2, 3))
        return [{receipt(key, False): self.receipts.pop(0)}]


@pytest.mark.parametrize(
    ("receipts", "prompts", "failed"),
    [([BUSY, BUSY, ""], 3, {}), (["disk full"], 1, {"c": "disk full"}), ([BUSY] * 8, 8, {"c": BUSY})],
)
async def test_a_save_without_room_is_retried_and_finally_reported(
    monkeypatch: pytest.MonkeyPatch, receipts: list[str], prompts: int, failed: dict[str, str]
) -> None:
    monkeypatch.setattr(asking, "_PAUSE_S", 0.0)
    entries = Entries(MemoryStore(), ModelFingerprint("0" * 32, "m"), ())
    client = Client(receipts)
    run = asking.Precompute(client, 100, map(str, itertools.count()), ())  # type: ignore[arg-type]
    report = await run.run(entries, [Chunk("c", "", (1, 2, 3))], None, ranking=False)
    assert (client.prompts, report.failed) == (prompts, failed)


async def test_hanging_storage_is_reported_and_a_late_receipt_does_not_count_for_the_next_save(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(asking, "_WRITTEN_WITHIN_S", 0.01)
    entries = Entries(MemoryStore(), ModelFingerprint("0" * 32, "m"), ())
    key = receipt(entries.own_key((1, 2, 3)), False)
    client = Client([])
    hung = asyncio.Event()

    async def never(_: str) -> Any:
        await hung.wait()

    answered = client.collective_rpc
    monkeypatch.setattr(client, "collective_rpc", never)
    run = asking.Precompute(client, 100, map(str, itertools.count()), ())  # type: ignore[arg-type]
    report = await run.run(entries, [Chunk("c", "", (1, 2, 3))], None, ranking=False)
    assert "has not written it within" in report.failed["c"]
    run._written[key] = "too late"
    client.receipts = [""]
    monkeypatch.setattr(client, "collective_rpc", answered)
    monkeypatch.setattr(asking, "_WRITTEN_WITHIN_S", 60.0)
    assert not (await run.run(entries, [Chunk("c", "", (1, 2, 3))], None, ranking=False)).failed


async def test_waiting_saves_share_one_call_to_the_workers_at_a_time() -> None:
    entries = Entries(MemoryStore(), ModelFingerprint("0" * 32, "m"), ())
    chunks = [Chunk(str(number), "", (number, number + 1)) for number in range(40)]
    written = [{receipt(entries.own_key(chunk.token_ids), False): ""} for chunk in chunks]
    waiting, most = 0, 0

    async def one_at_a_time(_: str) -> list[dict[str, str]]:
        nonlocal waiting, most
        waiting += 1
        most = max(most, waiting)
        await asyncio.sleep(0)
        waiting -= 1
        return [written.pop()]

    client = Client([])
    client.collective_rpc = one_at_a_time  # type: ignore[method-assign]
    run = asking.Precompute(client, 100, map(str, itertools.count()), ())  # type: ignore[arg-type]
    assert not (await run.run(entries, chunks, None, ranking=False)).failed
    assert most == 1 and not written


async def test_a_namespace_with_many_chunks_leaves_the_next_free_slot_to_another_namespace() -> None:
    begun: list[int] = []
    done: dict[int, asyncio.Event] = {}
    loud = Entries(MemoryStore(), ModelFingerprint("0" * 32, "m"), ())
    quiet = loud.within(Namespace("quiet"))

    class Waiting(Client):
        async def generate(self, prompt: Any, *_: Any) -> Any:
            first = prompt["prompt_token_ids"][0]
            begun.append(first)
            await done.setdefault(first, asyncio.Event()).wait()
            yield SimpleNamespace(outputs=[SimpleNamespace(finish_reason="length")], kv_transfer_params=None)

        async def collective_rpc(self, _: str) -> list[dict[str, str]]:
            await asyncio.sleep(0)
            return [{receipt(each.own_key((n, n + 1)), False): "" for each in (loud, quiet) for n in range(1000)}]

    run = asking.Precompute(Waiting([]), 100, map(str, itertools.count()), ())  # type: ignore[arg-type]

    def registering(entries: Entries, *numbers: int) -> Any:
        chunks = [Chunk(str(n), "", (n, n + 1)) for n in numbers]
        return asyncio.create_task(run.run(entries, chunks, None, ranking=False))

    async def soon(holds: Callable[[], object]) -> None:
        async with asyncio.timeout(60):
            while not holds():
                await asyncio.sleep(0)

    tasks = [registering(loud, *range(100)), registering(loud, *range(100, 200))]
    await soon(lambda: len(begun) == IN_FLIGHT)
    tasks.append(registering(quiet, 900))
    await soon(lambda: run._slots._waiters)
    done[begun[0]].set()
    await soon(lambda: len(begun) > IN_FLIGHT)
    assert begun[IN_FLIGHT] == 900
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def test_a_failed_copy_of_a_prompt_is_reported_and_other_prompts_are_saved() -> None:
    side = worker(MemoryStore())
    side.save([*saves(1, tokens=1), *saves(2)])
    side.close()
    found = sorted(side.saver.take_written().values())
    assert found[:2] == ["", ""]
    assert "out of memory" in found[2]


@pytest.mark.parametrize("passing", ["with them", "without", "never"])
def test_the_gate_runs_again_without_kernels_if_it_fails_with_them(
    monkeypatch: pytest.MonkeyPatch, passing: str
) -> None:
    paged = SimpleNamespace(kernels=None, find_kernels=lambda: "the kernels")

    def run_gate(subject: Any, codecs: Any) -> tuple[GateReport, None]:
        assert (subject, codecs) == (paged, ("int8",))
        passes = {"with them": paged.kernels is not None, "without": paged.kernels is None, "never": False}[passing]
        return GateReport(passes, "" if passes else "off by 9"), None

    monkeypatch.setattr(worker_side, "run_gate", run_gate)
    monkeypatch.setattr(worker_side, "PagedSubject", lambda paged: paged)
    monkeypatch.setattr(worker_side, "all_ranks", lambda ok: ok)
    report, _ = worker_side._gate(paged, ("int8",))  # type: ignore[arg-type]
    assert (report.passed, report.reason) == ((False, "off by 9") if passing == "never" else (True, ""))
    assert paged.kernels == ("the kernels" if passing == "with them" else None)


def test_parts_saved_in_several_steps_are_stored_as_one_entry() -> None:
    side, ids = worker(MemoryStore()), tuple(range(40, 52))
    for begin, end in ((3, 5), (5, 10), (10, 12)):
        assert not side.saver.take_written()
        side.save([save(ids, begin, end, start=3)])
    side.close()
    assert list(side.saver.take_written().values()) == [""]
    kv = side._entries.get(ids[3:], 2, 2)
    assert kv is not None
    for layer in range(2):
        assert kv.layer(layer).k[0, :, 0].tolist() == [100 * layer + position for position in range(3, 12)]


def test_a_prompt_with_a_lost_part_is_not_stored() -> None:
    store = MemoryStore()
    side, ids = worker(store), tuple(range(40, 52))
    side.save([save(ids, 3, 5, start=3)])
    side.take_finished({"request-40"})  # the request was aborted; another of this name begins in the middle
    side.save([save(ids, 5, 12, start=3)])
    side.close()
    assert "not all tokens" in next(iter(side.saver.take_written().values()))
    assert not list(store.entries())


@pytest.mark.parametrize("parts", [((4, 12),), ((3, 6), (9, 12)), ((3, 6), (3, 6), (9, 12))])
def test_a_prompt_with_gaps_between_its_parts_is_not_stored(parts: tuple[tuple[int, int], ...]) -> None:
    """The parts repeat or skip a step, as if vLLM saved it twice or never: the count of tokens may be right."""
    store = MemoryStore()
    side, ids = worker(store), tuple(range(40, 52))
    for begin, end in parts:
        side.save([save(ids, begin, end, start=3)])
    side.close()
    assert "not all tokens" in next(iter(side.saver.take_written().values()))
    assert not list(store.entries())


def test_the_default_ram_budget_is_divided_among_ranks() -> None:
    assert default_ram_budget(4) == default_ram_budget() // 4
