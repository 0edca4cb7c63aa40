"""Tests that stored KV reaches the device without needless copies; the tests count the operations that delay a GPU."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cacheblend_rag.blending import reads
from cacheblend_rag.blending.loader import LayerLoader
from cacheblend_rag.blending.plan import StoredSpan
from cacheblend_rag.blending.reads import UnusableSpanError
from cacheblend_rag.blending.rope import Rope
from cacheblend_rag.blending.transfer import Transfer, transfer_to
from cacheblend_rag.engines.entries import Entries
from cacheblend_rag.errors import DamagedKVError
from cacheblend_rag.store import DiskStore, KVStore, MemoryStore, TieredStore
from cacheblend_rag.store.codec import CodedKV
from cacheblend_rag.store.kv import ChunkKV, LayerKV, ModelFingerprint, StoredKV
from cacheblend_rag.store.kvfile import EntryFormat
from tests.device import simulated
from tests.store.samples import key_of, kv_of

pytestmark = pytest.mark.device

LAYERS, SPANS = 6, 3
TOKENS = (5, 9, 4)
ROPE = Rope((), (0,) * LAYERS, ("none",) * LAYERS)


class HostWork(TorchDispatchMode):
    """Records the processor's copies: operations on host memory only that write as many elements as a layer has."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves((args, kwargs or {}, result)) if isinstance(t, torch.Tensor)]
        on_host = not any(isinstance(t, simulated.SimulatedTensor) for t in tensors)
        written = isinstance(result, torch.Tensor) and result.is_floating_point() and result.numel() >= 2 * 4 * 4
        fresh = not any(
            alias.alias_info is not None and not alias.alias_info.is_write for alias in func._schema.arguments
        )
        if on_host and written and fresh and not simulated.is_copying():
            self.copies.append(str(func))
        return result


class Inline:
    """A thread pool that runs each task at once in the calling thread, where a test can count it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.tasks = 0

    def submit(self, task: Callable[..., Any], *args: Any) -> Future[Any]:
        done: Future[Any] = Future()
        self.tasks += 1
        try:
            done.set_result(task(*args))
        except Exception as error:
            done.set_exception(error)
        return done

    def shutdown(self, **_: Any) -> None:
        pass


class Counts:
    """The simulated device's counts since this object was made."""

    def __init__(self) -> None:
        self._begin = self._now()

    @staticmethod
    def _now() -> tuple[int, int, int]:
        return simulated.pins[0], simulated.SimulatedTensor.copies, simulated.SimulatedTensor.unpinned

    def so_far(self) -> tuple[int, int, int]:
        """Return the pins, the copies to the device, and the copies from ordinary memory."""
        pins, copies, unpinned = (now - then for now, then in zip(self._now(), self._begin, strict=True))
        return pins, copies, unpinned


def entries() -> list[ChunkKV]:
    return [kv_of(number, layers=LAYERS, tokens=tokens) for number, tokens in enumerate(TOKENS)]


def page_locked_ram(sim: str, budget: int | None = 1 << 16, codec: str = "none") -> MemoryStore:
    store = MemoryStore(budget, format=EntryFormat(codec))
    store.page_lock_for(torch.device(sim))
    for thread in threading.enumerate():
        if thread.name == "cacheblend-page-lock":
            thread.join()
    return store


def filled(store: KVStore) -> KVStore:
    for number, kv in enumerate(entries()):
        assert store.put(key_of(number), kv)
    return store


def spans_of(found: Sequence[StoredKV | None]) -> list[StoredSpan]:
    spans, at = [], 0
    for kv in found:
        assert kv is not None
        spans.append(StoredSpan(at, at + kv.num_tokens, kv))
        at += kv.num_tokens + 1
    return spans


def stored_spans(store: KVStore) -> list[StoredSpan]:
    return spans_of([store.get(key_of(number)) for number in range(SPANS)])


def load(spans: Sequence[StoredSpan], device: str) -> list[LayerKV]:
    """Load every layer, and use it on the stream that computes."""
    with LayerLoader((), spans, ROPE, LAYERS, torch.device(device)) as loader:
        placed = [loader.layer(index) for index in range(LAYERS)]
    return [LayerKV(layer.kv.k + 0, layer.kv.v + 0) for layer in placed if layer is not None]


def assert_same(got: Sequence[LayerKV], want: Sequence[LayerKV]) -> None:
    assert len(got) == len(want) == LAYERS
    for have, wanted in zip(got, want, strict=True):
        assert torch.equal(have.k.cpu(), wanted.k)
        assert torch.equal(have.v.cpu(), wanted.v)


@contextmanager
def own_stream(device: str = simulated.NAME) -> Iterator[None]:
    """Compute on a stream that is not the default one, as vLLM's workers do."""
    module = torch.get_device_module(device)
    stream = module.Stream()
    stream.wait_stream(module.current_stream())
    with module.stream(stream):
        yield


def test_copies_by_the_processor_are_counted() -> None:
    k, v = kv_of(1, tokens=9).layer(0)
    with HostWork() as host:
        torch.cat([k, k])
        k.clone()
        k[:, 1:]
        v.transpose(0, 1).contiguous()
    assert [name.split(".")[1] for name in host.copies] == ["cat", "clone", "clone"]


@pytest.mark.parametrize("codec", ["none", "int8"])
def test_a_span_in_page_locked_ram_is_loaded_by_one_copy_without_thread_pin_or_host_copy(sim: str, codec: str) -> None:
    transfer_to(torch.device(sim))
    spans = stored_spans(filled(page_locked_ram(sim, codec=codec)))
    assert [type(span.kv) for span in spans] == [ChunkKV if codec == "none" else CodedKV] * SPANS
    want = load(spans_of(entries()), "cpu")  # the codec stores these numbers exactly
    counts = Counts()
    with own_stream():
        with HostWork() as host:
            loader = LayerLoader((), spans, ROPE, LAYERS, torch.device(sim))
            assert not [thread for thread in threading.enumerate() if thread.name.startswith("cacheblend-load")]
            with loader:
                placed = [loader.layer(index) for index in range(LAYERS)]
            assert counts.so_far() == (0, LAYERS * SPANS, 0)
        assert host.copies == []
        assert_same([layer.kv for layer in placed if layer is not None], want)


@pytest.mark.parametrize("promotes", [True, False])
def test_kv_from_disk_is_read_directly_into_page_locked_memory(
    sim: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, promotes: bool
) -> None:
    transfer_to(torch.device(sim))
    monkeypatch.setattr(reads, "ThreadPoolExecutor", Inline)
    filled(DiskStore(tmp_path))
    ram = page_locked_ram(sim)
    spans = stored_spans(TieredStore([ram, DiskStore(tmp_path)]) if promotes else DiskStore(tmp_path))
    counts = Counts()
    want = load(spans_of(entries()), "cpu")
    with own_stream():
        with HostWork() as host:
            got = load(spans, sim)
            assert counts.so_far() == (0, LAYERS * SPANS, 0)
        assert host.copies == []
        assert_same(got, want)
    assert ram.stats().entries == (SPANS if promotes else 0)
    assert all(ram.get(key_of(n)).layer(i).v.is_pinned() for n in range(SPANS * promotes) for i in range(LAYERS))


def test_entries_in_ram_are_page_locked_in_their_codec_when_a_device_is_set(device: str) -> None:
    store = MemoryStore(1 << 16, format=EntryFormat("int8"))
    filled(store)
    before = store.stats().nbytes
    store.page_lock_for(torch.device(device))
    spans = stored_spans(store)
    assert all(isinstance(span.kv, CodedKV) and span.kv.held.layer(0).k.is_pinned() for span in spans)
    assert store.stats().nbytes == before
    with own_stream(device):
        assert_same(load(spans, device), load(spans_of(entries()), "cpu"))


@pytest.mark.parametrize("codecs", [("none", "int8", "int8"), ("int8", "none", "int8")])
def test_entries_of_different_codecs_are_loaded_together(device: str, codecs: tuple[str, ...]) -> None:
    stores = {codec: filled(page_locked_ram(device, codec=codec)) for codec in set(codecs)}
    with own_stream(device):
        spans = spans_of([stores[codec].get(key_of(number)) for number, codec in enumerate(codecs)])
        assert_same(load(spans, device), load(spans_of(entries()), "cpu"))


def test_concurrent_reads_and_copies_deliver_the_right_kv(device: str, tmp_path: Path) -> None:
    filled(DiskStore(tmp_path))
    want = load(spans_of(entries()), "cpu")
    for _ in range(5):
        with own_stream(device):
            assert_same(load(stored_spans(DiskStore(tmp_path)), device), want)


def test_ordinary_memory_gives_the_same_kv_and_pins_nothing(device: str) -> None:
    transfer_to(torch.device(device))
    counts = Counts()
    with own_stream(device):
        assert_same(load(spans_of(entries()), device), load(spans_of(entries()), "cpu"))
    pins, _, unpinned = counts.so_far()  # counted on the simulated device only
    assert (pins, unpinned) == (0, 0)


def test_parts_of_entries_and_a_ranks_heads_are_loaded_as_they_are_cut(device: str) -> None:
    store = filled(page_locked_ram(device))

    def spans(found: Sequence[StoredKV]) -> list[StoredSpan]:
        whole = spans_of(found)
        cut = whole[1].within(whole[1].start + 2, whole[1].end - 1)
        assert cut is not None
        return [whole[0], cut, whole[2]]

    def rank(kv: ChunkKV) -> StoredKV:
        fingerprint, ids = ModelFingerprint("0" * 32, "m"), tuple(range(kv.num_tokens))
        one = Entries(store, fingerprint, ())
        one.put(ids, kv)
        found = Entries(store, fingerprint, (), rank=1, ranks=2).get(ids, LAYERS, 1)
        assert found is not None
        return found

    heads = [ChunkKV([LayerKV(k[1:], v[1:]) for k, v in kv.layers], kv.start) for kv in entries()]
    with own_stream(device):
        stored = [store.get(key_of(number)) for number in range(SPANS)]
        assert_same(load(spans([kv for kv in stored if kv is not None]), device), load(spans(entries()), "cpu"))
        assert_same(load(spans([rank(kv) for kv in entries()]), device), load(spans(heads), "cpu"))


@pytest.mark.parametrize("layers_ahead", [2, 3])
def test_layers_loaded_ahead_onto_the_device_are_limited(
    sim: str, monkeypatch: pytest.MonkeyPatch, layers_ahead: int
) -> None:
    nbytes = sum(kv.nbytes for kv in entries()) // LAYERS
    monkeypatch.setattr(reads, "AHEAD_BYTES", layers_ahead * nbytes)
    spans = stored_spans(filled(page_locked_ram(sim)))
    counts = Counts()
    with own_stream(), LayerLoader((), spans, ROPE, LAYERS, torch.device(sim)) as loader:
        for index in range(LAYERS):
            # No layer is copied before the first request, because the engine may request all layers at once.
            assert counts.so_far()[1] == (SPANS * min(layers_ahead + index, LAYERS) if index else 0)
            assert loader.layer(index) is not None


def test_the_simulated_device_detects_a_slot_that_is_released_too_early(
    sim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reads, "AHEAD_BYTES", 0)
    monkeypatch.setattr(Transfer, "used", lambda self, slot: None)
    spans = stored_spans(filled(page_locked_ram(sim)))
    with own_stream(), pytest.raises(RuntimeError, match="still be using"):
        load(spans, sim)


def test_a_delivered_layer_does_not_change_while_later_layers_load(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reads, "AHEAD_BYTES", 0)
    spans = stored_spans(filled(page_locked_ram(device)))[:1]
    with own_stream(device):
        assert_same(load(spans, device), load(spans_of(entries()[:1]), "cpu"))


def test_an_entry_evicted_during_its_load_keeps_its_memory(device: str) -> None:
    nbytes = sum(kv.nbytes for kv in entries())
    store = page_locked_ram(device, 1 << nbytes.bit_length())
    spans = stored_spans(filled(store))
    with own_stream(device), LayerLoader((), spans, ROPE, LAYERS, torch.device(device)) as loader:
        store.evict(0)
        for number in range(10, 20):
            store.put(key_of(number), kv_of(number, layers=LAYERS, tokens=9))
        got = [layer.kv for index in range(LAYERS) if (layer := loader.layer(index)) is not None]
        assert_same(got, load(spans_of(entries()), "cpu"))


class Failing(ChunkKV):
    def __init__(self, kv: ChunkKV, error: Exception):
        super().__init__(kv.layers, kv.start)
        self._error = error

    def layer(self, index: int) -> LayerKV:
        if index == 2:
            raise self._error
        return super().layer(index)


@pytest.mark.parametrize("error", [DamagedKVError("flipped bit"), MemoryError("no memory")])
def test_a_failed_read_raises_at_its_layer_and_not_before(device: str, error: Exception) -> None:
    good = filled(page_locked_ram(device)).get(key_of(0))
    assert isinstance(good, ChunkKV)
    spans = spans_of([good, Failing(good, error)])
    with own_stream(device), LayerLoader((), spans, ROPE, LAYERS, torch.device(device)) as loader:
        assert loader.layer(0) is not None
        assert loader.layer(1) is not None
        with pytest.raises(UnusableSpanError if isinstance(error, DamagedKVError) else MemoryError):
            loader.layer(2)
    gc.collect()


def test_a_whole_load_reads_all_layers_before_the_first_is_requested(device: str, tmp_path: Path) -> None:
    spans = stored_spans(filled(DiskStore(tmp_path)))
    with own_stream(device), LayerLoader((), spans, ROPE, LAYERS, torch.device(device), whole=True) as loader:
        while not loader.ready:
            pass
        for span in spans:
            span.kv.layer = unreadable  # type: ignore[method-assign]
            span.kv.layer_in = unreadable  # type: ignore[method-assign]
        got = [layer.kv for index in range(LAYERS) if (layer := loader.layer(index)) is not None]
        assert_same(got, load(spans_of(entries()), "cpu"))


def unreadable(*_: Any) -> LayerKV:
    raise AssertionError("it was to be read by then")


def test_a_whole_load_from_ram_is_ready_at_once(device: str) -> None:
    with LayerLoader(
        (), stored_spans(filled(page_locked_ram(device))), ROPE, LAYERS, torch.device(device), whole=True
    ) as it:
        assert it.ready


def test_a_late_layer_raises_without_waiting_for_its_read(device: str) -> None:
    go_on = threading.Event()

    class Far(ChunkKV):
        def layer_in(self, index: int, take: Any) -> LayerKV:
            return self.layer(index)

        def layer(self, index: int) -> LayerKV:
            assert go_on.wait(60)
            return super().layer(index)

    first, second, *_ = entries()
    far = Far(second.layers, second.start, "far")
    with own_stream(device):
        loader = LayerLoader((), spans_of([first, far]), ROPE, LAYERS, torch.device(device), most_wait_s=0.0)
        with pytest.raises(UnusableSpanError) as late, loader:
            loader.layer(0)
        assert late.value.late
        assert [span.kv for span in late.value.spans] == [far]
    go_on.set()
