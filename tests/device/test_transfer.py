"""Copies to a device arrive in time, on whatever stream they are used; and the simulated device notices if they do not."""

from __future__ import annotations

import pytest
import torch

from cacheblend_rag.blending.transfer import Transfer, transfer_to
from cacheblend_rag.store.kv import LayerKV
from tests.device import simulated

pytestmark = pytest.mark.device


def host_kv() -> LayerKV:
    return LayerKV(torch.arange(24.0).reshape(2, 3, 4), torch.arange(24.0, 48.0).reshape(2, 3, 4))


def test_a_copy_is_right_once_it_is_waited_for_and_not_before(sim: str) -> None:
    transfer = Transfer(torch.device(sim))
    kv = host_kv()
    copy, ready = transfer.start(kv)
    assert copy.k.raw.isnan().all()
    transfer.wait(copy, ready)
    assert torch.equal(copy.k.cpu(), kv.k)
    assert torch.equal(copy.v.cpu(), kv.v)


def test_a_copy_may_be_used_on_the_stream_that_waited_for_it(sim: str) -> None:
    transfer = Transfer(torch.device(sim))
    own, other = simulated.Stream(), simulated.Stream()
    with simulated.stream(own):
        copy, ready = transfer.start(host_kv())
        transfer.wait(copy, ready)
        assert float((copy.k + 1).sum()) == 276 + 24
    with simulated.stream(other), pytest.raises(RuntimeError, match="record_stream"):
        copy.k + 1


def test_two_copies_in_flight_do_not_mix(sim: str) -> None:
    transfer = Transfer(torch.device(sim))
    first, second = host_kv(), LayerKV(*(tensor * 2 for tensor in host_kv()))
    started = [transfer.start(kv) for kv in (first, second)]
    for kv, (copy, ready) in reversed(list(zip((first, second), started, strict=True))):
        transfer.wait(copy, ready)
        assert torch.equal(copy.k.cpu(), kv.k)


def test_one_transfer_serves_a_device_and_a_cpu_needs_none(sim: str) -> None:
    assert transfer_to(torch.device(sim)) is transfer_to(torch.device(sim))
    assert transfer_to(torch.device("cpu")) is None


def test_the_simulated_device_refuses_what_cuda_refuses(sim: str) -> None:
    here, there = torch.ones(3), torch.ones(3, device=sim)
    with pytest.raises(RuntimeError, match="same device"):
        here + there
    with pytest.raises(RuntimeError, match="same device"):
        there.index_copy_(0, torch.tensor([0]), there[:1])
    with pytest.raises(RuntimeError, match="only dense CPU"):
        there.pin_memory()
    assert (there * 2 + torch.tensor(1.0)).tolist() == [3.0] * 3  # a single number may come from the CPU
    assert there[torch.tensor([0, 2])].tolist() == [1.0, 1.0]  # and so may indices


def test_views_on_the_simulated_device_share_memory(sim: str) -> None:
    whole = torch.zeros(2, 3, device=sim)
    whole.transpose(0, 1)[1] = 5.0
    assert whole.tolist() == [[0.0, 5.0, 0.0]] * 2
    assert not whole.transpose(0, 1).is_contiguous()
