"""Encryption at rest: stored bytes reveal nothing, only genuine ones are used, and a wrong key destroys nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import hypothesis.strategies as st
import obstore.store
import pytest
import torch
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from hypothesis import given, settings

from cacheblend_rag.engines.entries import Entries
from cacheblend_rag.errors import DamagedKVError, InputError, StoreError
from cacheblend_rag.store import DiskStore, MemoryStore, TieredStore, open_store, record_tiers, recorded_tiers
from cacheblend_rag.store.files import Namespace
from cacheblend_rag.store.kv import ChunkKV, KVKey, LayerKV, ModelFingerprint, kv_key
from cacheblend_rag.store.kvfile import EntryFormat
from cacheblend_rag.store.objects import ObjectStore
from cacheblend_rag.store.source import Keyring, make_key
from tests.store.samples import encrypted_key_of, key_of, kv_of, memory_directory, ranked, same, sample_keys

KEYS = sample_keys()
OURS, THEIRS = EntryFormat(keys=KEYS), EntryFormat(keys=sample_keys(2))
ONE, TWO = (encrypted_key_of(number, KEYS) for number in (1, 2))
ACME = encrypted_key_of(1, KEYS, "acme")


@pytest.fixture
def store() -> Iterator[DiskStore]:
    with memory_directory() as root, DiskStore(root, format=OURS) as opened:
        opened.put(ONE, ranked(kv_of(1)))
        opened.put(TWO, ranked(kv_of(2)))
        yield opened


def file_of(store: DiskStore, key: KVKey) -> Path:
    (path,) = store.root.glob(f"kv/*/{key}.safetensors")
    return path


def outcome(store: DiskStore, key: KVKey, number: int) -> str:
    found = store.get(key)
    if found is None:
        return "miss"
    try:
        whole = same(found, kv_of(number))
    except DamagedKVError:
        return "damage"
    ranks = found.static_deviation()
    right = ranks is None or torch.equal(ranks, torch.tensor([1.0, 2.0, 3.0]))
    return "right" if whole and right else "wrong"


def test_nothing_of_an_encrypted_entry_can_be_read_from_its_file(store: DiskStore) -> None:
    data = file_of(store, ONE).read_bytes()
    for text in (b"safetensors", b"layer.", b"checksum", ONE.encode()):
        assert text not in data
    for layer in kv_of(1).layers:
        assert all(tensor.numpy().tobytes() not in data for tensor in layer)
    assert not list((store.root / "tmp").glob("*/*"))


def test_two_writes_of_an_entry_share_no_ciphertext(store: DiskStore) -> None:
    first = file_of(store, ONE).read_bytes()
    store.put(ONE, ranked(kv_of(1)), replace=True)
    second = file_of(store, ONE).read_bytes()
    assert len(first) == len(second)
    same_bytes = sum(a == b for a, b in zip(first[100:], second[100:], strict=True))
    assert same_bytes < len(first) * 0.05


def test_the_encrypted_format_is_as_documented(store: DiskStore) -> None:
    """Decrypt an entry with the cryptography library and docs/store.md alone."""
    data = file_of(store, ONE).read_bytes()
    assert data[:8] == b"CBSEAL\x01\n"
    salt, count = data[8:24], int.from_bytes(data[24:28], "little")
    sizes = [int.from_bytes(data[28 + 8 * i : 36 + 8 * i], "little") for i in range(count)]
    prefix, at, parts = data[: 28 + 8 * count], 28 + 8 * count, []
    key, _ = KEYS.key_of(ONE)
    own = HKDF(SHA256(), 32, salt, f"cacheblend-kv/1 entry {ONE}".encode()).derive(key)
    for number, size in enumerate(sizes):
        parts.append(AESGCM(own).decrypt(number.to_bytes(12, "little"), data[at : at + size + 16], prefix))
        at += size + 16
    assert at == len(data)
    header = json.loads(parts[0][8:])
    assert header["__metadata__"]["key"] == ONE
    assert len(parts) == 4  # these are the header, two layers and the static deviation
    assert parts[1] == b"".join(tensor.numpy().tobytes() for tensor in kv_of(1).layer(0))


@pytest.mark.slow
def test_a_changed_byte_makes_its_entry_a_miss_and_harms_no_other_entry(store: DiskStore) -> None:
    path = file_of(store, ONE)
    whole = path.read_bytes()
    ranks = len(whole) - 16 - 12  # damage to the last part loses the static deviation alone
    # Positions cover the lengths of the parts, every seventh byte of the parts, and the whole last part.
    for position in sorted({*range(100), *range(100, len(whole), 7), *range(ranks, len(whole))}):
        data = bytearray(whole)
        data[position] ^= 1 << position % 8
        path.write_bytes(data)
        result = outcome(store, ONE, 1)
        assert result == "right" if position >= ranks else result in {"miss", "damage"}, position
        if position >= ranks:
            assert store.get(ONE).static_deviation() is None
        path.parent.mkdir(exist_ok=True)
    path.write_bytes(whole)
    assert outcome(store, ONE, 1) == "right"
    assert outcome(store, TWO, 2) == "right"


@pytest.mark.parametrize("length", [0, 7, 8, 27, 28, 100, -1, -16, -17])
def test_a_shortened_entry_is_a_miss(store: DiskStore, length: int) -> None:
    path = file_of(store, ONE)
    path.write_bytes(path.read_bytes()[:length])
    assert outcome(store, ONE, 1) == "miss"
    assert outcome(store, TWO, 2) == "right"
    assert store.put(ONE, kv_of(1))
    assert outcome(store, ONE, 1) == "right"


def test_an_entry_in_the_place_of_another_is_a_miss(store: DiskStore) -> None:
    store.put(ACME, kv_of(1))
    file_of(store, ONE).write_bytes(file_of(store, TWO).read_bytes())
    assert outcome(store, ONE, 1) == "miss"
    file_of(store, TWO).write_bytes(file_of(store, ACME).read_bytes())
    assert outcome(store, TWO, 2) == "miss"


def test_swapped_layers_are_damage() -> None:
    with memory_directory() as root, DiskStore(root, format=OURS) as store:
        store.put(ONE, kv_of(1))
        path = file_of(store, ONE)
        data = path.read_bytes()
        size = kv_of(1).nbytes // 2 + 16
        path.write_bytes(data[: -2 * size] + data[-size:] + data[-2 * size : -size])
        assert outcome(store, ONE, 1) == "damage"


def test_an_unencrypted_entry_in_an_encrypted_store_is_a_miss(store: DiskStore) -> None:
    with memory_directory() as other, DiskStore(other) as plain:
        plain.put(ONE, kv_of(1))
        file_of(store, ONE).write_bytes(file_of(plain, ONE).read_bytes())
    assert outcome(store, ONE, 1) == "miss"


@pytest.mark.parametrize("form", [OURS, EntryFormat()])
def test_an_entry_encrypted_by_a_later_version_is_a_miss_and_stays(form: EntryFormat) -> None:
    bucket = obstore.store.MemoryStore()
    ObjectStore(bucket, format=OURS).put(ONE, kv_of(1))
    (path,) = (each["path"] for each in bucket.list().collect())
    data = bytearray(bytes(bucket.get(path).bytes()))
    assert data.startswith(b"CBSEAL\1")
    data[6] = 2
    bucket.put(path, bytes(data))
    store = ObjectStore(bucket, format=form)
    assert store.get(ONE) is None
    assert store.verify().unreadable == (ONE,)
    assert store.contains(ONE)


def test_a_wrong_key_finds_nothing_and_removes_nothing() -> None:
    bucket = obstore.store.MemoryStore()
    ours, theirs = (
        ObjectStore(bucket, format=OURS),
        ObjectStore(bucket, format=THEIRS),
    )
    ours.put(ONE, kv_of(1))
    assert theirs.get(ONE) is None
    assert theirs.verify().unreadable == (ONE,)
    without = ObjectStore(bucket)
    assert without.get(ONE) is None
    assert without.verify().unreadable == (ONE,)
    assert same(ours.get(ONE), kv_of(1))
    ours.close(), theirs.close(), without.close()


def test_names_of_entries_depend_on_the_encryption_key() -> None:
    model = ModelFingerprint("0" * 32, "sample")
    rings = [(ring, tenant) for ring in (KEYS, sample_keys(2)) for tenant in ("default", "acme")]
    names = {kv_key(model, [], [1], encrypted=ring.name(tenant))[:40] for ring, tenant in rings}
    assert len(names) == 4
    assert kv_key(model, [], [1])[:40] not in names


def test_a_directory_opens_only_with_its_own_keys(tmp_path: Path) -> None:
    with DiskStore(tmp_path, format=OURS) as store:
        store.put(ONE, kv_of(1))
    with pytest.raises(StoreError, match=r"is encrypted: name the directory of its keys"):
        DiskStore(tmp_path)
    with pytest.raises(StoreError, match=r"is encrypted by the key [0-9a-f]{16}, and /keys/2 holds the key"):
        DiskStore(tmp_path, format=THEIRS)
    with DiskStore(tmp_path, format=OURS) as store:
        assert same(store.get(ONE), kv_of(1))


def test_a_directory_with_plain_entries_cannot_be_opened_with_keys(tmp_path: Path) -> None:
    with DiskStore(tmp_path) as store:
        store.put(key_of(1), kv_of(1))
    with pytest.raises(StoreError, match="holds KV that is not encrypted"):
        DiskStore(tmp_path, format=OURS)
    with DiskStore(tmp_path) as store:
        assert same(store.get(key_of(1)), kv_of(1))


def test_each_encrypted_layer_takes_one_read_of_its_exact_size(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = store.get(ONE)
    reads: list[int] = []
    read = type(found.source).read
    monkeypatch.setattr(
        type(found.source), "read", lambda self, at, into: (reads.append(len(into)), read(self, at, into))
    )
    found.layer(1)
    assert reads == [kv_of(1).nbytes // 2 + 16]


@settings(max_examples=40)
@given(
    shapes=st.lists(st.tuples(*(st.integers(0, 4) for _ in range(4))), max_size=4),
    dtypes=st.lists(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), min_size=8, max_size=8),
    codec=st.sampled_from(["none", "int8"]),
    static=st.booleans(),
)
def test_every_shape_and_dtype_survives_encryption(
    shapes: list[tuple[int, int, int, int]], dtypes: list[torch.dtype], codec: str, static: bool
) -> None:
    layers = [
        LayerKV(torch.ones(heads, tokens, k).to(a), torch.ones(heads, tokens, v).to(b))
        for (heads, tokens, k, v), a, b in zip(shapes, dtypes[::2], dtypes[1::2], strict=False)
    ]
    kv = ChunkKV(layers, 3)
    kv = ranked(kv) if static else kv
    with memory_directory() as root, DiskStore(root, format=EntryFormat(codec, keys=KEYS)) as store:
        assert store.put(ONE, kv)
        found = store.get(ONE)
        assert same(found, kv)
        assert (found.static_deviation() is not None) == static


def test_a_part_too_large_for_one_call_is_encrypted_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cacheblend_rag.store.source._LARGEST_PART", 50)
    with memory_directory() as root, DiskStore(root, format=OURS) as store:
        store.put(ONE, ranked(kv_of(1, layers=3)))
        found = store.get(ONE)
        assert same(found, kv_of(1, layers=3))
        assert torch.equal(found.static_deviation(), torch.tensor([1.0, 2.0, 3.0]))


def entries_of(store: DiskStore, tenant: Namespace) -> Entries:
    return Entries(store, ModelFingerprint("0" * 32, "sample"), (9,), namespace=tenant)


def test_destroying_a_tenants_key_loses_the_kv_of_that_tenant_alone(tmp_path: Path) -> None:
    keys, root = tmp_path / "keys", tmp_path / "store"
    make_key(keys)
    acme = make_key(keys, "acme")
    with DiskStore(root, format=EntryFormat(keys=Keyring.read(keys))) as store:
        for number, name in enumerate(("default", "acme"), 1):
            assert entries_of(store, Namespace(name)).put((1, 2, 3), kv_of(number))
    acme.unlink()
    with DiskStore(root, format=EntryFormat(keys=Keyring.read(keys))) as store:
        reader = entries_of(store, Namespace(reads=("acme",)))
        assert same(reader.get((1, 2, 3), 2), kv_of(1))
        with pytest.raises(InputError, match="no key of the tenant 'acme'"):
            entries_of(store, Namespace("acme"))
        assert len(store.verify().unreadable) == 1
    make_key(keys, "acme")
    with DiskStore(root, format=EntryFormat(keys=Keyring.read(keys))) as store:
        again = entries_of(store, Namespace("acme"))
        assert again.get((1, 2, 3), 2) is None
        assert again.put((1, 2, 3), kv_of(3))
        assert same(again.get((1, 2, 3), 2), kv_of(3))
        assert store.stats().entries == 3


def test_keys_are_created_for_their_user_alone_and_never_replaced(tmp_path: Path) -> None:
    file = make_key(tmp_path / "keys")
    assert (file.name, file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == ("default.key", 0o600, 0o700)
    before = file.read_text()
    with pytest.raises(InputError, match="exists already"):
        make_key(tmp_path / "keys")
    assert file.read_text() == before
    with pytest.raises(InputError, match="cannot name a tenant"):
        make_key(tmp_path / "keys", "../acme")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"holds no default\.key"),
        ({"acme.key": "ab" * 32}, r"holds no default\.key"),
        ({"default.key": "ab" * 31}, "64 hex digits"),
        ({"default.key": "ab" * 32, "acme.key": "ab" * 32}, "the same key"),
        ({"default.key": "ab" * 32, "AC ME.key": "cd" * 32}, "cannot name a tenant"),
    ],
)
def test_unusable_keys_are_refused_with_a_reason(tmp_path: Path, files: dict[str, str], message: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text + "\n")
    with pytest.raises(InputError, match=message):
        Keyring.read(tmp_path)


def test_a_store_remembers_the_directory_of_its_keys(tmp_path: Path) -> None:
    keys, root = tmp_path / "the keys, all", tmp_path / "store"
    make_key(keys)
    record_tiers(root, "ram://1MiB,file://?budget=1MiB", keys)
    ring = Keyring.read(keys)
    key = encrypted_key_of(1, ring)
    with open_store(root) as store:
        assert store.key_name("default") == ring.name("default")
        store.put(key, kv_of(1))
    assert b"CBSEAL" in next(root.glob("kv/*/*.safetensors")).read_bytes()
    with open_store(root) as store:
        assert same(store.get(key), kv_of(1))
    with pytest.raises(InputError, match="is encrypted, and these tiers are not: add --encrypt"):
        record_tiers(root, "ram://1MiB,file://")
    assert recorded_tiers(root) == f"ram://1MiB,file://?budget=1MiB&encrypt={keys.parent}/the+keys%2C+all"


def test_keys_that_do_not_fit_the_store_are_not_recorded(tmp_path: Path) -> None:
    make_key(tmp_path / "keys")
    with DiskStore(tmp_path / "store") as store:
        store.put(key_of(1), kv_of(1))
    with pytest.raises(StoreError, match="not encrypted"):
        record_tiers(tmp_path / "store", None, tmp_path / "keys")
    assert recorded_tiers(tmp_path / "store") is None


def test_keys_inside_the_store_are_refused(tmp_path: Path) -> None:
    make_key(tmp_path / "store" / "keys")
    with pytest.raises(InputError, match="would lie in the store that they encrypt"):
        record_tiers(tmp_path / "store", None, tmp_path / "store" / "keys")


def test_tiers_with_different_keys_are_refused() -> None:
    bucket = obstore.store.MemoryStore()
    with (
        ObjectStore(bucket, format=OURS) as one,
        ObjectStore(bucket, format=THEIRS) as two,
    ):
        with pytest.raises(InputError, match="different keys"):
            TieredStore([one, two])
        assert TieredStore([MemoryStore(), one]).key_name("acme") == KEYS.name("acme")
