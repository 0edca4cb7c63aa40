"""Tests `index`, `ask`, `chat` and `store` on the command line, on good and bad input."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cacheblend_rag.cli import app
from cacheblend_rag.errors import InputError
from cacheblend_rag.store.opening import parse_size
from tests.command_line import DOCUMENTS, as_json, spend_less
from tests.outcomes import missing_in

pytestmark = pytest.mark.slow

QUESTION = "When was the Marlow observatory founded?"


@pytest.fixture(scope="module")
def indexed(model_dir, tmp_path_factory) -> Path:
    """A folder with documents and a store of them, made once for all tests here."""
    made = tmp_path_factory.mktemp("indexed")
    (made / "docs").mkdir()
    for name, text in DOCUMENTS.items():
        (made / "docs" / name).write_text(text)
    command = ["index", made / "docs", "--store", made / "store", "--model", model_dir, "--chunk-tokens", 40]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CACHEBLEND_HOME", str(made / "home"))
        spend_less(patch)
        result = CliRunner().invoke(app, [str(word) for word in command])
    assert result.exit_code == 0, result.stderr
    return made


@pytest.fixture
def store(indexed, tmp_path) -> Path:
    """A store of the documents."""
    return shutil.copytree(indexed / "store", tmp_path / "store")


def test_indexing_again_processes_only_changed_files(run, model_dir, documents, tmp_path):
    store = tmp_path / "own"
    first = run("index", documents, "--store", store, "--model", model_dir, "--chunk-tokens", 40)
    assert first.exit_code == 0, first.stderr
    command = ["index", documents, "--store", store, "--model", model_dir, "--json"]
    again = as_json(run(*command))
    assert len(again["unchanged"]) == 2
    assert again["tokens"] == 0
    (documents / "ships.txt").write_text("The Proud Gull was sold in 1901 and carries timber to the islands now.")
    changed = as_json(run(*command))
    assert [Path(path).name for path in changed["changed"]] == ["ships.txt"]
    assert changed["tokens"] > 0


def test_a_store_is_opened_in_the_dtype_that_it_was_made_in(run, model_dir, documents, tmp_path):
    store = tmp_path / "own"
    command = ["index", documents, "--store", store, "--json"]
    as_json(run(*command, "--model", model_dir, "--chunk-tokens", 40, "--dtype", "bfloat16"))
    assert len(as_json(run(*command))["unchanged"]) == 2
    ask = ["ask", QUESTION, "--store", store, "--max-tokens", 2, "--json"]
    answer = as_json(run(*ask))
    assert (answer["mode"], missing_in(answer)) == ("blend", [])
    other = run(*ask, "--dtype", "float32")
    assert (other.exit_code, "or in another dtype" in other.stderr) == (3, True)


def test_indexing_again_stores_the_kv_that_the_store_has_lost(run, model_dir, indexed, store):
    shutil.rmtree(store / "kv")
    command = ["index", indexed / "docs", "--store", store, "--model", model_dir, "--json"]
    again = as_json(run(*command))
    assert len(again["changed"]) == 2 and again["tokens"] > 0
    answer = as_json(run("ask", QUESTION, "--store", store, "--model", model_dir, "--max-tokens", 2, "--json"))
    assert (answer["mode"], missing_in(answer)) == ("blend", [])
    assert len(as_json(run(*command))["unchanged"]) == 2


def test_an_empty_path_is_refused(run, model_dir, store):
    found = run("index", "", "--store", store, "--model", model_dir)
    assert (found.exit_code, "A path is empty" in found.stderr) == (2, True)


def test_index_warns_of_kv_that_the_budget_had_no_room_for(run, model_dir, documents, indexed, store, tmp_path):
    """Each put succeeds, since the store drops KV that the same run has put before."""
    whole = as_json(run("index", indexed / "docs", "--store", store, "--model", model_dir, "--json"))
    assert whole["kv_bytes"] > 0 == len(whole["without_kv"])
    small = ["index", documents, "--store", tmp_path / "small", "--model", model_dir, "--chunk-tokens", 40]
    found = run(*small, "--disk-budget", f"{whole['kv_bytes'] // 2}B", "--yes")
    assert found.exit_code == 0, found.stderr
    assert "KV         " in found.stdout
    assert "newer KV took its place (see --disk-budget and --kv)" in found.stderr


def test_ask_json_has_the_documented_fields(run, model_dir, store):
    found = as_json(run("ask", QUESTION, "--store", store, "--model", model_dir, "--max-tokens", 4, "--json"))
    assert {"answer", "sources", "mode", "reason", "usage", "timings"} <= found.keys()
    assert found["mode"] == "blend"
    assert all({"id", "path", "score", "text"} <= source.keys() for source in found["sources"])
    assert any("1911" in source["text"] for source in found["sources"])
    usage = found["usage"]
    assert usage["prompt_tokens"] == usage["reused_tokens"] + usage["computed_tokens"]
    assert usage["recomputed_tokens"] < usage["computed_tokens"]
    assert {"retrieve_s", "ttft_s", "total_s"} == found["timings"].keys()


def test_ask_ratio_1_recomputes_tokens_and_policy_full_reuse_recomputes_none(run, model_dir, store):
    ask = ["ask", QUESTION, "--store", store, "--model", model_dir, "--max-tokens", 1, "--json"]
    full, none = (as_json(run(*ask, *more))["usage"] for more in (["--ratio", 1], ["--policy", "full-reuse"]))
    assert none["recomputed_tokens"] == 0 < full["recomputed_tokens"]


def test_ask_prints_answer_sources_and_reuse(run, model_dir, store):
    result = run("ask", QUESTION, "--store", store, "--model", model_dir, "--max-tokens", 4)
    assert result.exit_code == 0, result.stderr
    assert "[1] observatory.md (score " in result.stdout
    assert "Nearest to the question, in [1] observatory.md:\n" in result.stdout and ">> " in result.stdout
    assert "tokens reused" in result.stdout


def test_ask_json_names_the_sentence_nearest_to_the_question(run, model_dir, store):
    found = as_json(run("ask", QUESTION, "--store", store, "--model", model_dir, "--max-tokens", 1, "--json"))
    nearest, source = found["nearest"], found["sources"][0]
    assert nearest["id"] == source["id"]
    assert nearest["text"] == source["text"][nearest["begin"] : nearest["end"]]
    assert "founded" in nearest["text"]


def test_chat_answers_piped_questions_and_obeys_commands(run, model_dir, store):
    lines = f"/sources\n{QUESTION}\n/sources\n/history\n/nonsense\n/help\n/quit\nnever asked\n"
    result = run("chat", "--store", store, "--model", model_dir, "--max-tokens", 4, stdin=lines)
    assert result.exit_code == 0, result.stderr
    assert "No answer yet." in result.stdout
    assert "founded in 1911" in result.stdout  # the source's text
    assert f"1. {QUESTION}" in result.stdout
    assert "There is no command /nonsense" in result.stdout
    assert "/quit" in result.stdout
    assert "never asked" not in result.stdout


def test_chat_continues_after_a_question_beyond_the_context_window(run, model_dir, store):
    result = run(
        "chat", "--store", store, "--model", model_dir, "--max-tokens", 4, stdin=f"{'sea ' * 2000}\n{QUESTION}\n"
    )
    assert result.exit_code == 0
    assert "context window" in result.stderr
    assert "[1] observatory.md (score " in result.stdout


def test_files_without_text_are_skipped_with_reasons_and_other_files_are_indexed(run, model_dir, documents, tmp_path):
    (documents / "empty.txt").touch()
    (documents / "binary.txt").write_bytes(bytes(range(256)) * 20)
    result = run("index", documents, "--store", tmp_path / "s", "--model", model_dir, "--json")
    report = as_json(result)
    assert {Path(skipped["path"]).name for skipped in report["skipped"]} == {"empty.txt", "binary.txt"}
    assert "empty.txt: " in result.stderr and "binary.txt: " in result.stderr
    assert len(report["added"]) == 2


def test_an_index_of_one_chunk_is_reported_as_not_checked(run, model_dir, tmp_path):
    (tmp_path / "note.md").write_text("The mill is closed on Mondays.")
    result = run("index", tmp_path / "note.md", "--store", tmp_path / "s", "--model", model_dir)
    assert "checked    nothing: no question finds two chunks" in result.stdout


def test_indexing_only_unusable_files_ends_with_exit_code_2(run, model_dir, tmp_path):
    (tmp_path / "empty.txt").touch()
    assert run("index", tmp_path / "empty.txt", "--store", tmp_path / "s", "--model", model_dir).exit_code == 2


def assert_error(result, code: int, *named: str) -> None:
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert "Error: " in result.stderr
    assert "Traceback" not in result.stderr
    for text in named:
        assert text in result.stderr


def test_a_path_that_does_not_exist_is_an_input_error(run, model_dir, tmp_path):
    missing = tmp_path / "nowhere.md"
    assert_error(run("index", missing, "--store", tmp_path / "s", "--model", model_dir), 2, "nowhere.md")


def test_asking_a_store_that_does_not_exist_is_refused_before_a_model_is_loaded(run, tmp_path):
    result = run("ask", "Why?", "--store", tmp_path / "nothing", "--model", "/no/such/model")
    assert_error(result, 3, "cacheblend index")
    assert not (tmp_path / "nothing").exists()


def test_a_prompt_beyond_the_context_window_is_an_input_error(run, model_dir, store):
    result = run("ask", "sea " * 2000, "--store", store, "--model", model_dir)
    assert_error(result, 2, "context window")


def test_a_store_of_another_model_is_refused_and_stays_unchanged(run, model_dir, store, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(model_dir, other)
    config = (other / "config.json").read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 2e-06')
    (other / "config.json").write_text(config)
    before = as_json(run("store", "ls", "--store", store, "--json"))
    assert_error(run("ask", QUESTION, "--store", store, "--model", other), 3, "model")
    assert as_json(run("store", "ls", "--store", store, "--json")) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_store_is_named_in_the_error(run, store):
    (store / "kv").chmod(0)
    try:
        assert_error(run("store", "stats", "--store", store), 3, str(store))
    finally:
        (store / "kv").chmod(0o755)


def test_a_damaged_index_is_a_store_error(run, model_dir, store):
    index = next(file for file in store.iterdir() if file.suffix in {".sqlite", ".sqlite3", ".db"})
    index.write_bytes(b"not a database " * 1000)
    for command in (["store", "ls"], ["ask", QUESTION, "--model", model_dir]):
        assert_error(run(*command, "--store", store), 3, "damaged")


def test_a_file_in_place_of_the_store_is_named_in_the_error(run, tmp_path):
    (tmp_path / "file").touch()
    assert_error(run("store", "ls", "--store", tmp_path / "file"), 3, "file")


def test_an_empty_question_is_refused(run, model_dir, store):
    assert_error(run("ask", "  ", "--store", store, "--model", model_dir), 2, "empty")


def test_store_lists_every_chunk_with_its_document_and_kv(run, store):
    items = as_json(run("store", "ls", "--store", store, "--json"))
    chunks = [item for item in items if item["path"]]
    assert {Path(item["path"]).name for item in chunks} == {"observatory.md", "ships.txt"}
    assert all(item["nbytes"] > 0 and item["last_used"] > 0 and item["tokens"] > 0 for item in chunks)
    stats = as_json(run("store", "stats", "--store", store, "--json"))
    assert stats["index"]["chunks"] == len(chunks)
    assert stats["kv"]["entries"] == len(items)
    assert stats["kv"]["bytes"] == sum(item["nbytes"] for item in items)
    listing = run("store", "ls", "--store", store).stdout
    assert all(item["id"] in listing for item in chunks)


def test_removed_kv_is_computed_anew_and_the_chunk_stays(run, model_dir, store):
    chunk = next(item for item in as_json(run("store", "ls", "--store", store, "--json")) if item["path"])
    assert run("store", "rm", chunk["id"][:12], "--store", store).exit_code == 0
    left = {item["id"]: item for item in as_json(run("store", "ls", "--store", store, "--json"))}
    assert left[chunk["id"]]["nbytes"] is None
    as_json(run("ask", QUESTION, "--store", store, "--model", model_dir, "--k", 50, "--max-tokens", 1, "--json"))
    back = {item["id"]: item for item in as_json(run("store", "ls", "--store", store, "--json"))}
    assert back[chunk["id"]]["nbytes"] == chunk["nbytes"]


def test_an_unknown_chunk_id_is_exit_code_2(run, store):
    assert_error(run("store", "rm", "0123456789abcdef", "--store", store), 2, "0123456789abcdef", "store ls")


def test_evicting_to_nothing_keeps_the_index_and_the_answers(run, model_dir, store):
    assert as_json(run("store", "evict", "--to", "0", "--store", store, "--json"))["bytes"] == 0
    found = as_json(run("ask", QUESTION, "--store", store, "--model", model_dir, "--max-tokens", 1, "--json"))
    assert found["mode"] == "prefill"
    assert "no stored KV" in found["reason"]


def test_verify_reports_and_removes_damage_with_exit_code_3(run, store):
    assert run("store", "verify", "--store", store).exit_code == 0
    file = sorted(store.rglob("*.safetensors"))[0]
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    kept = run("store", "verify", "--keep", "--store", store)
    assert kept.exit_code == 3
    assert file.stem in kept.stdout
    assert run("store", "verify", "--store", store, "--json").exit_code == 3
    assert not file.exists()
    assert run("store", "verify", "--store", store).exit_code == 0


@pytest.mark.parametrize("command", [["stats"], ["ls"], ["verify"], ["evict", "--to", "1GiB"], ["rm", "abcdef"]])
def test_store_commands_refuse_a_missing_store_and_create_none(run, tmp_path, command):
    assert_error(run("store", *command, "--store", tmp_path / "nothing"), 3, "nothing")
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("500B", 500),
        ("2GiB", 2 << 30),
        ("2G", 2 << 30),
        ("2GB", 2 * 10**9),
        ("1.5 kb", 1500),
        ("3MiB", 3 << 20),
    ],
)
def test_sizes_are_read_as_written(text, value):
    assert parse_size(text) == value


@pytest.mark.parametrize("text", ["", "GiB", "-1", "2 apples", "1e9"])
def test_an_invalid_size_is_refused(text):
    with pytest.raises(InputError, match="not a size"):
        parse_size(text)


def test_an_error_of_a_command_is_one_line_on_stderr_and_an_exit_code(tmp_path):
    command = [sys.executable, "-m", "cacheblend_rag", "ask", "Why?", "--store", str(tmp_path / "nothing")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 3
    assert result.stdout == ""
    assert result.stderr.startswith("Error: Nothing is indexed in")
    assert result.stderr.count("\n") == 1
