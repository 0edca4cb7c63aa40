"""Loads a model: from a directory, a hub name, or an object in memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from cacheblend_rag.engines.models import BUNDLED_MODEL, is_bundled, model_directory
from cacheblend_rag.engines.transformers import attention
from cacheblend_rag.errors import InputError, ModelError
from cacheblend_rag.store.kv import ModelFingerprint


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run; ``directory`` is where it was read from, if anywhere."""

    model: Any
    tokenizer: Any
    fingerprint: ModelFingerprint
    directory: Path | None


def load_model(model: Any, tokenizer: Any, device: torch.device, dtype: torch.dtype | None) -> LoadedModel:
    """Load ``model``: None (the bundled one), a directory, a hub name, or a loaded model.

    Raises:
        ModelError: It cannot be loaded; the message says why.
    """
    if isinstance(model, PreTrainedModel):
        model = model.to(device).eval()
        name = str(getattr(model.config, "_name_or_path", "") or type(model).__name__)
        fingerprint = ModelFingerprint.from_module(model, model.config.to_dict(), model.dtype, name)
        return LoadedModel(usable_attention(model), tokenizer, fingerprint, None)
    name = BUNDLED_MODEL if is_bundled(model) else str(model)
    try:
        directory = model_directory(model)
        config = AutoConfig.from_pretrained(directory)
        # A CPU without bf16 units is slower and less exact in bf16 than in fp32.
        dtype = dtype or (torch.float32 if device.type == "cpu" else getattr(config, "dtype", None) or torch.bfloat16)
        loaded = AutoModelForCausalLM.from_pretrained(directory, config=config, dtype=dtype)
        tokenizer = tokenizer or AutoTokenizer.from_pretrained(directory)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelError(
            f"Cannot load the model {name!r}: {_first_line(error)} Give a directory with a Hugging Face causal LM "
            "(config.json, weights, tokenizer), a hub name, or nothing for the bundled model."
        ) from error
    loaded = loaded.to(device).eval()
    return LoadedModel(
        usable_attention(loaded), tokenizer, ModelFingerprint.from_directory(directory, dtype, name), directory
    )


def device_named(name: str | torch.device | None) -> torch.device:
    """Return the torch device of that name; None takes CUDA if there is one.

    Raises:
        InputError: There is no such device on this machine.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"The device {str(name)!r} cannot be used here: {_first_line(error)}") from error
    return device


def usable_attention(model: Any) -> Any:
    """Return ``model`` with an attention that honours its config and takes an explicit mask."""
    config = model.config.get_text_config()
    # SDPA drops the soft cap on attention scores (Gemma-2) and learned sinks: there only eager computes what the config says.
    no_sdpa = getattr(config, "attn_logit_softcapping", None) or not getattr(model, "_supports_sdpa", True)
    eager = no_sdpa or config._attn_implementation == "eager"
    model.set_attn_implementation("eager" if eager else attention.NAME)
    return model


def _first_line(error: Exception) -> str:
    line = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
    return line + "."
