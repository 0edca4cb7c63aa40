"""Tests that a placed or quantised model, or one with a chosen attention, is used unchanged or refused with the reason."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.engines.transformers.owner import usable_attention
from cacheblend_rag.errors import ModelError
from tests.blending.families import _BASE, make_model
from tests.blending.prompts import Scene


def fixed(model: Any) -> Any:
    """Make ``model`` refuse to be moved, as bitsandbytes' models do."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise ValueError("`.to` is not supported for `4-bit` or `8-bit` bitsandbytes models.\nPlease use it as it is.")

    model.to = refuse
    return model


def test_a_quantised_model_is_not_moved_and_is_blended() -> None:
    model, scene = fixed(make_model(LlamaConfig(**_BASE))), Scene()
    model.is_quantized = True
    model.register_buffer("scale", torch.tensor(0.5))  # quantised models have single numbers among their weights
    with TransformersEngine(model, device="cpu", header=scene.header) as engine:
        assert engine.gate.passed, engine.gate.reason
        engine.precompute(scene.chunks)
        assert engine.generate(scene.prompt, SamplingParams(max_tokens=1)).mode == "blend"


def test_a_model_that_cannot_be_moved_is_refused_with_the_reason() -> None:
    with pytest.raises(ModelError, match=r"cannot be moved to cpu: `.to` is not supported for `4-bit` or `8-bit` bits"):
        TransformersEngine(fixed(make_model(LlamaConfig(**_BASE))), device="cpu")


def test_a_model_on_several_devices_is_refused_with_a_remedy() -> None:
    model = fixed(make_model(LlamaConfig(**_BASE)))
    model.hf_device_map = {"model.layers.0": 0, "model.layers.1": "cpu", "lm_head": "disk"}
    with pytest.raises(ModelError, match=r"spread over 0, cpu, disk .* device_map=\{'': 0\}"):
        TransformersEngine(model, device="cpu")


@pytest.mark.parametrize("kind", ["bitsandbytes", "awq", "gptq", "fp8"])
def test_unusable_quantised_weights_are_refused_with_the_reason(tmp_path: Path, kind: str) -> None:
    make_model(LlamaConfig(**_BASE)).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text("utf-8"))
    config["quantization_config"] = {"quant_method": kind, "bits": 4, "load_in_4bit": True, "group_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    with pytest.raises(ModelError, match=r"Cannot load the model .*\."):
        TransformersEngine(tmp_path, device="cpu")


def test_a_warning_names_the_attention_that_replaces_the_chosen_attention() -> None:
    model = make_model(LlamaConfig(**_BASE))
    model.config._attn_implementation_internal = "flash_attention_2"  # the package flash_attn is not installed
    with pytest.warns(UserWarning, match="to run with attention 'flash_attention_2'; here it runs with sdpa"):
        usable_attention(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        usable_attention(model)  # the second call warns no more
