"""Tiers of other packages are found by entry point, and used as far as their methods go."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cacheblend_rag.errors import InputError
from cacheblend_rag.store import TieredStore, make_key, open_store
from cacheblend_rag.store.opening import parse_tiers
from tests.store.samples import key_of, kv_of, same

EXAMPLE = Path(__file__).parents[2] / "examples/third_party_tier"


def install(path: Path, monkeypatch: pytest.MonkeyPatch, **entry_points: str) -> None:
    """Change ``sys.path`` as installing a package with these tiers would."""
    info = path / "a_tier-0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: a-tier\nVersion: 0.1\n")
    lines = "".join(f"{scheme} = {place}\n" for scheme, place in entry_points.items())
    (info / "entry_points.txt").write_text(f"[cacheblend_rag.tiers]\n{lines}")
    monkeypatch.syspath_prepend(path)


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.syspath_prepend(EXAMPLE)
    install(tmp_path / "packages", monkeypatch, sqlite="cacheblend_sqlite_tier:open_tier")
    return f"sqlite://{tmp_path}/kv.db"


def test_the_example_tier_declares_the_entry_point_used_by_the_tests() -> None:
    assert 'sqlite = "cacheblend_sqlite_tier:open_tier"' in (EXAMPLE / "pyproject.toml").read_text("utf-8")


def test_entries_of_a_plugged_in_tier_outlast_the_process_and_move_up_into_ram(address: str) -> None:
    with open_store(f"ram://64MiB,{address}") as store:
        assert store.put(key_of(1), kv_of(1))
    with open_store(f"ram://64MiB,{address}") as store:
        found = store.get(key_of(1))
        assert found.tier == "sqlite"
        assert same(found, kv_of(1))
        found.finish()
        again = store.get(key_of(1))
        assert again.tier == "ram"
        assert same(again, kv_of(1))


def test_an_address_sets_budget_codec_keys_and_write_mode(address: str, tmp_path: Path) -> None:
    make_key(tmp_path / "keys")
    with open_store(f"ram://1MiB,{address}?budget=1MiB&codec=int8&write=back&encrypt={tmp_path}/keys") as store:
        tier = store.tiers[1]
        assert (tier.budget, tier.codecs, tier.writes) == (1 << 20, ("int8",), "back")
        store.put(key_of(1), kv_of(1))
        store.flush()
        assert tier.contains(key_of(1))
        store.tiers[0].delete(key_of(1))
        assert same(store.get(key_of(1)), kv_of(1))
    assert b"CBSEAL" in (tmp_path / "kv.db").read_bytes()


def test_a_tier_without_listing_and_eviction_works_beside_ram(address: str, tmp_path: Path) -> None:
    with open_store(f"ram://1MiB,{address}") as store:
        store.put(key_of(1), kv_of(1))
        assert store.evict(0) == kv_of(1).nbytes
        assert store.contains(key_of(1)), "the tier that evicts nothing has it still"
        assert store.unlisted == ("sqlite",)
        assert list(store.entries()) == []
        assert store.verify().checked == 0
        ram, sqlite = store.stats().tiers
        assert (ram.listed, sqlite.listed, sqlite.entries) == (True, False, 0)
        store.tiers[1].page_lock_for(torch.device("cpu"))
        assert store.tiers[1].room(100) is None


def test_a_damaged_entry_is_a_miss_and_can_be_put_again(address: str) -> None:
    with open_store(address) as store:
        store.put(key_of(1), kv_of(1))
        store.tiers[0]._run("UPDATE kv SET data = zeroblob(100)")
        assert store.get(key_of(1)) is None
        assert not store.contains(key_of(1))
        assert store.put(key_of(1), kv_of(1))
        assert same(store.get(key_of(1)), kv_of(1))


def test_options_unknown_to_the_tier_are_refused_by_the_tier(address: str) -> None:
    with pytest.raises(InputError, match="with budget, codec or encrypt"):
        open_store(f"{address}?ttl=1s")


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("no_such_module:open_tier", r"of the package a-tier.*No module named"),
        ("json:no_such_name", r"of the package a-tier.*no_such_name"),
        ("builtins:repr", r"of the package a-tier.*keyword"),
        ("tests.store.test_plugged_in:not_a_tier", r"of the package a-tier.*a str, which is no KVStore"),
    ],
)
def test_a_failing_tier_package_is_named_in_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, why: str
) -> None:
    install(tmp_path, monkeypatch, odd=place)
    with pytest.raises(InputError, match=why):
        open_store("odd:///place")


def not_a_tier(address: object, **options: object) -> str:
    return "a tier"


def test_bundled_schemes_cannot_be_overridden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, ram="tests.store.test_plugged_in:not_a_tier")
    with open_store("ram://1MiB") as store:
        assert isinstance(store, TieredStore)
        assert [tier.tier for tier in store.stats().tiers] == ["ram"]


def test_an_unknown_scheme_is_refused(address: str) -> None:
    assert parse_tiers(address)[0].scheme == "sqlite"
    with pytest.raises(InputError, match="is no tier of a KV store"):
        parse_tiers("nosuch:///place")
