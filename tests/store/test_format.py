"""Tests the file of an entry: other tools can read it, and every change to it is detected."""

from __future__ import annotations

import json
import os
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from safetensors import safe_open

from cacheblend_rag.errors import DamagedKVError, InputError
from cacheblend_rag.store import DiskStore, TieredStore
from cacheblend_rag.store.kv import ChunkKV, LayerKV
from cacheblend_rag.store.memory import MemoryStore
from tests.store.samples import key_of, kv_of, memory_directory, ranked, same, sign

FAULTS = 300
NEIGHBOUR = 2


@pytest.fixture
def store() -> Iterator[DiskStore]:
    with memory_directory() as root:
        opened = DiskStore(root)
        opened.put(key_of(1), kv_of(1))
        opened.put(key_of(NEIGHBOUR), kv_of(NEIGHBOUR))
        yield opened
        opened.close()


def file_of(store: DiskStore, number: int) -> Path:
    (path,) = store.root.glob(f"kv/*/{key_of(number)}.safetensors")
    return path


def outcome(store: DiskStore, number: int) -> str:
    """Read an entry whole and return the result: a miss, damage, or right or wrong tensors."""
    found = store.get(key_of(number))
    if found is None:
        return "miss"
    try:
        return "right" if same(found, kv_of(number)) else "wrong"
    except DamagedKVError:
        return "damage"


def test_the_safetensors_library_reads_the_file_layer_by_layer(store: DiskStore) -> None:
    kv = kv_of(1)
    with safe_open(file_of(store, 1), framework="pt") as file:
        assert list(file.offset_keys()) == [f"layer.{index:05d}.{name}" for index in range(2) for name in "kv"]
        assert torch.equal(file.get_tensor("layer.00001.v"), kv.layer(1).v)
        assert file.metadata()["key"] == key_of(1)


@settings(max_examples=60)
@given(
    shapes=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(0, 5), st.integers(0, 5)), min_size=0, max_size=4
    ),
    dtypes=st.lists(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), min_size=4, max_size=4),
    start=st.integers(0, 10**9),
)
def test_every_shape_and_dtype_survives_the_disk(
    shapes: list[tuple[int, int, int, int]], dtypes: list[torch.dtype], start: int
) -> None:
    kv = ChunkKV(
        [
            LayerKV(torch.randn(heads, tokens, k).to(dtype), torch.randn(heads, tokens, v).to(dtype))
            for (heads, tokens, k, v), dtype in zip(shapes, dtypes, strict=False)
        ],
        start,
    )
    with memory_directory() as root:
        store = DiskStore(root)
        assert store.put(key_of(1), kv)
        found = store.get(key_of(1))
        assert found is not None
        assert same(found, kv)


def test_a_dtype_without_a_name_in_the_format_is_refused(store: DiskStore) -> None:
    layer = LayerKV(torch.zeros(1, 1, 1, dtype=torch.complex64), torch.zeros(1, 1, 1))
    with pytest.raises(InputError, match="complex64"):
        store.put(key_of(3), ChunkKV([layer], 0))


def flip_a_bit(data: bytearray, chance: random.Random) -> None:
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def truncate(data: bytearray, chance: random.Random) -> None:
    del data[chance.randrange(len(data)) :]


def append(data: bytearray, chance: random.Random) -> None:
    data += chance.randbytes(chance.randrange(1, 50))


def zero_a_block(data: bytearray, chance: random.Random) -> None:
    begin = chance.randrange(len(data))
    end = min(len(data), begin + 64)
    data[begin:end] = bytes(end - begin)


def swap_blocks(data: bytearray, chance: random.Random) -> None:
    a, b = chance.randrange(len(data) - 8), chance.randrange(len(data) - 8)
    data[a : a + 8], data[b : b + 8] = data[b : b + 8], data[a : a + 8]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "times"),
    [(flip_a_bit, FAULTS), (truncate, FAULTS), (append, 30), (zero_a_block, 60), (swap_blocks, 60)],
)
def test_no_damage_gives_a_wrong_tensor(
    store: DiskStore, damage: Callable[[bytearray, random.Random], None], times: int
) -> None:
    chance = random.Random(times)
    path = file_of(store, 1)
    whole = path.read_bytes()
    for _ in range(times):
        data = bytearray(whole)
        damage(data, chance)
        path.write_bytes(data)
        result = outcome(store, 1)
        if data == whole:
            assert result == "right"
            continue
        assert result in {"miss", "damage"}
        assert not store.contains(key_of(1))
        assert store.put(key_of(1), kv_of(1))
        assert outcome(store, 1) == "right"
    assert outcome(store, NEIGHBOUR) == "right"
    assert store.verify().damaged == ()


def test_damage_to_any_bit_of_the_header_is_detected(store: DiskStore) -> None:
    path = file_of(store, 1)
    whole = path.read_bytes()
    data_bytes = kv_of(1).nbytes
    for position in range(len(whole) - data_bytes):
        data = bytearray(whole)
        data[position] ^= 1
        path.write_bytes(data)
        assert outcome(store, 1) in {"miss", "damage"}, position


@pytest.mark.parametrize(
    ("there", "instead"),
    [(b'"BF16"', b'"F16" '), (b'"shape":[2,3,4]', b'"shape":[4,3,2]'), (b"[2,3,8]", b"[3,2,8]")],
)
def test_the_checksum_of_a_layer_covers_its_dtype_and_shape(store: DiskStore, there: bytes, instead: bytes) -> None:
    store.put(key_of(1), kv_of(1, dtype=torch.bfloat16), replace=True)
    path = file_of(store, 1)
    assert there in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(there, instead, 1))
    found = store.get(key_of(1))
    with pytest.raises(DamagedKVError, match="checksum"):
        [found.layer(index) for index in range(2)]


def test_a_file_longer_than_its_header_declares_is_a_miss(store: DiskStore) -> None:
    path = file_of(store, 1)
    path.write_bytes(path.read_bytes() + b"\0")
    assert outcome(store, 1) == "miss"


def test_a_static_deviation_of_a_different_length_is_ignored(store: DiskStore) -> None:
    store.put(key_of(1), ChunkKV(kv_of(1).layers, 1, static=torch.arange(2.0)), replace=True)
    assert store.get(key_of(1)).static_deviation() is None


def test_a_file_of_another_key_is_a_miss(store: DiskStore) -> None:
    file_of(store, 1).write_bytes(file_of(store, NEIGHBOUR).read_bytes())
    assert outcome(store, 1) == "miss"
    assert outcome(store, NEIGHBOUR) == "right"


@pytest.mark.parametrize("content", [b"", b"\0" * 7, b"\xff" * 64, b"\x02" + b"\0" * 7 + b"[]", os.urandom(500)])
def test_a_foreign_file_is_a_miss_and_is_replaced(store: DiskStore, content: bytes) -> None:
    file_of(store, 1).write_bytes(content)
    assert outcome(store, 1) == "miss"
    assert store.put(key_of(1), kv_of(1))
    assert outcome(store, 1) == "right"


def test_damage_is_reported_for_the_damaged_layer(store: DiskStore) -> None:
    path = file_of(store, 1)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    found = store.get(key_of(1))
    assert found is not None
    assert torch.equal(found.layer(0).k, kv_of(1).layer(0).k)
    with pytest.raises(DamagedKVError, match="layer 1"):
        found.layer(1)
    assert store.stats().damaged == 1
    assert not store.contains(key_of(1))


def test_a_late_reader_of_a_damaged_entry_does_not_remove_its_replacement(store: DiskStore) -> None:
    path = file_of(store, 1)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    early, late = store.get(key_of(1)), store.get(key_of(1))
    assert early is not None
    assert late is not None
    with pytest.raises(DamagedKVError):
        early.layer(1)
    assert store.put(key_of(1), kv_of(1))
    with pytest.raises(DamagedKVError):
        late.layer(1)
    assert outcome(store, 1) == "right"


def test_a_file_truncated_under_a_reader_is_damage_and_no_crash(store: DiskStore) -> None:
    found = store.get(key_of(1))
    assert found is not None
    with file_of(store, 1).open("r+b") as file:
        file.truncate(100)
    with pytest.raises(DamagedKVError):
        found.layer(0)


def test_verify_reports_damage_and_removes_it_unless_repair_is_off(store: DiskStore) -> None:
    path = file_of(store, 1)
    path.write_bytes(path.read_bytes()[:-1])
    assert store.verify(repair=False).damaged == (key_of(1),)
    assert path.exists()
    report = store.verify()
    assert (report.checked, report.damaged) == (2, (key_of(1),))
    assert store.verify().checked == 1


def test_damage_on_disk_is_not_promoted(store: DiskStore) -> None:
    path = file_of(store, 1)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    tiered = TieredStore([MemoryStore(), store])
    found = tiered.get(key_of(1))
    assert found is not None
    with pytest.raises(DamagedKVError):
        same(found, kv_of(1))
    assert tiered.get(key_of(1)) is None
    assert tiered.stats().damaged == 1


def test_damage_to_the_static_deviation_loses_only_the_rank(store: DiskStore) -> None:
    store.put(key_of(1), ranked(kv_of(1)), replace=True)
    path = file_of(store, 1)
    whole = path.read_bytes()
    at = whole.rfind(torch.tensor([1.0, 2.0, 3.0]).numpy().tobytes())
    for offset in range(12):
        damaged = bytearray(whole)
        damaged[at + offset] ^= 1 << offset % 8
        path.write_bytes(damaged)
        found = store.get(key_of(1))
        assert found.static_deviation() is None
        assert same(found, kv_of(1))
    assert store.verify(repair=False).damaged == (key_of(1),)


def forge(store: DiskStore, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the header of entry 1, and make its checksums fit."""
    path = file_of(store, 1)
    whole = path.read_bytes()
    (length,) = struct.unpack_from("<Q", whole)
    header = json.loads(whole[8 : 8 + length])
    change(header)
    sign(header, whole[8 + length :])
    made = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(made)) + made + whole[8 + length :])


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header.update({"layer.00000.q": header.pop("layer.00000.k")}),
        lambda header: header.update({"layer.00000.q": header["layer.00000.k"]}),
        lambda header: header["layer.00000.k"].update(shape=[0, 2**62, 2**62], data_offsets=[0, 0]),
    ],
)
def test_a_layer_with_wrong_tensors_is_damage_even_with_good_checksums(
    store: DiskStore, change: Callable[[dict[str, Any]], None]
) -> None:
    forge(store, change)
    assert outcome(store, 1) in {"miss", "damage"}
    assert outcome(store, NEIGHBOUR) == "right"


@pytest.mark.parametrize("name", ["layers", "tokens", "start", "nbytes"])
@pytest.mark.parametrize("value", [float("inf"), float("nan"), None, [], "", "9" * 5000])
def test_a_count_that_is_not_a_number_is_a_miss_even_with_good_checksums(
    store: DiskStore, name: str, value: object
) -> None:
    forge(store, lambda header: header["__metadata__"].update({name: value}))
    assert outcome(store, 1) == "miss"
