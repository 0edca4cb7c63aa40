"""Tests what `make bench-gpu` runs, and what `benchmarks/predict.py` counts, without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer

from benchmarks import gains, gpu, predict
from cacheblend_rag.cli import app
from tests.device import simulated

ROOT = Path(__file__).parents[3]
EVERY = {name: one for engine in ("transformers", "vllm") for name, one in gpu.measurements(engine).items()}


@pytest.mark.parametrize("name", [name for name, one in EVERY.items() if one.arguments[0] == "-m"])
def test_the_command_line_accepts_every_gpu_measurement(name: str) -> None:
    command, arguments = typer.main.get_command(app), list(EVERY[name].arguments[2:])
    while hasattr(command, "commands"):
        command = command.commands[arguments.pop(0)]
    with command.make_context(name, arguments) as context:
        assert context.params["as_json"]


def test_a_result_says_by_which_command_it_was_measured(tmp_path: Path) -> None:
    one = gpu.Measurement(("-c", "print('{\"ttft_s\": 1}')"))
    assert gpu.measure(one, tmp_path / "found.json") is None
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert found == {"command": f"python {' '.join(one.arguments)}", "ttft_s": 1}


def test_a_measurement_that_fails_leaves_no_result(tmp_path: Path) -> None:
    for code, why in (("raise SystemExit(3)", "exit status 3"), ("print('Not JSON')", "no JSON")):
        assert gpu.measure(gpu.Measurement(("-c", code)), tmp_path / "found.json") == why
    forever = gpu.Measurement(("-c", "import time; time.sleep(60)"), needs_s=0)
    assert gpu.measure(forever, tmp_path / "found.json") == "not done after 0 s"
    assert not list(tmp_path.iterdir())


def test_a_run_goes_on_where_the_one_before_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_product_is_one_launch_a_view_none_and_a_number_read_back_waits() -> None:
    with simulated.usable(), torch.inference_mode():
        x = torch.randn(4, 4, device=simulated.NAME)
        with predict.Counter() as counter:
            (x @ x).T[1:].unflatten(0, (3, 1))
        assert (counter.launches, counter.synchronisations) == (1, 0)
        with predict.Counter() as counter:
            (x.sum() + 1).item()
        assert (counter.launches, counter.synchronisations) == (3, 1)


@pytest.mark.slow
def test_the_hosts_time_is_measured_of_prompts_whose_kv_is_placed_at_once() -> None:
    size = ["--layers", "3", "--chunks", "2", "--chunk-tokens", "8", "--rounds", "2"]
    run = [sys.executable, "benchmarks/host_time.py", *size]  # it fakes CUDA in its whole process
    lines = subprocess.run(run, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    assert [line[:18].strip() for line in lines[3:]] == ["static-query 15%", "static 15%", "static 5%", "full KV reuse"]


def test_predicted_work_follows_the_shape() -> None:
    shape = predict.Shape.of("llama-3.1-8b")
    assert 7.9e9 < shape.layers * shape.layer_weights + 2 * shape.other_weights < 8.1e9  # as its name says
    flops, moved = shape.a_pass(1, 0, shape.layers, True)
    assert flops == pytest.approx(2 * (shape.layers * shape.layer_weights + shape.other_weights))
    assert moved == pytest.approx(flops, rel=0.01)  # one token: each weight, two bytes, is read for two FLOPs


def test_kv_that_is_held_in_whole_numbers_takes_half_of_the_bus() -> None:
    shape = predict.Shape.of("llama-3.1-8b")
    assert shape.kv_bytes("none") == 131_072
    assert shape.kv_bytes("int8") == 131_072 * 130 / 256


def test_gains_follow_the_bus_and_how_many_gpus_share_the_work() -> None:
    device = predict.Device(770e12, 4.3e12, 50e9, 20e-6)
    slow = predict.Device(770e12, 4.3e12, 1e9, 20e-6)
    large = replace(predict.Shape.of("llama-3.1-8b"), layers=4)
    with predict.quiet():
        ram, rows, disk, four = (
            gains.gains(large, each, 3, 4096, codec, ranks)
            for each, codec, ranks in ((device, "none", 1), (device, "int8", 1), (slow, "none", 1), (slow, "none", 4))
        )
    assert set(ram) == {"static-query 15%", "static 15%", "static 5%", "full KV reuse"}
    for name in ram:
        assert disk[name] < four[name] < ram[name] <= rows[name]
    assert disk["full KV reuse"] < 1 < ram["static 15%"] < ram["static 5%"] <= ram["full KV reuse"]


def test_a_replayed_pass_begins_behind_its_launches_and_waits_for_each_group_of_layers() -> None:
    device = predict.Device(flops=1.0, memory=1e30, bus=10.0, launch_s=0.01)
    once = predict.Counted(11, 1, 1, marks=(3, 8, 9))
    # Copies begin at .03 and take 4 s, half for each group; the second group's share of the pass is computed behind them.
    assert predict.with_graphs(device, once, [1, 1], [1.0], 40.0) == pytest.approx(0.03 + 4 + 0.5)
    # Where the device takes longer, it begins behind all launches, with what has arrived by then.
    assert predict.with_graphs(device, once, [1, 1], [9.0], 0.4) == pytest.approx(0.09 + 9)
    twice = predict.Counted(13, 1, 1, marks=(3, 8, 9, 12))
    assert predict.with_graphs(device, twice, [1, 1], [1.0, 2.0], 40.0) == pytest.approx(0.03 + 4 + 0.5 + 0.03 + 2)
    # A pass before that needs no stored KV: copies are asked for behind it.
    assert predict.with_graphs(device, once, [1, 1], [5.0, 1.0], 40.0) == pytest.approx(5 + 4 + 0.5)


@pytest.mark.slow
def test_a_profile_names_the_operators_of_both_ways() -> None:
    run = [sys.executable, "benchmarks/profile_blend.py", "--random-weights", "llama:2x256", "--chunks", "2", "--json"]
    found = json.loads(subprocess.run(run, cwd=ROOT, check=True, capture_output=True, text=True).stdout)
    assert set(found["methods"]) == {"full", "blend"}
    assert all("mm" in " ".join(one["name"] for one in m["slowest"]) for m in found["methods"].values())
