"""Tests that damaged and forged files of a store give a miss or an error with a message, never a crash."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from cacheblend_rag.errors import DamagedKVError, StoreError
from cacheblend_rag.retrieval.documents import INDEX_FILE as INDEX
from cacheblend_rag.retrieval.documents import REGISTERED_FILE as REGISTERED
from cacheblend_rag.retrieval.embedding import Embedder
from cacheblend_rag.retrieval.index import ChunkIndex
from cacheblend_rag.retrieval.registered import RegisteredChunks
from cacheblend_rag.store import DiskStore
from cacheblend_rag.store.kv import KVKey
from cacheblend_rag.store.kvfile import EntryFormat
from cacheblend_rag.store.source import Keyring
from tests.fuzz import examples
from tests.retrieval.index_workers import CONFIG, chunk, load
from tests.store.samples import encrypted_key_of, key_of, kv_of, memory_directory, ranked, same, sample_keys, sign

pytestmark = pytest.mark.slow

KEYS = sample_keys()
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
NUMBERS = st.one_of(
    st.integers(-2, 200), st.sampled_from([2**31, 2**63 - 1, 2**63, 2**64, 10**30]), st.floats(), st.booleans(), JSON
)
SHAPES = st.lists(NUMBERS, max_size=5) | JSON


@st.composite
def damage(draw: st.DrawFn, data: bytes) -> bytes:
    """Draw bytes that were changed, cut, doubled, exchanged or zeroed in up to four places."""
    found = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        begin = draw(st.integers(0, len(found)))
        end = min(len(found), begin + draw(st.integers(0, 5000)))
        kind = draw(st.sampled_from(["set", "cut", "insert", "zero", "swap", "end"]))
        if kind == "set":
            found[begin:end] = draw(st.binary(max_size=40))
        elif kind == "cut":
            del found[begin:end]
        elif kind == "insert":
            found[begin:begin] = found[begin:end]
        elif kind == "zero":
            found[begin:end] = bytes(end - begin)
        elif kind == "swap":
            found[begin:end], found[: end - begin] = found[: end - begin], found[begin:end]
        else:
            del found[begin:]
    return bytes(found)


def outcome(store: DiskStore, key: KVKey, number: int) -> str:
    found = store.get(key)
    if found is None:
        return "miss"
    try:
        found.static_deviation()
        return "right" if same(found, kv_of(number)) else "wrong"
    except DamagedKVError:
        return "damage"


def with_file(data: st.DataObject, keys: Keyring | None) -> None:
    one, two = (key_of(1), key_of(2)) if keys is None else (encrypted_key_of(1, keys), encrypted_key_of(2, keys))
    with memory_directory() as root, DiskStore(root, format=EntryFormat(keys=keys)) as store:
        for number, key in enumerate((one, two), 1):
            store.put(key, ranked(kv_of(number)))
        (path,) = root.glob(f"kv/*/{one}.safetensors")
        whole = path.read_bytes()
        broken = data.draw(damage(whole))
        path.write_bytes(broken)
        assert outcome(store, one, 1) in {"miss", "damage", "right"}
        if path.exists():
            store.verify()
        assert outcome(store, two, 2) == "right"


@examples(60)
@given(data=st.data())
def test_a_damaged_entry_never_gives_wrong_kv(data: st.DataObject) -> None:
    with_file(data, None)


@examples(40)
@given(data=st.data())
def test_a_damaged_encrypted_entry_never_gives_wrong_kv(data: st.DataObject) -> None:
    with_file(data, KEYS)


@examples(80)
@given(data=st.data())
def test_a_nonsense_header_with_valid_checksums_does_not_crash_the_store(data: st.DataObject) -> None:
    key = key_of(1)
    with memory_directory() as root, DiskStore(root) as store:
        store.put(key, ranked(kv_of(1)))
        (path,) = root.glob(f"kv/*/{key}.safetensors")
        whole = path.read_bytes()
        (length,) = struct.unpack_from("<Q", whole)
        header: dict[str, Any] = json.loads(whole[8 : 8 + length])
        metadata = header["__metadata__"]
        for _ in range(data.draw(st.integers(1, 3))):
            name = data.draw(st.sampled_from(sorted(header)))
            if name == "__metadata__":
                metadata[data.draw(st.sampled_from(sorted(metadata)))] = data.draw(JSON | st.integers().map(str))
            elif data.draw(st.booleans()):
                part = data.draw(st.sampled_from(["dtype", "shape", "data_offsets"]))
                values = {"dtype": st.sampled_from(["F16", "F64", "U8", "C64", 3, None]), "shape": SHAPES}
                header[name] = {**header[name], part: data.draw(values.get(part, SHAPES))}
            else:
                new = data.draw(st.sampled_from(["layer.00000.q", "layer.00009.k", "layer", "static", "k"]) | st.text())
                header[new] = header.pop(name) if data.draw(st.booleans()) else header[name]
        sign(header, whole[8 + length :])
        made = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(made)) + made + whole[8 + length :])
        assert outcome(store, key, 1) in {"miss", "damage", "right", "wrong"}  # the store trusts forged checksums
        store.verify()


@examples(60)
@given(data=st.data())
def test_a_damaged_file_of_registered_chunks_raises_only_store_errors(data: st.DataObject) -> None:
    kept = [chunk(f"text {number}", "/a", number) for number in range(30)]
    with memory_directory() as root:
        RegisteredChunks(root, "one").add(kept)
        file = root / REGISTERED
        file.write_bytes(data.draw(damage(file.read_bytes())))
        try:
            opened = RegisteredChunks(root, "one")
            assert all(found in kept for found in opened.named_after("", 100))
            opened.signatures_after(0)
            opened.known([each.id for each in kept])
            opened.add(kept[:1])
        except StoreError as error:
            assert str(file) in str(error)


@pytest.fixture
def index_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    monkeypatch.setattr(Embedder, "load", load)
    with ChunkIndex(tmp_path, CONFIG) as index:
        index.add("/a", "digest", [chunk(f"words number {number}", "/a", number) for number in range(20)])
    return (tmp_path / INDEX).read_bytes()


@examples(60)
@given(data=st.data())
def test_a_damaged_index_raises_only_store_errors(index_file: bytes, data: st.DataObject) -> None:
    with memory_directory() as root:
        file = root / INDEX
        file.write_bytes(data.draw(damage(index_file)))
        try:
            with ChunkIndex(root) as opened:
                opened.stats()
                opened.documents()
                list(opened.chunks())
                opened.digest_of("/a")
                opened.known(["a"])
        except StoreError as error:
            assert str(Path(root)) in str(error)
