"""Tests that a machine runs a model's parity gate once, and again after a change that the gate depends on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from transformers import AutoModelForCausalLM

from cacheblend_rag.blending import gate
from cacheblend_rag.blending.settings import BlendSettings
from cacheblend_rag.engines.transformers import TransformersEngine, judging
from cacheblend_rag.store import open_store
from tests.blending import reference
from tests.blending.families import _BASE, make_model
from tests.blending.prompts import Scene
from tests.blending.test_parity import blended_logits
from tests.conftest import tokenizer_named

_SHAPE = {**_BASE, "vocab_size": 448}


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CACHEBLEND_HOME", str(tmp_path / "home"))
    make_model(hf.Qwen3Config(**_SHAPE, head_dim=16)).save_pretrained(tmp_path / "model")
    tokenizer_named("byte_level").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def compared(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., bool]:
    """Return a function that starts an engine and returns whether the gate compared anything."""
    compare, calls = gate._compare, list[Any]()

    def noted(*arguments: Any) -> Any:
        calls.append(arguments)
        return compare(*arguments)

    monkeypatch.setattr(gate, "_compare", noted)

    def start(model: Any = directory, **options: Any) -> bool:
        calls.clear()
        with TransformersEngine(model, device="cpu", **options) as engine:
            assert engine.gate.passed, engine.gate.reason
            assert engine.gate.errors
            assert 0 < engine.gate.token_s < 1
        return bool(calls)

    return start


def test_the_gate_compares_once_for_each_state_of_model_store_libraries_and_code(
    compared: Callable[..., bool], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert [compared(), compared()] == [True, False]
    for change in ({"dtype": torch.bfloat16}, {"store": open_store("ram://1MiB?codec=int8")}):
        assert [compared(**change), compared(**change)] == [True, False]
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "changed.py").write_text("")
    for place, name, other in (
        (torch, "__version__", "1.0.0"),
        (judging, "cpu_name", lambda: "another"),
        (judging, "_PACKAGE", tmp_path / "code"),
    ):
        monkeypatch.setattr(place, name, other)
        assert [compared(), compared()] == [True, False], name
    make_model(hf.Qwen3Config(**_SHAPE, head_dim=16), seed=1).save_pretrained(tmp_path / "model")
    assert [compared(), compared()] == [True, False], "other weights"


def test_a_model_from_memory_is_compared_each_time(compared: Callable[..., bool], directory: Path) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(directory)
    options = {"tokenizer": tokenizer_named("byte_level")}
    assert [compared(), compared(loaded, **options), compared(loaded, **options)] == [True, True, True]


def test_a_damaged_gate_report_is_replaced_by_a_new_comparison(compared: Callable[..., bool], tmp_path: Path) -> None:
    compared()
    for damage in ("[", "[]", json.dumps({"passed": True, "unknown": 1})):
        for file in (tmp_path / "home" / "gates").iterdir():
            file.write_text(damage)
        assert compared()


def test_a_failed_gate_is_not_remembered(
    compared: Callable[..., bool], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, pytest.warns(UserWarning, match="without blending"):
        patch.setattr(gate, "TOLERANCE", {torch.float32: 1e-12})
        assert not TransformersEngine(directory, device="cpu").gate.passed
    assert compared()


def test_a_blend_with_a_remembered_gate_equals_the_reference(compared: Callable[..., bool], directory: Path) -> None:
    compared()
    scene = Scene()
    with TransformersEngine(directory, device="cpu", header=scene.header) as engine:
        engine.precompute(scene.chunks)
        got, *_ = blended_logits(engine, scene, BlendSettings(0.3, "hkvd", (1,)))
        want = reference.blend(engine.runner.model, scene.header, scene.parts(), 0.3)
    torch.testing.assert_close(got, want.logits, atol=1e-4, rtol=0)


def test_the_gate_report_keeps_the_lowest_time_of_a_pass(
    compared: Callable[..., bool], tmp_path: Path, directory: Path
) -> None:
    compared()
    (file,) = (tmp_path / "home" / "gates").iterdir()
    report = json.loads(file.read_text())
    for token_s, stays in ((1e-12, True), (100.0, False)):
        file.write_text(json.dumps({**report, "pass_s": 0.0, "token_s": token_s}))
        with TransformersEngine(directory, device="cpu") as engine:
            assert (engine.gate.token_s == token_s) == stays
