"""Codecs store KV in fewer bytes: tests bound the error, show that it never grows, and list the exact parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given, settings
from safetensors import safe_open
from safetensors.torch import load_file

from cacheblend_rag.errors import DamagedKVError, InputError
from cacheblend_rag.store import DiskStore, KVStore, MemoryStore, TieredStore, open_store
from cacheblend_rag.store.codec import CodedKV, get_codec, numbers, through
from cacheblend_rag.store.kv import ChunkKV, LayerKV, flat, plain, read_whole
from cacheblend_rag.store.kvfile import EntryFormat
from cacheblend_rag.store.opening import parse_tiers
from tests.store.samples import key_of, kv_of, same

ALL = ["none", "int8"]
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def stored(codec: str, layer: LayerKV) -> dict[str, torch.Tensor]:
    return {name: tensor.contiguous() for name, tensor in get_codec(codec).encode(layer).items()}


def decoded(codec: str, tensors: dict[str, torch.Tensor]) -> LayerKV:
    return get_codec(codec).decode(tensors, plain)


@st.composite
def tensors(draw: Any, dtype: torch.dtype) -> torch.Tensor:
    """Draw ``[kv_heads, tokens, head_dim]`` with every power of two of the dtype, 0, and groups of very different
    sizes."""
    shape = draw(st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 9)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    info = torch.finfo(dtype)
    lowest = int(torch.tensor(info.tiny, dtype=torch.float64).log2()) - 12
    highest = int(torch.tensor(info.max, dtype=torch.float64).log2()) - 1
    around = torch.randint(lowest, highest, shape[:2], generator=generator)
    spread = draw(st.sampled_from([0, 1, 8, 40]))
    exponents = around[..., None] - torch.randint(0, spread + 1, shape, generator=generator)
    x = torch.randn(shape, generator=generator, dtype=torch.float64).clamp(-2, 2) * torch.exp2(exponents.double())
    return (x * (torch.rand(shape, generator=generator) > 0.1)).clamp(-info.max / 2, info.max / 2).to(dtype)


@st.composite
def layers(draw: Any) -> LayerKV:
    dtype = draw(st.sampled_from(DTYPES))
    return LayerKV(draw(tensors(dtype)), draw(tensors(dtype)))


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(layer=layers(), codec=st.sampled_from(ALL))
def test_encoding_a_decoded_layer_again_gives_the_same_bytes(layer: LayerKV, codec: str) -> None:
    once = stored(codec, layer)
    found = decoded(codec, once)
    assert [x.dtype for x in found] == [x.dtype for x in layer]
    assert [x.shape for x in found] == [x.shape for x in layer]
    again = stored(codec, found)
    assert {name: bits(x) for name, x in again.items()} == {name: bits(x) for name, x in once.items()}


@pytest.mark.parametrize("largest", [127.0, 63.5])
@pytest.mark.parametrize("beside", [-1e-9, 0.0, 1e-9])
def test_encoding_again_gives_the_same_bytes_for_a_float64_beside_a_rounding_boundary(
    largest: float, beside: float
) -> None:
    numbers = torch.tensor([[[largest * (1 + beside), 1.0, 3.3]]], dtype=torch.float64)
    once = stored("int8", LayerKV(numbers, numbers))
    again = stored("int8", decoded("int8", once))
    assert {name: bits(x) for name, x in again.items()} == {name: bits(x) for name, x in once.items()}


def steps(x: torch.Tensor) -> torch.Tensor:
    """Return the scale of each head and token: the smallest power of two of which 127 reach the largest number."""
    largest = x.double().abs().amax(2, keepdim=True)
    return torch.exp2((largest / 127).log2().ceil()).where(largest > 0, 0.0)


@settings(max_examples=80, deadline=None)
@given(layer=layers(), other=layers())
@example(
    layer=LayerKV(torch.ones(1, 2, 5), torch.ones(1, 2, 8)), other=LayerKV(torch.ones(1, 2, 4), torch.ones(1, 2, 8))
)
@example(
    layer=LayerKV(torch.ones(1, 2, 4), torch.ones(1, 2, 8)),
    other=LayerKV(torch.ones(1, 2, 4).half(), torch.ones(1, 2, 8).half()),
)
@example(
    layer=LayerKV(torch.ones(1, 2, 4), torch.ones(1, 2, 8)), other=LayerKV(torch.ones(2, 2, 8), torch.ones(1, 2, 4))
)
def test_ram_holds_the_decoded_values_of_its_codec_in_rows_of_bytes(layer: LayerKV, other: LayerKV) -> None:
    kv = ChunkKV([layer, other], 3, static=torch.ones(layer.k.shape[1]))
    store = MemoryStore(format=EntryFormat("int8"))
    assert store.put(key_of(1), kv)
    found = store.get(key_of(1))
    assert found is not None
    sides = [side for each in kv.layers for side in each]
    alike = len({(side.dtype, side.shape[1]) for side in sides}) == 1
    whole = alike and not any(side.shape[2] % side.element_size() for side in sides)
    assert isinstance(found, CodedKV) == whole
    assert (found.dtype, found.nbytes, found.static_deviation() is None) == (kv.dtype, kv.nbytes, False)
    for index, each in enumerate(kv.layers):
        want = through("int8", each) if whole else each
        assert [bits(side) for side in found.layer(index)] == [bits(side) for side in want]
        if isinstance(found, CodedKV):
            assert [bits(side) for side in numbers(found.held.layer(index), found.dtype)] == [bits(s) for s in want]
    assert (
        store.stats().nbytes
        == found.stored_nbytes
        == sum(
            side.numel() * side.element_size()
            if not whole
            else side.numel() + side.numel() // side.shape[2] * side.element_size()
            for side in sides
        )
    )


def test_ram_in_int8_holds_twice_as_many_16_bit_entries_and_leaves_recurrent_states_unchanged() -> None:
    store = MemoryStore(2 * 34 * 2 * 8 * 66, format=EntryFormat("int8"))
    kv = ChunkKV([LayerKV(*torch.randn(2, 8, 34, 64).bfloat16())], 0)
    for number in range(3):
        assert store.put(key_of(number), kv)
    assert [store.contains(key_of(number)) for number in range(3)] == [False, True, True]
    rows = 34 * 2 * 8 * 66
    assert [MemoryStore(budget, format=EntryFormat("int8")).put(key_of(0), kv) for budget in (rows - 1, rows)] == [
        False,
        True,
    ]
    states = LayerKV(torch.randn(1, 3, 8).bfloat16(), torch.randn(1, 4, 4).bfloat16())
    snapshot = ChunkKV([kv.layers[0], states], 0)
    store.put(key_of(4), snapshot)
    found = store.get(key_of(4))
    assert found is not None
    assert same(found, snapshot)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(layer=layers())
@example(layer=LayerKV(torch.full((1, 1, 2), 127.0), torch.tensor([[[127.5, 1.0]]])))
def test_no_value_is_off_by_more_than_half_a_step(layer: LayerKV) -> None:
    for x, found in zip(layer, decoded("int8", stored("int8", layer)), strict=True):
        info = torch.finfo(x.dtype)
        least = max(info.tiny * info.eps, torch.finfo(torch.promote_types(x.dtype, torch.float32)).tiny)
        error = (found.double() - x.double()).abs()
        assert bool((error <= torch.maximum(steps(x), torch.tensor(least, dtype=torch.float64)) / 2).all())


def test_int8_keeps_small_values_precise_beside_an_outlier_in_another_token_or_head() -> None:
    layer = LayerKV(torch.full((2, 3, 8), 0.01), torch.full((2, 3, 8), 0.01))
    layer.k[0, 1, 3] = 1000.0
    found = decoded("int8", stored("int8", layer)).k
    far = torch.ones(2, 3, dtype=torch.bool)
    far[0, 1] = False
    assert torch.allclose(found[far], torch.tensor(0.01), rtol=1 / 127)
    assert found[0, 1, 3] == 1000.0
    assert bool((found[0, 1, :3] == 0).all())


@pytest.mark.parametrize("codec", ALL)
@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_stay_zeros(codec: str, dtype: torch.dtype) -> None:
    layer = LayerKV(torch.zeros(2, 3, 4, dtype=dtype), torch.zeros(2, 3, 6, dtype=dtype))
    found = decoded(codec, stored(codec, layer))
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(found, layer, strict=True))


@pytest.mark.parametrize("codec", ALL)
@pytest.mark.parametrize("odd", [float("inf"), float("-inf"), float("nan"), 60000.0])
def test_values_beyond_eight_bits_are_stored_unchanged(codec: str, odd: float) -> None:
    layer = LayerKV(torch.randn(2, 3, 4).half(), torch.randn(2, 3, 6).half())
    layer.k[1, 2, 3] = layer.v[0, 1, 2] = odd
    found = decoded(codec, stored(codec, layer))
    assert [bits(a) for a in found] == [bits(b) for b in layer]


@pytest.mark.parametrize("codec", ALL)
def test_a_decoded_layer_is_one_block_in_the_readers_memory(codec: str, tmp_path: Path) -> None:
    store = DiskStore(tmp_path, format=EntryFormat(codec))
    store.put(key_of(1), kv_of(1))
    taken: list[torch.Tensor] = []

    def take(nbytes: int) -> torch.Tensor:
        taken.append(plain(nbytes))
        return taken[-1]

    found = store.get(key_of(1)).layer_in(1, take)
    assert flat(found) is not None
    assert [memory.untyped_storage().data_ptr() for memory in taken] == [found.k.untyped_storage().data_ptr()]


@pytest.mark.parametrize("codec", ALL)
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_entry_shrinks_by_the_factor_of_its_codec(codec: str, dtype: torch.dtype) -> None:
    kv = ChunkKV([LayerKV(torch.randn(4, 64, 128).to(dtype), torch.randn(4, 64, 128).to(dtype))] * 2, 0)
    size = EntryFormat(codec).encode(key_of(1), kv).nbytes / kv.nbytes
    most = {"none": 1.0, "int8": 1 / dtype.itemsize}
    assert size <= most[codec] + 0.02


def test_layers_of_an_encoded_entry_lie_one_after_another(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, format=EntryFormat("int8"))
    store.put(key_of(1), kv_of(1, layers=12))
    (file,) = tmp_path.glob("kv/*/*.safetensors")
    with safe_open(file, framework="pt") as opened:
        assert list(opened.offset_keys()) == [f"layer.{index:05d}.packed" for index in range(12)]
        assert opened.metadata()["codec"] == "int8"


def test_values_wider_than_the_keys_before_them_are_stored_aligned(tmp_path: Path) -> None:
    kv = ChunkKV([LayerKV(torch.randn(1, 3, 5).bfloat16(), torch.randn(1, 3, 5))] * 2, 0)  # 30 bytes, then 4 each
    store = DiskStore(tmp_path)
    assert store.put(key_of(1), kv)
    assert same(store.get(key_of(1)), kv)


def test_a_static_deviation_stays_exact(tmp_path: Path) -> None:
    static = torch.tensor([1.0 + 1e-6, 1e-20, 3e20])
    store = DiskStore(tmp_path, format=EntryFormat("int8"))
    store.put(key_of(1), ChunkKV(kv_of(1).layers, 0, static=static))
    assert torch.equal(store.get(key_of(1)).static_deviation(), static)


def test_a_snapshot_of_a_recurrent_model_stays_exact_as_a_whole(tmp_path: Path) -> None:
    kv = LayerKV(torch.randn(2, 5, 8), torch.randn(2, 5, 8))
    state = LayerKV(torch.randn(16, 4), torch.randn(2, 8, 8))  # a convolution's and a recurrence's
    snapshot = ChunkKV([kv, state, LayerKV(torch.randn(16, 5), torch.empty(0))], 3)
    store = DiskStore(tmp_path, format=EntryFormat("int8"))
    store.put(key_of(1), snapshot)
    assert same(store.get(key_of(1)), snapshot)


def test_a_promotion_holds_the_decoded_values_and_writing_them_down_again_changes_no_byte(tmp_path: Path) -> None:
    kv = ChunkKV([LayerKV(torch.randn(2, 9, 8), torch.randn(2, 9, 8)) for _ in range(3)], 4)
    disk, ram, below = (
        DiskStore(tmp_path / "a", format=EntryFormat("int8")),
        MemoryStore(),
        DiskStore(tmp_path / "b", format=EntryFormat("int8")),
    )
    disk.put(key_of(1), kv)
    with TieredStore([ram, disk]) as store:
        store.get(key_of(1)).finish()
        assert same(disk.get(key_of(1)), ram.get(key_of(1)))
        assert not same(ram.get(key_of(1)), kv)
        below.put(key_of(1), ram.get(key_of(1)))
        first, second = (load_file(next(root.glob("kv/*/*.safetensors"))) for root in (disk.root, below.root))
        assert {name: bits(x) for name, x in first.items()} == {name: bits(x) for name, x in second.items()}


def test_an_entry_reports_on_every_path_whether_its_values_are_exact(tmp_path: Path) -> None:
    int8, raw = EntryFormat("int8"), EntryFormat()

    def passed_on(*stores: KVStore) -> list[bool]:
        kv, said = kv_of(1), []
        for store in stores:
            store.put(key_of(1), kv)
            found = store.get(key_of(1))
            said.append(found.exact)
            kv = read_whole(found)
        return said

    a, b, c = (tmp_path / name for name in "abc")
    assert passed_on(MemoryStore(), DiskStore(a, format=raw), MemoryStore()) == [True] * 3
    assert passed_on(DiskStore(b, format=int8), MemoryStore(), DiskStore(c, format=raw), MemoryStore()) == [False] * 4
    assert passed_on(MemoryStore(format=int8), MemoryStore(), MemoryStore(format=int8)) == [False] * 3
    ram = MemoryStore()
    with TieredStore([ram, DiskStore(c, format=raw)]) as store:
        promoted = store.get(key_of(1))
        promoted.finish()
        kv = ram.get(key_of(1))
        assert (promoted.exact, kv.exact) == (False, False)
    with TieredStore([DiskStore(tmp_path / "d", format=raw, writes="back")]) as queue:
        queue.put(key_of(1), kv)
        assert queue.get(key_of(1)).exact is False


@pytest.mark.parametrize("codec", ALL)
def test_damage_anywhere_in_a_layer_is_detected_with_every_codec(codec: str, tmp_path: Path) -> None:
    store = DiskStore(tmp_path, format=EntryFormat(codec))
    for at in range(7):
        store.put(key_of(1), kv_of(1))
        (file,) = tmp_path.glob("kv/*/*.safetensors")
        data = bytearray(file.read_bytes())
        size = len(data) - int.from_bytes(data[:8], "little") - 8  # size of the layers
        data[len(data) - 1 - at * (size - 1) // 6] ^= 4
        file.write_bytes(data)
        found = store.get(key_of(1))
        with pytest.raises(DamagedKVError):
            [found.layer(index) for index in range(2)]
        assert store.get(key_of(1)) is None


@pytest.mark.parametrize("lie", [b"", b"no safetensors", b"\xff" * 64])
def test_bytes_that_are_no_layer_count_as_damage_although_their_checksum_is_right(
    lie: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DiskStore(tmp_path, format=EntryFormat("int8"))
    with monkeypatch.context() as patched:
        packed = {"packed": torch.tensor(list(lie), dtype=torch.uint8)}
        patched.setattr(type(store.format.codec), "encode", lambda self, layer: packed)
        store.put(key_of(1), kv_of(1))
    with pytest.raises(DamagedKVError, match="layer 0"):
        store.get(key_of(1)).layer(0)
    assert not store.contains(key_of(1))


@pytest.mark.parametrize("name", ["int4", "raw+zstd", "int8+zstd"])  # older versions had the codecs with zstd
def test_an_entry_in_an_unknown_codec_is_a_miss_is_logged_and_stays(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    later = get_codec("int8")
    later.name = name
    form = EntryFormat()
    form.codec = later
    store = DiskStore(tmp_path, format=form)
    store.put(key_of(1), kv_of(1))
    reader = DiskStore(tmp_path)
    assert reader.get(key_of(1)) is None
    assert f"unknown KV codec '{name}'" in caplog.text
    assert reader.verify() == type(reader.verify())(1, (), (key_of(1),))
    assert reader.contains(key_of(1))
    assert reader.stats().damaged == 0


def test_each_tiers_address_sets_its_codec(tmp_path: Path) -> None:
    urls = f"ram://1MiB,file://{tmp_path}?codec=int8,redis://host:6379/0?codec=int8&db=1,s3://b/p?codec=none"
    ram, disk, redis, s3 = parse_tiers(urls)
    assert [tier.codec for tier in (ram, disk, redis, s3)] == ["raw", "int8", "int8", "raw"]
    assert (redis.url, s3.config) == ("redis://host:6379/0?db=1", ())
    for codec in ("raw", "int8"):
        with open_store(f"ram://?codec={codec},file://{tmp_path}?codec=int8") as store:
            assert [(tier.tier, tier.codec) for tier in store.stats().tiers] == [("ram", codec), ("disk", "int8")]


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("file:///kv?codec=int3", "unknown KV codec 'int3': use none or int8"),
        ("file:///kv?codec=int8+zstd", r"unknown KV codec 'int8\+zstd': use none or int8"),
        ("file:///kv?codec=none%2Bzstd", r"unknown KV codec 'none\+zstd': use none or int8"),
        ("ram://1GiB?codec=int4", "unknown KV codec 'int4': use none or int8"),
    ],
)
def test_an_address_with_an_unknown_codec_is_refused(url: str, why: str) -> None:
    with pytest.raises(InputError, match=why):
        parse_tiers(url)
