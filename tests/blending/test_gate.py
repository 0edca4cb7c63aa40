"""Tests the errors that the parity gate must detect."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from cacheblend_rag.blending.gate import CODEC_LIMIT, TOLERANCE, run_gate
from cacheblend_rag.blending.rope import Rope
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.engines.transformers.attention import Queries
from cacheblend_rag.engines.transformers.target import ModelRunner, TransformersSubject
from cacheblend_rag.store import codec
from cacheblend_rag.store.kv import LayerKV
from tests.blending.families import _BASE, BLENDED, make_model

PAST = "exact KV from other positions, past a window"


def gate(window: int | None, subject: type[TransformersSubject] = TransformersSubject) -> Any:
    return run_gate(subject(ModelRunner(make_model(hf.MistralConfig(**_BASE, sliding_window=window)))))[0]


def test_a_window_ignored_by_the_blend_fails_the_gate_although_its_other_prompts_are_shorter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attend = Queries.attend

    def forgetful(self: Any, query: Any, key: Any, value: Any, scale: Any, window: Any) -> Any:
        return attend(self, query, key, value, scale, None)

    monkeypatch.setattr(Queries, "attend", forgetful)
    report = gate(100)
    assert not report.passed
    assert [name for name, error in report.errors.items() if error > TOLERANCE[torch.float32]] == [PAST]


_OFF: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "not moved": lambda source, target: source,
    "four positions off": lambda source, target: target + 4,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_keys_at_the_wrong_place_fail_the_gate_in_every_precision(
    family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = TransformersSubject(ModelRunner(make_model(BLENDED[family](), dtype)))
    assert run_gate(subject)[0].passed
    right = Rope.rotations
    for name, off in _OFF.items():
        monkeypatch.setattr(Rope, "rotations", lambda rope, a, b, off=off: right(rope, a, off(a, b)))
        report = run_gate(subject)[0]
        assert not report.passed, name
        assert "exact KV from other positions" in report.reason, name


@pytest.mark.parametrize(("window", "looked"), [(None, False), (20, False), (30, True), (512, True), (513, False)])
def test_the_gate_checks_positions_past_a_window_if_the_window_is_cheap(window: int | None, looked: bool) -> None:
    report = gate(window)
    assert report.passed, report.reason
    assert (PAST in report.errors) is looked


def test_the_gate_does_not_check_past_a_window_without_room_for_the_prompt() -> None:
    class Small(TransformersSubject):
        def fits(self, tokens: int) -> bool:
            return tokens <= 150

    assert PAST in gate(80, Small).errors
    report = gate(120, Small)
    assert report.passed
    assert PAST not in report.errors


@pytest.mark.parametrize("family", ["llama", "gemma3", "mixtral", "deepseek_v2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codecs_of_tiers_pass_the_gate_with_a_model(family: str, dtype: torch.dtype) -> None:
    subject = TransformersSubject(ModelRunner(make_model(BLENDED[family](), dtype)))
    report = run_gate(subject, ("raw", "int8"))[0]
    assert report.passed, report.reason
    assert list(report.codecs) == ["int8"]
    assert all(0 < kl < CODEC_LIMIT for kl in report.codecs.values())


def test_a_codec_that_returns_nan_fails_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str, layer: LayerKV) -> LayerKV:
        return LayerKV(layer.k, layer.v * float("nan"))

    monkeypatch.setattr("cacheblend_rag.blending.gate.through", broken)
    report = run_gate(TransformersSubject(ModelRunner(make_model(BLENDED["llama"]()))), ("int8",))[0]
    assert not report.passed
    assert "the KV codec int8 of its store moves what it predicts by nan nats" in report.reason


class NoNumbers(TransformersSubject):
    """Makes one layer's KV, or the logits behind a blend, NaN."""

    layer: int | None = None

    def kv(self, target: Any) -> list[LayerKV]:
        found = super().kv(target)
        if self.layer is not None:
            found[self.layer] = LayerKV(found[self.layer].k * float("nan"), found[self.layer].v)
        return found

    def logits(self, target: Any) -> torch.Tensor:
        found = super().logits(target)
        return found * float("nan") if self.layer is None else found


@pytest.mark.parametrize("layer", [0, 2, _BASE["num_hidden_layers"] - 1, None])
def test_nan_in_kv_or_logits_fails_the_gate(layer: int | None) -> None:
    subject = NoNumbers(ModelRunner(make_model(BLENDED["llama"]())))
    subject.layer = layer
    report = run_gate(subject)[0]
    assert not report.passed
    said = "off by nan standard deviations" if layer is None else f"keys of layer {layer} off by nan of their norm"
    assert report.reason.count(said) == 3  # once for each blend


@pytest.mark.parametrize("stalled", [(), (0,), (3, 4)])  # 0 to 2 are chunks, 3 and 4 prefills of the whole prompt
def test_stalls_of_the_machine_do_not_change_the_costs_that_the_gate_measures(
    stalled: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    now, passes = [0.0], [0]

    class Clocked(TransformersSubject):
        def full_prefill(self, token_ids: Sequence[int], offset: int = 0) -> Any:
            now[0] += 0.01 + 0.001 * len(token_ids) + (100.0 if passes[0] in stalled else 0.0)
            passes[0] += 1
            return super().full_prefill(token_ids, offset)

    monkeypatch.setattr("cacheblend_rag.blending.gate.time.perf_counter", lambda: now[0])
    report = gate(None, Clocked)
    assert (report.pass_s, report.token_s) == pytest.approx((0.01, 0.001))


def test_a_codec_that_changes_predictions_fails_the_gate_and_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(codec, "_LARGEST", 3.0)  # numbers of three bits
    with pytest.warns(UserWarning, match=r"the KV codec int8 of its store moves .* choose another one, or none"):
        engine = TransformersEngine(
            make_model(hf.LlamaConfig(**_BASE)), header=(), store=f"ram://,file://{tmp_path}?codec=int8"
        )
    assert not engine.gate.passed
    assert engine.gate.codecs["int8"] > CODEC_LIMIT
    engine.close()
    with TransformersEngine(make_model(hf.LlamaConfig(**_BASE)), header=(), store=tmp_path) as other:
        assert other.gate.passed
        assert other.gate.codecs == {}
