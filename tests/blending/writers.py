"""KV writers of random numbers, as peft writes them, and models in which peft itself has put them: the reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import torch

from cacheblend_rag.engines import writer
from cacheblend_rag.store.kv import ModelFingerprint
from tests.blending.families import make_model


def fingerprint_of(model: Any) -> ModelFingerprint:
    return ModelFingerprint.from_module(model, model.config.to_dict(), model.dtype, "random")


def write_writer(directory: Path, config: Any, **options: Any) -> Any:
    """Write a random writer for ``make_model(config)``; return a model that computes as that does while it acts."""
    model = make_model(config)
    return write_for(model, fingerprint_of(model), directory, **options)


def write_for(
    model: Any, fingerprint: ModelFingerprint, directory: Path, *, seed: int = 0, rank: int = 4, **options: Any
) -> Any:
    """Write a random writer for a model, and put it into that."""
    options = {"target_modules": "all-linear", "lora_alpha": 6, **options}
    changed = peft.get_peft_model(model, peft.LoraConfig(r=rank, task_type="CAUSAL_LM", **options))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in changed.named_parameters():
            if ".lora_" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator) / parameter.shape[1] ** 0.5)
    changed.save_pretrained(directory)
    writer.describe(directory, fingerprint, {"made by": "a test"})
    return changed.base_model.model.eval()


def alter_config(directory: Path, **changed: Any) -> None:
    file = directory / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))
