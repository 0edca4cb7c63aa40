"""Tests `bench` on the command line."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.command_line import as_json

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("collected")]

TINY = ["--random-weights", "llama:2x256", "--chunks", 2, "--chunk-tokens", 20, "--repeat", 1, "--device", "cpu"]


def test_bench_ttft_prints_the_documented_json(run):
    result = as_json(
        run("bench", "ttft", "--engine", "transformers", *TINY, "--question-tokens", 8, "--ratio", 0.15, "--json")
    )
    assert {"engine", "model", "settings", "methods", "speedup_blend_vs_full"} <= result.keys()
    assert set(result["methods"]) == {"full", "prefix", "reuse", "blend"}
    assert all({"ttft_s", "computed_tokens"} <= method.keys() for method in result["methods"].values())


def test_bench_ttft_for_people_names_every_method(run):
    result = run("bench", "ttft", *TINY)
    assert result.exit_code == 0, result.stderr
    for name in ("full recompute", "prefix caching", "full KV reuse", "blend, 50%", "plain transformers"):
        assert name in result.stdout


def test_bench_ttft_cold_on_disk_prints_the_disks_read_limit(run, tmp_path):
    result = run("bench", "ttft", *TINY, "--kv", "disk", "--cold", "--dir", tmp_path)
    assert result.exit_code == 0, result.stderr
    assert "plain cold read" in result.stdout


def test_bench_index_prints_a_ratio(run):
    assert as_json(run("bench", "index", *TINY, "--json"))["rate_index_vs_plain"] > 0
    assert "of plain" in run("bench", "index", *TINY).stdout


def test_bench_score_gives_equal_likelihoods_with_and_without_cached_kv(run):
    found = as_json(run("bench", "score", *TINY, "--question-tokens", 8, "--answer-tokens", 3, "--json"))
    assert set(found["methods"]) == {"cached", "prefill"} and found["speedup"] > 0
    assert found["largest_difference"] < 1e-4
    shown = run("bench", "score", *TINY)
    assert shown.exit_code == 0 and "score over the chunk's stored KV" in shown.stdout


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--random-weights", "gpt:2x2"], "gpt:2x2"),
        (["--random-weights", "llama:2x100"], "multiple of 256"),
        (["--cold", *TINY], "--kv disk"),
        (["--model", "a", *TINY], "not both"),
        (["--ratio", "1.5", *TINY], "ratio is 1.5"),
        (["--policy", "best", *TINY], "known ones: static, static-query, hkvd"),
        (["--check-layers", "2,1", *TINY], "ascending"),
        (["--check-layers", "7", *TINY], "layers 1 to 1"),
        (["--device", "abacus", *TINY[:-2]], "abacus"),
        (["--dtype", "int8", *TINY], "int8"),
    ],
)
def test_a_bad_option_is_named_with_exit_code_2_and_without_a_traceback(run, args, named):
    result = run("bench", "ttft", *args)
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: ")
    assert named in result.stderr
    assert result.stdout == ""


def test_bench_does_not_need_retrieval_or_document_libraries():
    code = (
        "import sys\n"
        "for name in ('faiss', 'sentence_transformers', 'pypdf', 'bs4'): sys.modules[name] = None\n"
        f"sys.argv = ['cacheblend', 'bench', 'ttft', *{[*map(str, TINY)]}]\n"
        "from cacheblend_rag.cli import main; main()"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0


def test_bench_controller_prints_its_worst_choice(run, monkeypatch):
    found = as_json(run("bench", "controller", "--json"))
    assert found["worst_regret"] == max(point["regret"] for point in found["points"]) < 1.1
    assert {point["model"] for point in found["points"]} == {"llama-3.1-8b", "qwen2.5-7b", "llama-3.3-70b"}
    monkeypatch.setattr("cacheblend_lab.bench.bench_controller", lambda _: found)  # one measurement is enough
    shown = run("bench", "controller").stdout
    assert "worst regret" in shown
    assert "At worst the first token comes 1.0" in shown
