"""`bench` and `doctor` on the command line."""

from __future__ import annotations

import ast
import os
import subprocess
import sys

import pytest

from tests.cli.conftest import as_json

pytestmark = pytest.mark.slow

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
    for name in ("full recompute", "prefix caching", "full KV reuse", "blend, 15%", "plain transformers"):
        assert name in result.stdout


def test_bench_ttft_cold_on_disk_shows_the_disks_own_limit(run, tmp_path):
    result = run("bench", "ttft", *TINY, "--kv", "disk", "--cold", "--dir", tmp_path)
    assert result.exit_code == 0, result.stderr
    assert "plain cold read" in result.stdout


def test_bench_index_prints_a_ratio(run):
    assert as_json(run("bench", "index", *TINY, "--json"))["rate_index_vs_plain"] > 0
    assert "of plain" in run("bench", "index", *TINY).stdout


def test_bench_score_gives_the_same_likelihoods_either_way(run):
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


def test_doctor_reports_gate_rotation_profile_bandwidth_and_an_estimate(run, model_dir, tmp_path):
    found = as_json(run("doctor", "--model", model_dir, "--store", tmp_path, "--json"))
    assert found["blended"] is True
    assert max(found["gate_errors"].values()) < found["gate_limit"]
    assert found["rotation"] == [{"layers": [0, 1, 2, 3], "layout": "half", "table": 0}]
    assert list(found["codecs"]) == ["fp8", "int8", "k16v8"]
    assert all(0 < kl < found["codec_limit"] for kl in found["codecs"].values())
    assert found["profile_origin"].startswith("defaults")
    assert {"ram copy", "disk read, cold", "disk read, warm"} <= found["bandwidth"].keys()
    assert found["kv_bytes_per_token"] == 2 * 4 * 2 * 16 * 4  # K and V, layers, KV heads, head dim, fp32
    assert 0 < found["estimate"]["blend_s"] < found["estimate"]["full_s"]
    text = run("doctor", "--model", model_dir).stdout
    assert "blended" in text
    assert "not measured" in text


def test_doctor_says_why_a_model_is_not_blended(run, tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    from tests.conftest import byte_level

    tokenizer = byte_level()
    config = GPT2Config(vocab_size=len(tokenizer), n_embd=32, n_layer=2, n_head=2, n_positions=128)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    result = run("doctor", "--model", tmp_path)
    assert result.exit_code == 0, result.stderr
    assert "no: keys of layer 0 do not move" in result.stdout
    assert "served by ordinary prefill" in result.stderr


def test_a_missing_model_is_exit_code_4(run, tmp_path):
    result = run("doctor", "--model", tmp_path / "nowhere")
    assert result.exit_code == 4
    assert "nowhere" in result.stderr


def test_help_imports_no_torch():
    code = (
        "import sys, typer; from cacheblend_rag.cli import app; "
        "assert len(list(typer.main.get_command(app).commands.values())) > 12; "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_command_imports_no_other_command():
    code = (
        "import sys; from cacheblend_rag.cli import app; app(['ask', '--help'], standalone_mode=False); "
        "print([name for name in sys.modules if name.startswith(('cacheblend_rag.cli.', 'cacheblend_rag.lab'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    loaded = ast.literal_eval(done.stdout.splitlines()[-1])
    assert "cacheblend_rag.cli.ask" in loaded
    assert set(loaded) <= {f"cacheblend_rag.cli.{name}" for name in ("ask", "chat", "citations", "explain")}


def test_bench_needs_neither_retrieval_nor_document_libraries():
    code = (
        "import sys\n"
        "for name in ('faiss', 'sentence_transformers', 'pypdf', 'bs4'): sys.modules[name] = None\n"
        "sys.argv = ['cacheblend', 'bench', 'ttft', '--random-weights', 'llama:2x256', '--chunks', '2', '--chunk-tokens', '16']\n"
        "from cacheblend_rag.cli import main; main()"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0


def test_an_unexpected_error_says_so_without_a_traceback():
    code = (
        "import cacheblend_rag.lab.bench as b, sys; from cacheblend_rag.cli import main\n"
        "def broken(*a): raise ZeroDivisionError('boom')\n"
        "b.bench_index = broken; sys.argv = ['cacheblend', 'bench', 'index', '--random-weights', 'llama:2x256']; main()"
    )
    env = {k: v for k, v in os.environ.items() if k != "CACHEBLEND_DEBUG"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env)
    assert result.returncode == 70
    assert "unexpected ZeroDivisionError: boom" in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_bench_controller_prints_its_worst_choice(run):
    found = as_json(run("bench", "controller", "--json"))
    assert found["worst_regret"] == max(point["regret"] for point in found["points"]) < 1.1
    assert {point["model"] for point in found["points"]} == {"llama-3.1-8b", "qwen2.5-7b", "llama-3.3-70b"}
    shown = run("bench", "controller", "--ratio", "0.05").stdout
    assert "worst regret" in shown
    assert "At worst the first token comes 1.0" in shown


@pytest.mark.slow
def test_store_calibrate_lets_auto_decide(run, model_dir, tmp_path):
    """From nothing: index, calibrate, ask at auto; the answer says what the controller expected."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.txt").write_text("The observatory was founded in 1911. " * 40, encoding="utf-8")
    where = ("--store", tmp_path / "store", "--model", model_dir)
    assert run("index", tmp_path / "docs", *where).exit_code == 0
    costs = as_json(run("store", "calibrate", *where, "--json"))
    assert set(costs["tiers"]) == {"ram", "disk"}
    assert {tier["tier"] for tier in costs["plan"]["tiers"]} == {"ram", "disk"}
    said = run("store", "calibrate", *where).stdout
    assert "GB/s" in said
    assert "A prompt of 6 chunks of 512 tokens takes" in said
    answer = as_json(run("ask", "When was it founded?", *where, "--ratio", "auto", "--json"))
    assert "an ordinary prefill in" in answer["reason"]


PRICES = "[compute]\nhour = 2.5\n[ram]\ngib_month = 3\n[s3]\ngib_month = 0.02\nbytes_per_s = 5e7\nlatency_s = 0.03\n"


@pytest.mark.slow
def test_store_plan_says_what_a_corpus_costs_where(run, model_dir, tmp_path):
    (tmp_path / "prices.toml").write_text(PRICES, encoding="utf-8")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.txt").write_text("The observatory was founded in 1911. " * 40, encoding="utf-8")
    asked = ("store", "plan", "--model", model_dir, "--prices", tmp_path / "prices.toml", "--chunks", "1e6")
    refused = run(*asked)
    assert refused.exit_code == 2 and "Run `cacheblend store calibrate`" in refused.stderr
    run("index", tmp_path / "docs", "--store", tmp_path / "store", "--model", model_dir)
    run("store", "calibrate", "--store", tmp_path / "store", "--model", model_dir)
    plan = as_json(run(*asked, "--per-month", "1e5", "--ratio", "0.15", "--json"))
    assert plan["ratio"] == 0.15 and plan["cheapest"] in ("ram", "s3", None)
    assert [tier["tier"] for tier in plan["tiers"]] == ["s3", "ram"]
    assert plan["tiers"][1]["keeping"] == pytest.approx(150 * plan["tiers"][0]["keeping"])
    shown = run(*asked).stdout
    assert "1,000,000 chunks of 512 tokens, 0 prompts a month of 6 chunks" in shown
    assert "no KV kept" in shown and "computing" in shown
