"""Tests that copies to and from a device arrive in time on any stream, and that the simulated device detects if not."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from cacheblend_rag.blending import transfer as module
from cacheblend_rag.blending.transfer import BUFFER_BYTES, Fetch, Slot, Transfer, fetch, sent, transfer_to
from cacheblend_rag.store.kv import LayerKV, packed, plain
from cacheblend_rag.store.memory import PageLockedMemory
from tests.device import simulated

pytestmark = pytest.mark.device

TOKENS = 3


def host_kv(factor: int = 1) -> LayerKV:
    return LayerKV(factor * torch.arange(24.0).reshape(2, 3, 4), factor * torch.arange(24.0, 48.0).reshape(2, 3, 4))


def pinned(sim: str, layer: LayerKV) -> LayerKV:
    memory = PageLockedMemory(torch.device(sim), 1 << 16)
    assert memory.grow(1 << 12)
    (copy,) = packed([layer], memory.take)
    assert copy.k.is_pinned()
    return copy


@pytest.fixture
def transfer(sim: str) -> Transfer:
    return Transfer(torch.device(sim))


def test_a_copy_is_complete_only_after_a_wait(sim: str, transfer: Transfer) -> None:
    kv = pinned(sim, host_kv())
    staged = transfer.stage(Slot(), [kv], TOKENS)
    (part,) = staged.parts
    assert part.k.raw.isnan().all()
    transfer.wait(staged)
    assert torch.equal(part.k.cpu(), kv.k)
    assert torch.equal(part.v.cpu(), kv.v)


@pytest.mark.parametrize("pin", [True, False])
def test_copies_in_flight_do_not_mix(sim: str, transfer: Transfer, pin: bool) -> None:
    layers = [host_kv(factor) for factor in range(1, 20)]  # more layers than buffers
    staged = [transfer.stage(Slot(), [pinned(sim, kv) if pin else kv], TOKENS) for kv in layers]
    for kv, copy in reversed(list(zip(layers, staged, strict=True))):
        transfer.wait(copy)
        assert torch.equal(copy.parts[0].k.cpu(), kv.k)
        assert torch.equal(copy.parts[0].v.cpu(), kv.v)


def test_page_locked_kv_is_copied_without_a_buffer_in_one_copy_a_layer(sim: str, transfer: Transfer) -> None:
    layers = [pinned(sim, host_kv(factor)) for factor in (1, 2)]
    before = simulated.pins[0], simulated.SimulatedTensor.copies, simulated.SimulatedTensor.unpinned
    transfer.stage(Slot(), layers, 2 * TOKENS)
    copies = simulated.SimulatedTensor.copies - before[1]
    assert (simulated.pins[0], copies, simulated.SimulatedTensor.unpinned) == (before[0], 2, before[2])


def test_kv_in_ordinary_memory_passes_through_buffers_of_bounded_size(sim: str, transfer: Transfer) -> None:
    k, v = torch.randn(2, 1, BUFFER_BYTES // 4, 1).unbind()
    before = simulated.pins[0], simulated.SimulatedTensor.unpinned
    staged = transfer.stage(Slot(), [LayerKV(k, v)], k.shape[1])
    transfer.wait(staged)
    assert torch.equal(staged.parts[0].v.cpu(), v)
    assert (simulated.pins[0], simulated.SimulatedTensor.unpinned) == before


def test_one_buffer_is_enough_for_any_number_of_spans(sim: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BUFFERS", 1)
    transfer = Transfer(torch.device(sim))

    def wait_in_vain(_: float) -> None:
        raise AssertionError("a span keeps the only buffer")

    def read() -> Iterator[LayerKV]:
        for factor in (1, 2, 3):
            yield packed([host_kv(factor)], transfer.buffer)[0]

    monkeypatch.setattr(module.time, "sleep", wait_in_vain)
    staged = transfer.stage(Slot(), read(), 3 * TOKENS)
    transfer.wait(staged)
    assert [float(part.k.sum()) for part in staged.parts] == [276.0, 552.0, 828.0]


def test_copies_are_right_if_no_memory_can_be_pinned(sim: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PageLockedMemory, "grow", lambda self, nbytes: False)
    transfer = Transfer(torch.device(sim))
    staged = transfer.stage(Slot(), [host_kv()], TOKENS)
    transfer.wait(staged)
    assert torch.equal(staged.parts[0].v.cpu(), host_kv().v)
    assert len(transfer.buffer(100)) == 100


def test_the_source_memory_of_a_late_copy_is_not_reused_before_it_arrives(sim: str, transfer: Transfer) -> None:
    memory = PageLockedMemory(torch.device(sim))
    memory.limit = 512
    assert memory.grow(512)
    (kv,) = packed([host_kv()], memory.take)
    staged = transfer.stage(Slot(), [kv], TOKENS)
    del kv
    assert memory.take(192) is None
    transfer.wait(staged)
    assert torch.equal(staged.parts[0].v.cpu(), host_kv().v)
    transfer.stage(Slot(), [host_kv()], TOKENS)  # releases the sources of earlier copies
    assert memory.take(192) is not None


def test_only_the_stream_that_waited_for_a_copy_may_use_it(transfer: Transfer) -> None:
    own, other = simulated.Stream(), simulated.Stream()
    with simulated.stream(own):
        staged = transfer.stage(Slot(), [host_kv()], TOKENS)
        transfer.wait(staged)
        (part,) = staged.parts
        assert float((part.k + 1).sum()) == 276 + 24
    with simulated.stream(other), pytest.raises(RuntimeError, match="record_stream"):
        part.k + 1


def test_a_slot_is_overwritten_only_behind_its_last_use(sim: str, transfer: Transfer) -> None:
    slot = Slot()
    with simulated.stream(simulated.Stream()):
        for factor in (1, 2, 3):
            kv = pinned(sim, host_kv(factor))
            staged = transfer.stage(slot, [kv], TOKENS)
            transfer.wait(staged)
            total = staged.parts[0].v + staged.parts[0].v
            if factor < 3:
                transfer.used(slot)
            assert torch.equal(total.cpu(), 2 * kv.v)
        staged.parts[0].v + 1  # a use without a call of `used`
        with pytest.raises(RuntimeError, match="still be using"):
            transfer.stage(slot, [pinned(sim, host_kv())], TOKENS)


@pytest.mark.parametrize("room", [True, False])
def test_layers_are_fetched_to_the_host_by_one_late_copy(sim: str, room: bool) -> None:
    memory = PageLockedMemory(torch.device(sim), 1 << 12)
    assert memory.grow(1 << 12)
    want = [host_kv(1), host_kv(2)]
    layers = [LayerKV(*(tensor.to(sim) for tensor in layer)) for layer in want]
    with simulated.stream(simulated.Stream()):
        simulated.current_stream().wait_stream(simulated.DEFAULT)
        arrive = fetch(layers, memory.take if room else lambda nbytes: None)
        for layer in layers:
            layer.k.zero_()  # the caller's stream continues
    got = arrive()
    for have, wanted in zip(got, want, strict=True):
        assert torch.equal(have.k, wanted.k)
        assert torch.equal(have.v, wanted.v)
    storages = {tensor.untyped_storage().data_ptr() for layer in got for tensor in layer}
    assert len(storages) == 1
    assert memory.holds(got[0].k) == room


def test_fetched_kv_is_not_in_its_memory_before_it_arrives(sim: str) -> None:
    memory = PageLockedMemory(torch.device(sim), 1 << 12)
    assert memory.grow(1 << 12)
    block = memory.take(192)
    arrive = fetch([LayerKV(*(tensor.to(sim) for tensor in host_kv()))], lambda nbytes: block)
    assert block.view(torch.float32).isnan().all()
    assert torch.equal(arrive()[0].v, host_kv().v)
    assert torch.equal(block.view(torch.float32), torch.arange(48.0))


def test_layers_on_a_cpu_are_packed_when_they_are_requested() -> None:
    (got,) = fetch([host_kv()], plain)()
    assert torch.equal(got.k, host_kv().k)
    assert got.k.untyped_storage().data_ptr() == got.v.untyped_storage().data_ptr()


def test_a_device_has_one_transfer_and_a_cpu_has_none(sim: str) -> None:
    assert transfer_to(torch.device(sim)) is transfer_to(torch.device(sim, 0))
    assert transfer_to(torch.device("cpu")) is None


def test_the_simulated_device_refuses_what_cuda_refuses(sim: str) -> None:
    here, there = torch.ones(3), torch.ones(3, device=sim)
    with pytest.raises(RuntimeError, match="same device"):
        here + there
    with pytest.raises(RuntimeError, match="same device"):
        there.index_copy_(0, torch.tensor([0]), there[:1])
    with pytest.raises(RuntimeError, match="only dense CPU"):
        there.pin_memory()
    assert (there * 2 + torch.tensor(1.0)).tolist() == [3.0] * 3  # a single number on the CPU is allowed
    assert there[torch.tensor([0, 2])].tolist() == [1.0, 1.0]  # indices on the CPU are allowed


def test_views_on_the_simulated_device_share_memory(sim: str) -> None:
    whole = torch.zeros(2, 3, device=sim)
    whole.transpose(0, 1)[1] = 5.0
    assert whole.tolist() == [[0.0, 5.0, 0.0]] * 2
    assert not whole.transpose(0, 1).is_contiguous()


def test_a_late_copy_on_the_default_stream_arrives_only_after_a_wait(sim: str) -> None:
    values, there = torch.arange(4.0).to(sim), torch.zeros(4).pin_memory()
    there.copy_(values, non_blocking=True)
    assert there.isnan().all()
    behind = simulated.Event()
    behind.record()
    behind.synchronize()
    assert torch.equal(there, torch.arange(4.0))


def test_a_fetch_without_a_wait_reads_nan(sim: str) -> None:
    fetched = module.Fetch(torch.arange(4.0).to(sim))
    fetched._arrived = None  # the fault
    assert fetched.result().isnan().all()


def test_a_late_copy_takes_the_values_of_its_source_at_its_arrival(sim: str) -> None:
    source, values = torch.ones(4).pin_memory(), torch.empty(4, device=sim)
    values.copy_(source, non_blocking=True)
    source.fill_(9.0)  # the fault
    assert values.cpu().tolist() == [9.0] * 4


def waited(copy: Callable[[], object]) -> int:
    before = simulated.SimulatedTensor.waits
    copy()
    return simulated.SimulatedTensor.waits - before


def test_the_simulated_device_waits_for_ordinary_memory_as_cuda_does(sim: str) -> None:
    few, many = (torch.zeros(count, dtype=torch.uint8) for count in (simulated.LARGE, simulated.LARGE + 1))
    here = torch.zeros(4, device=sim)
    assert waited(lambda: few.to(sim, non_blocking=True)) == 0
    assert waited(lambda: few.to(sim)) == 1
    assert waited(lambda: many.to(sim, non_blocking=True)) == 1
    assert waited(lambda: many.pin_memory().to(sim, non_blocking=True)) == 0
    assert waited(lambda: torch.empty(4).copy_(here, non_blocking=True)) == 1


@pytest.mark.parametrize("count", [3, 20_000])
def test_sends_and_fetches_of_any_size_do_not_wait(sim: str, count: int) -> None:
    values = torch.arange(count)
    there: list[torch.Tensor] = []
    assert waited(lambda: there.append(sent(values, torch.device(sim)))) == 0
    back: list[Fetch] = []
    assert waited(lambda: back.append(Fetch(there[0]))) == 0
    assert torch.equal(back[0].result(), values)


def test_sends_and_fetches_are_right_if_no_memory_can_be_pinned(sim: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.Tensor, "pin_memory", refuse)
    values = torch.arange(20_000)
    there = sent(values, torch.device(sim))
    assert torch.equal(Fetch(there).result(), values)
