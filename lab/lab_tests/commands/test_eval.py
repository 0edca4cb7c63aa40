"""Tests `eval` on the command line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.command_line import as_json

pytestmark = pytest.mark.slow


@pytest.fixture
def questions(tmp_path) -> Path:
    rows = [
        {
            "question": f"Who is {name}?",
            "answers": [name],
            "chunks": ["The Marlow observatory stands on a hill.", f"Its director is {name}.", "It rained."],
            "kind": kind,
        }
        for name, kind in (("Ada", "single"), ("Mira", "cross"))
    ]
    file = tmp_path / "questions.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def test_eval_json_has_every_method_and_the_names_of_its_files(run, model_dir, questions, tmp_path):
    args = ("--model", model_dir, "--dataset", questions, "--max-tokens", "3", "--out", tmp_path / "out", "--json")
    found = as_json(run("eval", *args, "--methods", "full,prefix,reuse,blend,map_reduce,random@0.5", "--ratio", "0.3"))
    assert list(found["methods"]) == ["full", "prefix", "reuse", "blend", "map_reduce", "random@0.5"]
    wanted = {
        "n",
        "em",
        "f1",
        "rouge_l",
        "ttft_s",
        "computed_tokens",
        "reused_tokens",
        "first_token_kl",
        "agreement_with_full",
    }
    for method in found["methods"].values():
        assert wanted <= method.keys()
        assert method["n"] == 2
        assert {"em", "ttft_s", "computed_tokens"} <= method["intervals_95"].keys()
    assert set(found["kinds"]) == {"single", "cross"}
    rows = [json.loads(line) for line in Path(found["answers_file"]).read_text().splitlines()]
    assert len(rows) == 1 + 2 * 6
    page = Path(found["report_file"]).read_text()
    for case in found["worst"]:
        assert case["question"] in page
    assert "every answer is the one" in page or found["worst"]
    assert not re.search(r"(src|href|url)\s*[=(]\s*[\"']?(https?:)?//", page.replace("xlink:href", "href"))


def test_eval_prints_a_table(run, model_dir, questions, tmp_path):
    result = run("eval", "--model", model_dir, "--dataset", questions, "--max-tokens", "2", "--out", tmp_path)
    assert result.exit_code == 0, result.stderr
    for text in (
        "full recompute",
        "prefix caching",
        "full KV reuse",
        "blend",
        "cross, 1 question\n",
        "answers-questions-",
    ):
        assert text in result.stdout


def test_eval_prints_skipped_rows_and_no_interval_of_zero_width(run, model_dir, questions, tmp_path):
    questions.write_text(
        questions.read_text().split("\n")[0] + '\n{"question": "Who?", "chunks": ["x"], "answers": 3}\n'
    )
    args = (
        "--model",
        model_dir,
        "--dataset",
        questions,
        "--max-tokens",
        "2",
        "--out",
        tmp_path,
        "--methods",
        "full,prefix",
    )
    result = run("eval", *args)
    assert result.exit_code == 0, result.stderr
    assert "skipped  1 row that" in result.stdout
    assert "questions.jsonl, line 2: an answer must be a string, found int" in result.stdout
    assert "xxh3_128:" in result.stdout
    assert "100.0% [2.5%, 100.0%]" in result.stdout
    assert "[100.0%, 100.0%]" not in result.stdout
    assert "[0.0%, 0.0%]" not in result.stdout
    found = as_json(run("eval", *args, "--json"))
    assert len(found["skipped"]) == 1
    assert found["methods"]["full"]["intervals_95"]["f1"] is None
    page = Path(found["report_file"]).read_text()
    assert "100.0 – 100.0" not in page
    assert "Skipped rows" in page


def test_eval_separates_the_effect_of_reordering_from_the_effect_of_reuse(run, model_dir, questions, tmp_path):
    args = ("--model", model_dir, "--dataset", questions, "--max-tokens", "2", "--out", tmp_path)
    methods = ("--methods", "full,reorder,reorder+blend")
    result = run("eval", *args, *methods)
    assert result.exit_code == 0, result.stderr
    assert "of its own order" in result.stdout
    assert "prefix caching, reordered" in result.stdout
    found = as_json(run("eval", *args, *methods, "--json"))
    assert found["methods"]["reorder"]["agreement_with_reordered_full"] == 1
    assert found["methods"]["reorder+blend"]["background_tokens"] > 0
    page = Path(found["report_file"]).read_text()
    assert "agrees with full of its own order" in page
    assert "tokens computed behind the answer" in page
    assert "of its own order" not in run("eval", *args, "--methods", "full,prefix").stdout


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("--dataset", "nosuch"), "nosuch"),
        (("--dataset", "musique"), "--data"),
        (("--methods", "full,magic"), "magic"),
        (("--policy", "magic"), "magic"),
        (("--kinds", "riddle"), "riddle"),
    ],
)
def test_eval_names_unknown_options(run, model_dir, tmp_path, args, named, monkeypatch):
    monkeypatch.delenv("CACHEBLEND_DATA", raising=False)
    result = run("eval", "--model", model_dir, "--out", tmp_path, *args)
    assert result.exit_code == 2
    assert named in result.stderr


def test_a_missing_data_set_is_named_before_a_model_is_loaded(run, tmp_path):
    wrong = run("eval", "--model", tmp_path / "nowhere", "--dataset", "qestions.jsonl", "--out", tmp_path)
    assert wrong.exit_code == 2 and "no data set 'qestions.jsonl'" in wrong.stderr


def test_the_figures_command_makes_figures_and_refuses_unknown_numbers(run, model_dir, questions, tmp_path):
    result = run("figures", "--model", model_dir, "--dataset", questions, "--only", "8", "--out", tmp_path / "r")
    assert result.exit_code == 0, result.stderr
    assert Path(result.stdout.strip()) == tmp_path / "r" / "index.html"
    assert (tmp_path / "r" / "figure-08.csv").read_text().startswith("prompt,layer,spearman")
    assert run("figures", "--model", model_dir, "--only", "3", "--out", tmp_path).exit_code == 2


TINY = ("--random-weights", "llama:2x256", "--repeat", "1", "--threads", "1")


@pytest.fixture
def short_chunks(monkeypatch):
    """Use chunks of 64 tokens in place of a sweep's 512."""
    monkeypatch.setattr("cacheblend_lab.bench.sweeps.CHUNK_TOKENS", 64)


@pytest.mark.usefixtures("short_chunks")
def test_sweeps_print_a_table_or_json(run):
    for args, axis in ((("ratio", "--ratios", "0.2"), "ratio"), (("batch", "--sizes", "1"), "batch")):
        points = as_json(run("bench", *args, *TINY, "--json"))["points"]
        assert {point["method"] for point in points} >= {"full", "reuse", "blend"}
        assert all(axis in point for point in points)
    shown = run("bench", "chunks", "--counts", "1,2", "--lengths", "", *TINY).stdout
    assert "full recompute" in shown
    assert " ms" in shown


@pytest.mark.usefixtures("short_chunks")
def test_a_sweep_of_devices_compares_the_blend_with_loading_and_recomputing_alone(run):
    slow = ("devices", "--bandwidths", "0.05", "--policy", "static", "--ratio", "0.05")
    found = as_json(run("bench", *slow, *TINY, "--json"))["points"]
    assert {point["bytes_per_s"] for point in found} == {5e7}
    points = {point["method"]: point for point in found}
    blend, ready = points["blend"], points["ready"]
    assert blend["bound_s"] == max(blend["loaded_bytes"] / 5e7, ready["ttft_s"])
    assert blend["loaded_bytes"] == ready["loaded_bytes"] > 0
    assert "of the bound" in run("bench", *slow, *TINY).stdout


def test_bench_throughput_and_streams_run_from_the_command_line(run):
    tiny = ("--random-weights", "llama:2x256", "--chunks", "2", "--chunk-tokens", "32", "--threads", "1")
    load = ("bench", "throughput", *tiny, "--corpus", "2", "--requests", "2", "--target-ttft", "1e-6")
    found = run(*load, "--methods", "full,blend")
    assert "requests/s" in found.stdout
    assert "prefix caching" not in found.stdout
    for wrong, why in (
        ("full,prefix", "full and blend must be among them"),
        ("full,blend,best", "engine has full, prefix, blend"),
    ):
        assert why in " ".join(run(*load, "--methods", wrong).stderr.split())
    assert "times the requests of full recompute" in found.stdout
    few = ("--engine", "transformers", "--prompts", "1", "--repeat", "1")
    assert as_json(run("bench", "streams", *tiny, *few, "--json"))["methods"]["blend"]["tokens"] > 0


def test_sweeps_name_an_unreadable_list(run):
    result = run("bench", "batch", "--sizes", "1,x")
    assert result.exit_code == 2
    assert "--sizes" in result.stderr


def test_figures_refuse_vllm(run):
    result = run("figures", "--engine", "vllm")
    assert result.exit_code != 0
    assert "--engine transformers" in result.stderr
