"""Export a training checkpoint as a Hugging Face model directory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from cacheblend_rag.demo.training.model import DemoModel, ModelShape
from cacheblend_rag.demo.training.tokenizer import BOS, EOS, PAD

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def load_checkpoint(checkpoint: Path) -> DemoModel:
    """Return the model of a training checkpoint, in fp32 and evaluation mode."""
    saved = torch.load(checkpoint, weights_only=True)
    model = DemoModel(ModelShape(**saved["shape"]))
    model.load_state_dict(saved["model"])
    return model.eval()


def export(checkpoint: Path, tokenizer_folder: Path, folder: Path) -> None:
    """Write config, generation config, bf16 weights and tokenizer files to `folder`."""
    model = load_checkpoint(checkpoint)
    folder.mkdir(parents=True, exist_ok=True)
    ids = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "mlp_bias": False,
        **model.shape.llama_config(),
        # Readers older than rope_parameters look for the plain key.
        "rope_theta": model.shape.theta,
        **ids,
        "use_cache": True,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }
    generation = {**ids, "do_sample": False, "max_new_tokens": 24}
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    weights = {f"model.{name}": tensor.to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for name in TOKENIZER_FILES:
        if tokenizer_folder.resolve() != folder.resolve():
            shutil.copyfile(tokenizer_folder / name, folder / name)
