"""Tests `--writer` on the command line: its KV, the advice about KV of another writer, and its refusals."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from cacheblend_rag.store.kv import ModelFingerprint
from tests.blending.writers import write_for
from tests.command_line import as_json

pytestmark = pytest.mark.slow

QUESTION = "When was the Marlow observatory founded?"


@pytest.fixture(scope="module")
def writers(model_dir, tmp_path_factory) -> list[Path]:
    made = [tmp_path_factory.mktemp("writers") / f"writer-{seed}" for seed in range(2)]
    for seed, directory in enumerate(made):
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        write_for(model, ModelFingerprint.from_directory(Path(model_dir), torch.float32), directory, seed=seed)
    return made


def test_asking_a_store_with_another_kv_writer_names_the_writer_to_give(
    run, model_dir, documents, tmp_path, writers, monkeypatch
):
    here, by = ["--store", tmp_path / "store", "--model", model_dir], ["--writer", writers[0]]
    index = ["index", documents, *here, "--chunk-tokens", 40, "--json"]
    ask = ["ask", QUESTION, *here, "--max-tokens", 1, "--json"]

    def asked(*more: object) -> tuple[str, str]:
        result = run(*ask, *more)
        return as_json(result)["mode"], result.stderr

    plain = as_json(run(*index))
    _, said = asked(*by)
    assert f"written without the KV writer in {writers[0]}" in said
    assert "cacheblend index --writer DIR" in said

    written = as_json(run(*index, *by))
    assert (len(written["changed"]), written["unchanged"], written["chunks"]) == (2, [], plain["chunks"])
    with monkeypatch.context() as without_a_model:
        without_a_model.setattr("cacheblend_rag.console.engines.open_any_engine", None)
        again, by_its_own, plainly = (run(*index, *each) for each in (by, (), ("--writer", "none")))
    assert f"Give --writer {writers[0]}." in plainly.stderr
    assert "--writer" not in again.stderr + by_its_own.stderr
    assert as_json(plainly)["unchanged"] == as_json(again)["unchanged"] == as_json(by_its_own)["unchanged"]
    again = as_json(again)
    assert (len(again["unchanged"]), again["tokens"]) == (2, 0)
    assert asked(*by) == asked() == ("blend", ""), "an index is asked with the writer that it was made with"

    mode, said = asked("--writer", writers[1])
    assert f"by the KV writer in {writers[0]}" in said
    assert f"Give --writer {writers[0]}, or index them again with the one in {writers[1]}." in said
    # The model's own KV is still stored, and is reused without a writer.
    mode, said = asked("--writer", "none")
    assert mode == "blend"
    assert f"Give --writer {writers[0]}." in said


def test_chunks_are_listed_and_removed_with_the_kv_of_their_writer(run, model_dir, documents, tmp_path, writers):
    store = tmp_path / "store"
    made = run("index", documents, "--store", store, "--model", model_dir, "--writer", writers[0])
    assert made.exit_code == 0, made.stderr
    listed = as_json(run("store", "ls", "--store", store, "--json"))
    chunks = [item for item in listed if item["tokens"]]
    assert chunks
    assert all(item["nbytes"] for item in chunks)
    assert len(listed) == len(chunks) + 1  # the header's own
    assert {len(item["keys"]) for item in chunks} == {2}, "a writer's KV, and beside it the model's own"
    removed = as_json(run("store", "rm", chunks[0]["id"], "--store", store, "--json"))
    assert removed
    left = {item["id"]: item["nbytes"] for item in as_json(run("store", "ls", "--store", store, "--json"))}
    assert left[chunks[0]["id"]] is None
    assert len(left) == len(listed)


def test_an_index_takes_as_much_kv_with_a_writer_as_without(run, model_dir, documents, tmp_path, writers, monkeypatch):
    planned = []
    # The prompts of the spot check would store the model's own KV of their first chunks.
    monkeypatch.setattr("cacheblend_rag.calibrate.spot_check.spot_check", lambda *_: None)
    for name, more in (("plain", []), ("by a writer", ["--writer", writers[0]])):
        store = tmp_path / name
        made = run("index", documents, "--store", store, "--model", model_dir, "--chunk-tokens", 40, *more)
        assert made.exit_code == 0, made.stderr
        said = re.search(r"KV will take about ([\d.]+) KiB", made.stderr)
        assert said, made.stderr
        kv = as_json(run("store", "stats", "--store", store, "--json"))["kv"]
        planned.append(float(said[1]) * 1024)
        assert planned[-1] == pytest.approx(kv["bytes"], rel=0.1), "it is told before it is computed"
    assert planned[1] == pytest.approx(planned[0], rel=0.01)


def test_removing_a_document_removes_its_kv_of_every_writer(run, model_dir, documents, tmp_path, writers):
    store, model = tmp_path / "store", ["--model", model_dir]
    for more in ([], *(["--writer", writer] for writer in writers)):
        assert run("index", documents, "--store", store, *model, *more).exit_code == 0
    before = as_json(run("store", "ls", "--store", store, "--json"))
    assert run("documents", "rm", documents / "ships.txt", "--store", store).exit_code == 0
    (documents / "ships.txt").unlink()
    (documents / "observatory.md").unlink()
    assert run("index", documents, "--store", store, *model).exit_code in (0, 2)
    left = as_json(run("store", "ls", "--store", store, "--json"))
    assert sum(len(item["keys"]) for item in before) > 3
    assert [item["tokens"] for item in left] == [0]  # the header's own


def test_documents_not_yet_written_by_a_new_writer_are_not_reported_as_dropped(
    run, model_dir, documents, tmp_path, writers
):
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "late.txt").write_text("The late bell of Marlow rings at nine.")
    here = ["--store", tmp_path / "store", "--model", model_dir]
    assert run("index", documents, tmp_path / "more", *here).exit_code == 0
    for writer in writers:
        result = run("index", tmp_path / "more", *here, "--writer", writer)
        assert result.exit_code == 0, result.stderr
        assert "computed without this KV writer, or by another one" in result.stderr
        assert "budget is full" not in result.stderr


def test_an_unusable_writer_is_named_before_indexing(run, model_dir, documents, tmp_path):
    result = run("index", documents, "--store", tmp_path / "s", "--model", model_dir, "--writer", tmp_path / "none")
    assert result.exit_code == 2
    assert f"The KV writer in {tmp_path / 'none'} cannot be used" in result.stderr
    assert not (tmp_path / "s" / "index.db").exists()


def test_a_writer_is_refused_with_a_server_or_random_weights(run, documents, tmp_path):
    remote = run("index", documents, "--store", tmp_path, "--server", "http://127.0.0.1:1", "--writer", tmp_path)
    assert (remote.exit_code, "--writer does not go with --server" in remote.stderr) == (2, True)
    random = run("bench", "ttft", "--random-weights", "llama:2x64", "--writer", tmp_path)
    assert (random.exit_code, "leave it out, or the random weights" in random.stderr) == (2, True)


def test_a_benchmark_runs_with_a_writer(run, model_dir, writers):
    timed = run("bench", "ttft", "--model", model_dir, "--writer", writers[0], "--chunks", 2, "--chunk-tokens", 20,
                "--repeat", 1, "--json")  # fmt: skip
    assert as_json(timed)["settings"]["kv"] == "ram"


def test_a_calibration_with_a_writer_is_stored_for_this_writer_or_beside_it(run, model_dir, home, tmp_path, writers):
    lines = [
        {"question": f"Who is {name}?", "chunks": [f"{name} keeps the light.", "It was founded in 1911."]}
        for name in ("Ada", "Mira")
    ]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    model, writers = ["--model", model_dir], [shutil.copytree(each, tmp_path / each.name) for each in writers]
    calibrate = ["doctor", "--calibrate", *model, "--prompts", tmp_path / "prompts.jsonl", "--agreement", 0.5,
                 "--confidence", 0.5, "--json"]  # fmt: skip
    beside = as_json(run(*calibrate, "--writer", writers[1], "--output", writers[1]))["file"]
    own = as_json(run(*calibrate, "--writer", writers[0]))["file"]
    assert (Path(own).parent, Path(beside)) == (home / "profiles", writers[1] / "cacheblend.json")
    found = [as_json(run("doctor", *model, "--json", *more)) for more in (
        ["--writer", writers[0]], ["--writer", writers[1]], [])]  # fmt: skip
    assert [each["profile_origin"] for each in found] == [own, beside, "defaults, not calibrated"]
    assert [each["writer"] for each in found] == [str(writers[0]), str(writers[1]), None]


def test_an_index_of_the_probe_writer_keeps_the_probe_writer(run, model_dir, documents, tmp_path):
    here = ["--store", tmp_path / "store", "--model", model_dir]
    index = ["index", documents, *here, "--chunk-tokens", 40, "--json"]
    made = as_json(run(*index, "--writer", "probe"))
    assert made["tokens"] > 0
    again = as_json(run(*index))
    assert (len(again["unchanged"]), again["tokens"]) == (2, 0)
    ask = ["ask", QUESTION, *here, "--max-tokens", 1, "--json"]
    for more in ([], ["--writer", "probe"]):
        result = run(*ask, *more)
        assert (as_json(result)["mode"], "--writer" in result.stderr) == ("blend", False)
    assert "Give --writer" in run(*ask, "--writer", "none").stderr
