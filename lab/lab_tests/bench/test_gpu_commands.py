"""Tests the commands of `make bench-gpu`, without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from benchmarks import gpu, profile_blend
from cacheblend_rag.cli import app

ROOT = Path(__file__).parents[3]
EVERY = {name: one for engine in ("transformers", "vllm") for name, one in gpu.measurements(engine).items()}


@pytest.mark.parametrize("name", [name for name, one in EVERY.items() if one.arguments[0] == "-m"])
def test_the_command_line_accepts_every_gpu_measurement(name: str) -> None:
    command, arguments = typer.main.get_command(app), list(EVERY[name].arguments[2:])
    while hasattr(command, "commands"):
        command = command.commands[arguments.pop(0)]
    with command.make_context(name, arguments) as context:
        assert context.params["as_json"]


def test_a_result_records_its_command(tmp_path: Path) -> None:
    one = gpu.Measurement(("-c", "print('{\"ttft_s\": 1}')"))
    assert gpu.measure(one, tmp_path / "found.json") is None
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert found == {"command": f"python {' '.join(one.arguments)}", "ttft_s": 1}


def test_a_failing_measurement_leaves_no_result(tmp_path: Path) -> None:
    for code, why in (("raise SystemExit(3)", "exit status 3"), ("print('Not JSON')", "no JSON")):
        assert gpu.measure(gpu.Measurement(("-c", code)), tmp_path / "found.json") == why
    forever = gpu.Measurement(("-c", "import time; time.sleep(60)"), needs_s=0)
    assert gpu.measure(forever, tmp_path / "found.json") == "not done after 0 s"
    assert not list(tmp_path.iterdir())


def test_a_run_continues_where_the_previous_one_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []

    def measure(one: gpu.Measurement, file: Path) -> None:
        measured.append(file.stem)
        file.write_text("{}", encoding="utf-8")

    monkeypatch.setattr(gpu, "gpu_name", lambda: "h200")
    monkeypatch.setattr(gpu, "measure", measure)
    names = list(EVERY)[:3]
    for argv in (["--within", "0"], ["--only", names[0]], ["--only", *names], ["--only", *names]):
        monkeypatch.setattr(sys, "argv", ["gpu.py", "--out", str(tmp_path), *argv])
        with pytest.raises(SystemExit) as ended:
            gpu.main()
        assert ended.value.code == (argv[0] == "--within")
    assert measured == [f"{name}-h200" for name in names]


@pytest.mark.slow
def test_host_time_is_measured_for_prompts_whose_kv_is_placed_at_once() -> None:
    size = ["--layers", "3", "--chunks", "2", "--chunk-tokens", "8", "--rounds", "2"]
    run = [sys.executable, "lab/benchmarks/host_time.py", *size]  # the script fakes CUDA in its process
    lines = subprocess.run(run, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    assert [line[:18].strip() for line in lines[3:]] == ["static-query 15%", "static 15%", "static 5%", "full KV reuse"]


@pytest.mark.slow
def test_a_profile_names_the_operators_of_both_methods(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    size = ["--random-weights", "llama:2x256", "--chunks", "2", "--device", "cpu", "--json"]
    monkeypatch.setattr(sys, "argv", ["profile_blend.py", *size])
    profile_blend.main()
    found = json.loads(capsys.readouterr().out)
    assert set(found["methods"]) == {"full", "blend"}
    assert all("mm" in " ".join(one["name"] for one in m["slowest"]) for m in found["methods"].values())
