"""Tests `--kv`, the recorded tiers of a store, and their output in `store stats` and `ask --explain`."""

from __future__ import annotations

import socket

import pytest

from cacheblend_rag.store import Keyring, open_store, record_tiers, recorded_tiers
from tests.command_line import as_json
from tests.outcomes import loads_in
from tests.store.samples import key_of, kv_of
from tests.store.test_plugged_in import EXAMPLE, install

pytestmark = pytest.mark.slow

QUESTION = "When was the Marlow observatory founded?"


@pytest.fixture
def address(redis_url: str) -> str:
    return f"ram://64MiB,{redis_url}?budget=32MiB&timeout=30s"


@pytest.fixture
def store(run, model_dir, documents, tmp_path, address):
    directory = tmp_path / "store"
    found = run("index", documents, "--store", directory, "--model", model_dir, "--chunk-tokens", 40, "--kv", address)
    assert found.exit_code == 0, found.stderr
    return directory


def test_the_tiers_given_to_index_are_used_by_later_commands(run, model_dir, store, redis_url, address) -> None:
    assert recorded_tiers(store) == address
    assert not (store / "kv").exists(), "the directory keeps the index alone"
    assert len(list(open_store(redis_url).entries())) > 1
    common = ("--store", store, "--model", model_dir, "--max-tokens", 2)
    found = as_json(run("ask", QUESTION, *common, "--json"))
    assert (found["mode"], {load["tier"] for load in loads_in(found)}) == ("blend", {"redis"})
    assert all(load["nbytes"] > 0 for load in loads_in(found))

    explained = run("ask", QUESTION, *common, "--explain").stdout
    assert "KV from" in explained
    assert "redis" in explained
    assert "waited for stored KV" in explained
    assert "why: stored KV for" in explained
    assert "a full prefill would have taken" in explained


def test_stats_show_each_tier(run, store, address) -> None:
    kv = as_json(run("store", "stats", "--store", store, "--json"))["kv"]
    assert kv["kept_in"] == address
    tiers = {tier["tier"]: tier for tier in kv["tiers"]}
    assert list(tiers) == ["redis"]
    assert tiers["redis"]["entries"] == kv["entries"] > 0
    assert tiers["redis"]["budget"] == 32 << 20
    shown = run("store", "stats", "--store", store).stdout
    assert address in shown
    assert "32.0 MiB" in shown


def test_a_codec_is_recorded_shown_and_used_for_reading(run, model_dir, documents, tmp_path) -> None:
    common = ("--store", tmp_path / "store", "--model", model_dir)
    kv = ("--kv", "ram://64MiB,file://?codec=int8")
    indexed = as_json(run("index", documents, *common, "--chunk-tokens", 40, *kv, "--json"))
    stored = sum(file.stat().st_size for file in (tmp_path / "store" / "kv").rglob("*.safetensors"))
    assert indexed["kv_bytes"] == stored
    tiers = as_json(run("store", "stats", "--store", tmp_path / "store", "--json"))["kv"]["tiers"]
    assert [(tier["tier"], tier["codec"]) for tier in tiers] == [("disk", "int8")]
    answer = as_json(run("ask", QUESTION, *common, "--max-tokens", 2, "--json"))
    assert (answer["mode"], {load["tier"] for load in loads_in(answer)}) == ("blend", {"disk"})
    assert "int8" in run("store", "stats", "--store", tmp_path / "store").stdout.split("disk")[1].splitlines()[0]


def test_evict_can_empty_a_single_tier(run, model_dir, store, redis_url, tmp_path) -> None:
    run("store", "evict", "--to", "0", "--tier", "redis", "--store", store)
    assert list(open_store(redis_url).entries()) == []
    found = run("store", "evict", "--to", "0", "--tier", "s3", "--store", store)
    assert found.exit_code == 2
    assert "it has redis" in found.stderr


def test_a_second_kv_option_changes_the_recorded_tiers(run, model_dir, documents, store, tmp_path) -> None:
    other = f"ram://,file://{tmp_path}/elsewhere"
    found = run("index", documents, "--store", store, "--model", model_dir, "--kv", other)
    assert found.exit_code == 0, found.stderr
    assert f"is kept in {other} from now on" in " ".join(found.stderr.split())
    assert recorded_tiers(store) == other
    assert (tmp_path / "elsewhere" / "kv").is_dir()


def test_a_tier_that_does_not_answer_is_reported_and_the_question_is_answered(run, model_dir, store) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    sick = f"redis://127.0.0.1:{port}"
    found = run(
        "ask", QUESTION, "--store", store, "--model", model_dir, "--max-tokens", 2, "--kv", f"ram://,{sick}", "--json"
    )
    assert as_json(found)["mode"] == "prefill"
    shown = run("store", "stats", "--store", store).stdout
    assert "The redis tier does not answer" in shown
    removed = run("documents", "rm", "ships.txt", "--store", store)
    assert removed.exit_code == 3
    assert "would stay there" in removed.stderr


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--kv", "ram://,redis://:pw@host"), "REDISCLI_AUTH"),
        (("--kv", "ram://", "--disk-budget", "1GiB"), "--disk-budget does not go with --kv"),
        (("--kv", "nowhere"), "is no tier of a KV store"),
    ],
)
def test_unusable_kv_options_are_refused_and_not_recorded(run, model_dir, documents, tmp_path, arguments, why) -> None:
    directory = tmp_path / "store"
    found = run("index", documents, "--store", directory, "--model", model_dir, *arguments)
    assert found.exit_code == 2
    assert why in " ".join(found.stderr.split())
    assert recorded_tiers(directory) is None


def test_an_encrypted_store_remembers_its_key_directory_and_opens_only_with_its_keys(
    run, model_dir, documents, tmp_path
) -> None:
    keys, directory = tmp_path / "keys", tmp_path / "store"
    made = as_json(run("store", "keygen", keys, "--json"))
    assert made == {"file": str(keys / "default.key"), "tenant": "default"}
    common = ("--store", directory, "--model", model_dir)
    found = run("index", documents, *common, "--chunk-tokens", 40, "--encrypt", keys)
    assert found.exit_code == 0, found.stderr
    files = list(directory.glob("kv/*/*.safetensors"))
    assert files
    assert all(file.read_bytes().startswith(b"CBSEAL") for file in files)
    answered = as_json(run("ask", QUESTION, *common, "--max-tokens", 2, "--json"))
    assert answered["mode"] == "blend"
    listed = as_json(run("store", "ls", "--store", directory, "--json"))
    assert all(item["nbytes"] for item in listed)
    assert run("store", "verify", "--store", directory).exit_code == 0

    (keys / "default.key").rename(tmp_path / "kept")
    refused = run("ask", QUESTION, *common)
    assert refused.exit_code == 2
    assert "holds no default.key" in " ".join(refused.stderr.split())
    assert run("store", "keygen", keys).exit_code == 0
    assert run("ask", QUESTION, *common).exit_code == 3
    (tmp_path / "kept").replace(keys / "default.key")
    assert as_json(run("ask", QUESTION, *common, "--max-tokens", 2, "--json"))["answer"] == answered["answer"]
    assert sorted(directory.glob("kv/*/*.safetensors")) == sorted(files)


def test_a_tenants_documents_are_its_own_and_encrypted_with_its_own_key(run, model_dir, documents, tmp_path) -> None:
    keys, directory = tmp_path / "keys", tmp_path / "store"
    run("store", "keygen", keys)
    common = ("--store", directory, "--model", model_dir)
    acme = ("--tenant", "acme")
    refused = run("index", documents, *common, *acme, "--encrypt", keys)
    assert refused.exit_code == 2
    assert "no key of the tenant 'acme'" in " ".join(refused.stderr.split())
    assert run("store", "keygen", keys, *acme).exit_code == 0
    found = run("index", documents, *common, *acme, "--chunk-tokens", 40)
    assert found.exit_code == 0, found.stderr
    name = Keyring.read(keys).name("acme")
    files = list(directory.glob("kv/*/*.safetensors"))
    assert files
    assert all(file.stem.endswith(name.id) for file in files)

    answered = as_json(run("ask", QUESTION, *common, *acme, "--max-tokens", 2, "--json"))
    assert answered["mode"] == "blend"
    assert run("ask", QUESTION, *common).exit_code == 3, "the default tenant has no index"
    listed = as_json(run("store", "ls", "--store", directory, *acme, "--json"))
    assert all(item["nbytes"] and item["path"] for item in listed)
    assert as_json(run("documents", "ls", "--store", directory, "--json")) == []
    (document, *_) = as_json(run("documents", "ls", "--store", directory, *acme, "--json"))
    removed = as_json(run("documents", "rm", document["path"], "--store", directory, *acme, "--json"))
    assert removed[0]["nbytes"] > 0
    assert len(list(directory.glob("kv/*/*.safetensors"))) < len(files)


def test_a_tier_of_another_package_that_cannot_be_listed_is_reported_without_failing(
    run, tmp_path, monkeypatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLE)
    install(tmp_path / "packages", monkeypatch, sqlite="cacheblend_sqlite_tier:open_tier")
    store = tmp_path / "store"
    record_tiers(store, f"ram://1MiB,sqlite://{tmp_path}/kv.db")
    with open_store(store) as opened:
        opened.put(key_of(1), kv_of(1))
    for command in (("stats",), ("ls",), ("verify",), ("evict", "--to", "0")):
        found = run("store", *command, "--store", store)
        assert found.exit_code == 0, found.stderr
        if command[0] in {"stats", "ls", "verify"}:
            assert "The sqlite tier cannot be listed" in found.stderr
    (tier,) = as_json(run("store", "stats", "--store", store, "--json"))["kv"]["tiers"][-1:]
    assert (tier["tier"], tier["entries"], tier["bytes"]) == ("sqlite", None, None)
    refused = run("store", "evict", "--to", "0", "--tier", "sqlite", "--store", store)
    assert refused.exit_code != 0
    assert "The tier sqlite evicts nothing" in refused.stderr
    with open_store(store) as opened:
        assert opened.contains(key_of(1))
