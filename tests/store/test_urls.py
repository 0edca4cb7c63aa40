"""Tests stores opened by the addresses of their tiers, and tiers recorded in a directory."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import pytest

from cacheblend_rag.errors import InputError, StoreError
from cacheblend_rag.store import TieredStore, open_store, opening, record_tiers, recorded_tiers
from cacheblend_rag.store.opening import default_ram_budget, parse_duration, parse_size, parse_tiers, with_keys
from cacheblend_rag.store.source import make_key
from tests.store.samples import key_of, kv_of, same

FOUR = "ram://8GiB,file:///nvme/kv?budget=500GiB,redis://host:6379/0?budget=64GiB&timeout=500ms,s3://bucket/a/b?ttl=7d&region=eu"


def test_each_address_gives_the_kind_and_the_size_of_its_tier() -> None:
    ram, disk, redis, s3 = parse_tiers(FOUR)
    assert (ram.scheme, ram.budget) == ("ram", 8 << 30)
    assert (disk.scheme, disk.place, disk.budget) == ("file", "/nvme/kv", 500 << 30)
    assert (redis.url, redis.budget, redis.timeout_s, redis.ttl_s) == ("redis://host:6379/0", 64 << 30, 0.5, None)
    assert (s3.url, s3.budget, s3.ttl_s, s3.config) == ("s3://bucket/a/b", None, 7 * 86400, (("region", "eu"),))


def test_an_option_of_the_client_library_stays_in_the_address() -> None:
    (redis,) = parse_tiers("rediss://user:pass@host/2?budget=1GiB&ssl_cert_reqs=none")
    assert redis.url == "rediss://user:pass@host/2?ssl_cert_reqs=none"
    assert parse_tiers("valkey://host")[0].url == "redis://host"
    assert parse_tiers("unix:///run/redis.sock?db=1")[0].url == "unix:///run/redis.sock?db=1"


@pytest.mark.parametrize(
    ("urls", "why"),
    [
        ("", "names no tier"),
        ("ram://,/a/directory", "is no tier"),
        ("ftp://host/kv", "is no tier"),
        ("ram://lots", "'lots' is not a size"),
        ("ram://,ram://1GiB", "names RAM twice"),
        ("file://nvme/kv", "takes three slashes"),
        ("file:///kv?timeout=1s", "timeout is no option of this tier"),
        ("redis:///0", "lacks a host"),
        ("s3:///prefix", "lacks a bucket"),
        ("ram://[", "is no address"),
        ("file:///kv#here?encrypt=/keys", "write it as %23"),
        ("redis://host?timeout=soon", "'soon' is not a time"),
        ("redis://host?ttl=0s", "'0s' is not a time"),
    ],
)
def test_a_malformed_address_is_refused_with_a_hint(urls: str, why: str) -> None:
    with pytest.raises(InputError, match=why):
        parse_tiers(urls)


def test_an_address_sets_the_write_mode_of_its_tier(tmp_path: Path) -> None:
    with open_store(f"ram://1MiB,file://{tmp_path}/a,file://{tmp_path}/b?write=back") as store:
        assert [tier.writes for tier in store.tiers] == ["through", "through", "back"]
    with pytest.raises(InputError, match="through, back"):
        parse_tiers("file:///kv?write=never")


def test_durations_are_parsed_with_their_units() -> None:
    assert [parse_duration(text) for text in ("250ms", "2s", "1.5m", "12h", "7d")] == [0.25, 2, 90, 43200, 604800]


def test_a_store_opened_by_addresses_has_exactly_these_tiers(tmp_path: Path, redis_url: str) -> None:
    with open_store(f"ram://1MiB,file://{tmp_path}/kv?budget=2MiB,{redis_url}?budget=3MiB") as store:
        assert [(t.tier, t.budget) for t in store.stats().tiers] == [
            ("ram", 1 << 20),
            ("disk", 2 << 20),
            ("redis", 3 << 20),
        ]
        store.put(key_of(1), kv_of(1))
    with open_store(redis_url) as store:
        assert same(store.get(key_of(1)), kv_of(1))


def test_an_object_store_opens_by_its_address(s3_url: str, s3_endpoint: str) -> None:
    address = f"{s3_url}?endpoint={s3_endpoint}&timeout=30s"
    with open_store(address) as store:
        store.put(key_of(1), kv_of(1))
    with open_store(address) as store:
        assert [entry.tier for entry in store.entries()] == ["s3"]
        assert same(store.get(key_of(1)), kv_of(1))


def test_tiers_recorded_in_a_directory_apply_to_every_later_opening(tmp_path: Path, redis_url: str) -> None:
    assert recorded_tiers(tmp_path) is None
    record_tiers(tmp_path / "store", f"ram://1MiB,file://,{redis_url}")
    with open_store(tmp_path / "store") as store:
        store.put(key_of(1), kv_of(1))
        assert [t.tier for t in store.stats().tiers] == ["ram", "disk", "redis"]
    assert (tmp_path / "store" / "kv").is_dir(), "file:// alone is the directory itself"
    record_tiers(tmp_path / "store", redis_url)
    with open_store(tmp_path / "store") as store:
        assert [t.tier for t in store.stats().tiers] == ["redis"]
        assert same(store.get(key_of(1)), kv_of(1))


def test_a_budget_argument_overrides_the_addresss_budget_and_0_turns_ram_off(tmp_path: Path) -> None:
    record_tiers(tmp_path, "ram://1MiB,file://?budget=1MiB")
    with open_store(tmp_path, ram_budget=5, disk_budget=6) as store:
        assert [t.budget for t in store.stats().tiers] == [5, 6]
    with open_store(tmp_path, ram_budget=0) as store:
        assert [t.tier for t in store.stats().tiers] == ["disk"]


def test_recording_a_budget_leaves_the_rest_of_the_addresses_unchanged(tmp_path: Path) -> None:
    record_tiers(tmp_path, None, disk_budget="3MiB")
    assert recorded_tiers(tmp_path) == "ram://,file://?budget=3MiB"
    record_tiers(tmp_path, None, disk_budget="4MiB")
    with open_store(tmp_path, ram_budget=2 << 20) as store:
        assert [t.budget for t in store.stats().tiers] == [2 << 20, 4 << 20]
    record_tiers(tmp_path, f"ram://1MiB,file://{tmp_path}/other?codec=int8,redis://host?budget=9MiB")
    record_tiers(tmp_path, None, disk_budget="5MiB")
    assert (
        recorded_tiers(tmp_path)
        == f"ram://1MiB,file://{tmp_path}/other?codec=int8&budget=5MiB,redis://host?budget=9MiB"
    )


def test_relative_paths_of_keys_are_found_from_other_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    make_key(Path("my keys"))
    record_tiers(tmp_path / "store", "ram://1MiB,file://?encrypt=my+keys&budget=1MiB")
    monkeypatch.chdir(tmp_path)
    with open_store(tmp_path / "store") as store:
        assert [t.tier for t in store.stats().tiers] == ["ram", "disk"]


def test_a_failed_recording_leaves_the_recorded_tiers(tmp_path: Path) -> None:
    record_tiers(tmp_path, "ram://1MiB,redis://host")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # acts as a full disk
    try:
        with pytest.raises(StoreError, match="cannot note the tiers"):
            record_tiers(tmp_path, "ram://2MiB,redis://host")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert recorded_tiers(tmp_path) == "ram://1MiB,redis://host"
    assert [file.name for file in tmp_path.iterdir()] == ["tiers"]


def test_a_small_size_needs_a_unit() -> None:
    for text in ("40", "1048575"):
        with pytest.raises(InputError, match=rf"{text} is {text} bytes; add a unit, as {text}GiB"):
            parse_size(text)
    assert [parse_size(text) for text in ("40B", "0", "1048576", "2k", 40)] == [40, 0, 1 << 20, 2048, 40]


def test_passwords_are_not_recorded(tmp_path: Path) -> None:
    for urls in ("ram://,redis://user:secret@host", "redis://host?password=secret"):
        with pytest.raises(InputError, match=r"holds a password.*REDISCLI_AUTH") as caught:
            record_tiers(tmp_path, urls)
        assert "secret" not in str(caught.value)
    assert recorded_tiers(tmp_path) is None


def test_a_password_comes_from_the_environment(valkey, redis_url: str, monkeypatch) -> None:
    server = valkey.client()
    server.config_set("requirepass", "secret")
    try:
        monkeypatch.delenv("REDISCLI_AUTH", raising=False)
        with open_store(redis_url) as store, pytest.raises(StoreError, match="Authentication"):
            store.put(key_of(1), kv_of(1))
        monkeypatch.setenv("REDISCLI_AUTH", "secret")
        with open_store(redis_url) as store:
            assert store.put(key_of(1), kv_of(1))
    finally:
        server.config_set("requirepass", "")


def test_file_without_a_path_is_refused_unless_a_directory_is_given() -> None:
    with pytest.raises(InputError, match="add the path"):
        open_store("ram://,file://")
    assert isinstance(open_store("ram://1MiB"), TieredStore)


@pytest.mark.parametrize(("url", "package", "extra"), [("redis://h", "redis", "redis"), ("s3://b", "obstore", "s3")])
def test_a_missing_package_is_named_with_its_extra(monkeypatch, url: str, package: str, extra: str) -> None:
    for name in (package, f"{package}.exceptions"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(
        sys.modules, f"cacheblend_rag.store.{'redis' if extra == 'redis' else 'objects'}", raising=False
    )
    with pytest.raises(InputError, match=rf"{package}.*pip install 'cacheblend-rag\[{extra}\]'"):
        open_store(url)


def test_keys_are_added_to_every_tier_except_ram_and_replace_earlier_ones() -> None:
    given = "RAM://1MiB, file:///kv?encrypt=/old&budget=1MiB,redis://host,"
    assert with_keys(given, Path("/the keys")) == (
        "RAM://1MiB,file:///kv?budget=1MiB&encrypt=/the+keys,redis://host?encrypt=/the+keys"
    )


@pytest.mark.parametrize(("limit", "budget"), [("4194304\n", 1 << 20), ("max\n", None), (None, None)])
def test_the_default_ram_budget_respects_the_memory_limit_of_a_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str | None, budget: int | None
) -> None:
    monkeypatch.setattr(opening, "_LIMITS", (), raising=False)
    machine = default_ram_budget()
    told = tmp_path / "memory.max"
    if limit is not None:
        told.write_text(limit)
    monkeypatch.setattr(opening, "_LIMITS", (told,))
    assert default_ram_budget() == (machine if budget is None else budget)
