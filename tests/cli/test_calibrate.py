"""Tests `doctor --calibrate` on the command line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.command_line import as_json

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


def prompts_file(directory: Path, names: tuple[str, ...] = ("Ada", "Mira")) -> Path:
    lines = [
        {
            "question": f"Who is {name}?",
            "chunks": [f"{name} keeps the light of the harbour.", "It was founded in 1911 by her."],
        }
        for name in names
    ]
    file = directory / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    return file


def test_calibrate_keeps_a_profile_that_the_next_command_uses(run, model_dir, home, tmp_path):
    file = prompts_file(tmp_path)
    arguments = [
        "doctor",
        "--calibrate",
        "--model",
        model_dir,
        "--prompts",
        file,
        "--agreement",
        0.5,
        "--confidence",
        0.5,
    ]
    found = as_json(run(*arguments, "--json"))
    assert Path(found["file"]).parent == home / "profiles"
    assert (found["prompts"], found["needed"]) == (2, 1)
    assert found["verdict"] in ("shown", "do not blend")  # one prompt suffices for this low standard
    diagnosis = as_json(run("doctor", "--model", model_dir, "--json"))
    assert diagnosis["profile_origin"] == found["file"]
    for name in ("policy", "ratio", "reuse", "check_layers"):
        assert diagnosis[name] == found["profile"][name]


def test_a_model_without_an_accurate_blend_is_not_blended_by_default(run, model_dir, documents, tmp_path):
    file = prompts_file(tmp_path)
    result = run("doctor", "--calibrate", "--model", model_dir, "--prompts", file, "--agreement", 0.99)
    assert result.exit_code == 0, result.stderr
    assert "that takes 299" in result.stdout
    assert "not blended until shown" in result.stdout
    assert "do not blend: prefix caching" in run("doctor", "--model", model_dir).stdout
    store = tmp_path / "store"
    run("index", documents, "--store", store, "--model", model_dir, "--chunk-tokens", 40)
    ask = ["ask", "Who is the director?", "--store", store, "--model", model_dir, "--max-tokens", 2, "--json"]
    assert as_json(run(*ask))["usage"]["recomputed_tokens"] == 0
    assert as_json(run(*ask, "--ratio", 0.5))["usage"]["recomputed_tokens"] > 0  # a given ratio blends


def test_calibrate_writes_the_profile_beside_a_model_if_asked(run, model_dir, tmp_path):
    file = prompts_file(tmp_path)
    run("doctor", "--calibrate", "--model", model_dir, "--prompts", file, "--output", tmp_path)
    found = json.loads((tmp_path / "cacheblend.json").read_text())
    assert {"ratio", "check_layers", "widths", "reuse", "text"} <= found.keys()


def test_calibrate_on_a_store_asks_about_its_own_documents(run, model_dir, documents, tmp_path):
    store = tmp_path / "store"
    run("index", documents, "--store", store, "--model", model_dir, "--chunk-tokens", 40)
    arguments = ["doctor", "--calibrate", "--model", model_dir, "--store", store, "--count", 2, "--json"]
    assert as_json(run(*arguments))["prompts"] == 2
    (tmp_path / "q.jsonl").write_text('{"question": "When was it founded?"}\n')
    assert as_json(run(*arguments, "--prompts", tmp_path / "q.jsonl"))["prompts"] == 1


def test_calibrate_on_documents_needs_no_questions(run, model_dir, tmp_path):
    text = (ROOT / "docs/architecture.md").read_text("utf-8")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "readme.md").write_text(text[:6000])
    arguments = ["doctor", "--calibrate", "--model", model_dir, "--count", 2, "--json"]
    found = as_json(run(*arguments, "--documents", tmp_path / "docs"))
    assert (found["prompts"], found["standard"]["by"]) == (2, "likelihood")
    (tmp_path / "few").mkdir()
    (tmp_path / "few" / "short.md").write_text("Too short.")
    result = run(*arguments, "--documents", tmp_path / "few")
    assert result.exit_code == 2
    assert "1 chunks" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--agreement", 1], "agreement is 1"),
        (["--confidence", 0.1], "confidence is 0.1"),
        (["--prompts", "a.jsonl", "--documents", "b"], "not both"),
        (["--agreement", 0.9, "--as-near-as", "8-bit"], "--as-near-as or --agreement"),
        (["--quick", "--count", 3], "--quick or --count"),
        (["--as-near-as", "f1", "--documents", "b"], "needs questions with right answers"),
    ],
)
def test_wrong_options_of_a_calibration_are_named_in_the_error(run, model_dir, tmp_path, arguments, named):
    given = [] if "--documents" in arguments else ["--prompts", prompts_file(tmp_path)]
    result = run("doctor", "--calibrate", "--model", model_dir, *given, *arguments)
    assert result.exit_code == 2
    assert named in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["--quick", "--count", 3],
        ["--agreement", 0.9, "--as-near-as", "8-bit"],
        ["--prompts", "a.jsonl", "--documents", "b"],
        ["--as-near-as", "f1", "--documents", "b"],
    ],
)
def test_options_that_contradict_each_other_are_refused_before_a_model_is_loaded(
    run, model_dir, monkeypatch, arguments
):
    monkeypatch.setattr("cacheblend_rag.cli.doctor.with_model", lambda *_: pytest.fail("loading began"))
    assert run("doctor", "--calibrate", "--model", model_dir, *arguments).exit_code == 2


@pytest.mark.parametrize("source", ["--documents", "--count"])
def test_too_few_prompts_are_reported_before_measuring(run, model_dir, tmp_path, monkeypatch, source):
    monkeypatch.setattr("cacheblend_rag.calibrate.calibrate_engine", lambda *_, **__: sys.exit("measuring began"))
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").write_text((ROOT / "docs/architecture.md").read_text("utf-8")[:2000])
    given, prompts, advice = {
        "--documents": ([tmp_path / "docs", "--quick"], None, "add documents"),
        "--count": ([2, "--prompts", prompts_file(tmp_path)], 2, "give --count 20 or more"),
    }[source]
    said = run("doctor", "--calibrate", "--model", model_dir, source, *given).stderr
    assert f"Too few prompts: {prompts or ''}" in said and "where 20 can show" in said and advice in said
    assert "measuring began" not in said.partition("Too few")[0]


def test_enough_prompts_give_no_warning(run, model_dir, tmp_path):
    arguments = ["doctor", "--calibrate", "--model", model_dir, "--prompts", prompts_file(tmp_path)]
    assert "Too few" not in run(*arguments, "--agreement", 0.5, "--confidence", 0.5).stderr


def test_the_default_standard_of_calibration_is_six_bit_weights(run, model_dir, home, tmp_path):
    arguments = ["doctor", "--calibrate", "--quick", "--model", model_dir, "--prompts", prompts_file(tmp_path)]
    found = as_json(run(*arguments, "--json"))
    assert found["standard"]["bits"] == 6
    assert found["needed"] == 20
    assert {each["policy"] for each in found["measured"]} <= {"full-reuse", "static", "query", "static-query"}
    text = run(*arguments, "--as-near-as", "4-bit").stdout
    assert "weights of 4 bits" in text
    assert text.rstrip().endswith(found["file"])
    assert not list((home / "calibrations").iterdir())  # measurements are kept only until the calibration has ended


def test_measurements_are_kept_if_the_profile_cannot_be_written(run, model_dir, home, tmp_path):
    arguments = ["doctor", "--calibrate", "--model", model_dir, "--prompts", prompts_file(tmp_path), "--agreement", 0.5]
    (tmp_path / "file").write_text("")
    result = run(*arguments, "--output", tmp_path / "file")
    assert result.exit_code == 2
    assert "What was measured is kept" in result.stderr
    assert list((home / "calibrations").iterdir())
    assert run(*arguments).exit_code == 0
    assert not list((home / "calibrations").iterdir())


def test_calibration_by_a_metric_needs_right_answers_that_the_model_gives(run, model_dir, tmp_path):
    file, store = tmp_path / "questions.jsonl", tmp_path / "store"
    row = {"question": "Who is Ada?", "answers": ["the keeper of the light"], "chunks": ["Ada keeps it.", "It is old."]}
    file.write_text(json.dumps(row))
    arguments = ["doctor", "--calibrate", "--model", model_dir, "--as-near-as", "em"]
    for given in (["--prompts", file], ["--prompts", file, "--store", store]):
        result = run(*arguments, *given)
        assert result.exit_code == 2
        assert "Give questions that this model can answer" in result.stderr
    file.write_text(json.dumps({"question": "Who is Ada?"}))
    result = run(*arguments, "--prompts", file, "--store", store)
    assert '"answers": ["..."]' in result.stderr


def test_a_stopped_calibration_prints_how_to_continue(run, model_dir, home, tmp_path, monkeypatch):
    from cacheblend_rag.calibrate.search import Search

    arguments = ["doctor", "--calibrate", "--model", model_dir, "--prompts", prompts_file(tmp_path), "--agreement", 0.5]
    with monkeypatch.context() as patched:
        patched.setattr(Search, "run", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
        result = run(*arguments)
    assert "the same command goes on" in result.stderr
    assert not (home / "profiles").exists()
    assert list((home / "calibrations").iterdir())
    assert run(*arguments).exit_code == 0


def test_calibration_without_prompts_is_refused_before_a_model_is_loaded(run, monkeypatch):
    monkeypatch.setattr("cacheblend_rag.cli.doctor.with_model", lambda *_: pytest.fail("loading began"))
    refused = run("doctor", "--calibrate", "--count", 3)
    assert refused.exit_code == 2 and "--documents DIR" in refused.stderr


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("", "empty"),
        ("not json\n", "line 1"),
        ('{"question": "a"}\n{"chunks": []}\n', "line 2"),
        ('{"question": "a"}', "--store"),
        ('\ufeff{"question": "a\u2028b"}', "--store"),
    ],
)
def test_unusable_prompts_are_named_in_the_error(run, model_dir, tmp_path, content, named):
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    result = run("doctor", "--calibrate", "--model", model_dir, "--prompts", file)
    assert result.exit_code == 2
    assert named in result.stderr
