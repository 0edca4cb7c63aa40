"""Adds a LoRA to a copy of a model that shares the model's weights; the copy is the writer."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cacheblend_lab.learn.products import make_frugal
from cacheblend_rag.engines.models import writer_directory
from cacheblend_rag.engines.writer import CONFIG, FILE, describe
from cacheblend_rag.errors import InputError
from cacheblend_rag.store.kv import ModelFingerprint


def writing_copy(model: nn.Module, rank: int, seed: int = 0) -> Any:
    """Return a copy of a causal LM with a new peft LoRA, scaled by 2, on all linear modules but the output.

    Raises:
        InputError: peft is not installed.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise InputError("Training a KV writer needs peft: pip install 'cacheblend-lab[learn]'.") from error
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    torch.manual_seed(seed)
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    return _ready(get_peft_model(_sharing(model), config))


def load_writing_copy(model: nn.Module, directory: Path) -> Any:
    """Return a copy of a causal LM with a saved writer's LoRA, which can be trained on.

    Raises:
        InputError: The directory holds no writer, or a writer without a LoRA.
    """
    from peft import PeftModel

    directory = writer_directory(directory)
    if not (directory / FILE).is_file():
        raise InputError(f"There is no writer in {directory}; give the directory that `cacheblend learn` has made.")
    if not (directory / CONFIG).is_file():
        raise InputError(f"The KV writer in {directory} has no LoRA, so there is nothing to go on from: leave it out.")
    return _ready(PeftModel.from_pretrained(_sharing(model), str(directory), is_trainable=True))


def _sharing(model: nn.Module) -> nn.Module:
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, memo)


def _ready(model: Any) -> Any:
    if model.dtype.itemsize >= torch.float32.itemsize:
        make_frugal(model)
    # Autocast chooses the dtype; peft's own cast would copy every input to fp32.
    for module in model.modules():
        if hasattr(module, "cast_input_dtype_enabled"):
            module.cast_input_dtype_enabled = False
    return model


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    """Return the LoRA's own parameters by name, without copying."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def save_writer(model: Any, directory: Path, fingerprint: ModelFingerprint, card: Mapping[str, Any]) -> None:
    """Save a writer: peft's files, with bf16 weights, and a description with the model's fingerprint and the card."""
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items() if ".lora_" in name}
    model.save_pretrained(str(directory), state_dict=weights)
    (directory / "README.md").unlink(missing_ok=True)  # peft's empty card
    file = directory / CONFIG
    config = {
        **json.loads(file.read_text(encoding="utf-8")),
        "base_model_name_or_path": None,  # may be a local path
    }
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    describe(directory, fingerprint, card)
