"""Tests that the vLLM worker saves KV from pages on a device and loads it into other pages while the device works."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed; make setup installs it")

from cacheblend_rag.blending.gate import GateReport
from cacheblend_rag.blending.loader import LayerLoader
from cacheblend_rag.blending.plan import StoredSpan
from cacheblend_rag.blending.transfer import sent
from cacheblend_rag.engines.entries import Entries
from cacheblend_rag.engines.vllm.messages import Save, SaveJob
from cacheblend_rag.engines.vllm.worker_side import WorkerSide
from cacheblend_rag.store import MemoryStore
from cacheblend_rag.store.kv import LayerKV, ModelFingerprint
from tests.device import simulated
from tests.device.test_loading import LAYERS, ROPE, Counts, page_locked_ram

pytestmark = [pytest.mark.device, pytest.mark.slow]

SLOTS, HEADS, DIM = 64, 2, 4


class Paged:
    """A paged cache on a device with one slot for each position of each sequence."""

    num_layers, kv_heads, head_dim = LAYERS, HEADS, DIM
    group_of = (0,) * LAYERS

    def __init__(self, device: str):
        self.device = torch.device(device)
        generator = torch.Generator().manual_seed(0)
        self.host = torch.randn(LAYERS, 2, HEADS, SLOTS, DIM, generator=generator)
        self.pages = self.host.to(device)

    def slots(self, group: int, pages: Any, positions: torch.Tensor) -> torch.Tensor:
        return positions + pages[group][0]

    def read(self, layer: int, slots: torch.Tensor) -> LayerKV:
        return LayerKV(*(side[:, sent(slots, self.device)] for side in self.pages[layer]))

    def write(self, layer: int, kv: LayerKV, slots: torch.Tensor) -> None:
        for side, fresh in zip(self.pages[layer], kv, strict=True):
            side[:, slots] = fresh


def worker(store: MemoryStore, paged: Paged) -> tuple[WorkerSide, Entries]:
    entries = Entries(store, ModelFingerprint("0" * 32, "m"), ())
    side = WorkerSide(entries, SimpleNamespace(), SimpleNamespace(), 100.0)  # type: ignore[arg-type]
    side.gate = GateReport(True)
    side.saver.bind(paged, ROPE)  # type: ignore[arg-type]
    return side, entries


@pytest.mark.parametrize("budget", [1 << 16, 0])
def test_saved_kv_is_right_although_its_pages_are_reused_at_once(sim: str, budget: int) -> None:
    paged = Paged(sim)
    store = page_locked_ram(sim, budget) if budget else MemoryStore()
    side, entries = worker(store, paged)
    prompts = [tuple(range(n, n + 5)) for n in (0, 10, 20)]
    stream = simulated.Stream()
    stream.wait_stream(simulated.DEFAULT)
    before = simulated.SimulatedTensor.late_fetches
    with simulated.stream(stream), torch.inference_mode():
        side.save([Save(str(ids), ids, ((ids[0],),), 0, len(ids), SaveJob(0)) for ids in prompts])
        paged.pages.zero_()  # the next step reuses the pages
    assert simulated.SimulatedTensor.late_fetches - before == (len(prompts) if budget else 0)
    side.close()
    assert list(side.saver.take_written().values()) == [""] * len(prompts)
    found = [entries.get(ids, LAYERS) for ids in prompts]
    spans = [StoredSpan(40 + 5 * i, 45 + 5 * i, kv) for i, kv in enumerate(found) if kv is not None]
    counts = Counts()
    with simulated.stream(stream), torch.inference_mode():
        with LayerLoader((), spans, ROPE, LAYERS, torch.device(sim)) as loader:
            for layer in range(LAYERS):
                placed = loader.layer(layer)
                assert placed is not None
                paged.write(layer, placed.kv, placed.positions)
        back = paged.pages.cpu()
    pins, copies, _ = counts.so_far()
    assert pins == 0
    assert copies >= LAYERS * len(prompts)
    for ids, span in zip(prompts, spans, strict=True):
        assert torch.equal(back[:, :, :, span.start : span.end], paged.host[:, :, :, ids[0] : ids[0] + 5])


def test_the_slots_of_a_prompt_are_sent_once_for_all_layers(sim: str, monkeypatch: pytest.MonkeyPatch) -> None:
    side, _ = worker(page_locked_ram(sim, 1 << 16), Paged(sim))
    copied: list[torch.Size] = []
    copy = simulated._copy

    def seen(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if source.device.type == "cpu":
            copied.append(source.shape)
        return copy(target, source, non_blocking)

    monkeypatch.setattr(simulated, "_copy", seen)
    with torch.inference_mode():
        side.save([Save("1", (0, 1, 2, 3, 4), ((0,),), 0, 5, SaveJob(0))])
    assert copied == [torch.Size([5])]
    side.close()
