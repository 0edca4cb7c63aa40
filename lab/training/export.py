"""Exports a training checkpoint as a Hugging Face model directory (also as `python -m` of this module)."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from training.model import DemoModel, ModelShape
from training.tokenizer import BOS, EOS, PAD

TRAINING_COMMAND = "python -m training.train"
CONFIG_FILES = ("config.json", "generation_config.json")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def load_exported(folder: Path) -> DemoModel:
    """Return the training model with the weights that `export` wrote, in fp32 and evaluation mode."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    shape = ModelShape(
        vocabulary=config["vocab_size"],
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        mlp=config["intermediate_size"],
        theta=config["rope_parameters"]["rope_theta"],
        eps=config["rms_norm_eps"],
        context=config["max_position_embeddings"],
    )
    model = DemoModel(shape)
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict({name.removeprefix("model."): tensor.float() for name, tensor in weights.items()})
    return model.eval()


def fingerprint(folder: Path) -> dict[str, str]:
    """Return the metadata that training wrote into the weights file, and the file's hash as `xxh3_128`."""
    weights = folder / "model.safetensors"
    with safe_open(weights, framework="pt") as opened:
        metadata: dict[str, str] = opened.metadata() or {}
    return {**metadata, "xxh3_128": xxhash.xxh3_128(weights.read_bytes()).hexdigest()}


def write_weights(folder: Path, weights: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write the weights of a model, with metadata that :func:`fingerprint` returns."""
    save_file(dict(weights), folder / "model.safetensors", metadata=dict(metadata))
    # save_file makes the file readable by its owner only.
    (folder / "model.safetensors").chmod(0o644)


def export(checkpoint: Path, tokenizer_folder: Path, folder: Path) -> None:
    """Write config, generation config, bf16 weights and tokenizer files to `folder`."""
    saved = torch.load(checkpoint, weights_only=True)
    model = DemoModel(ModelShape(**saved["shape"]))
    model.load_state_dict(saved["model"])
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
        # Older versions of transformers read this key instead of rope_parameters.
        "rope_theta": model.shape.theta,
        **ids,
        "use_cache": True,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }
    generation = {**ids, "do_sample": False, "max_new_tokens": 24}
    for name, content in zip(CONFIG_FILES, (config, generation), strict=True):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    weights = {f"model.{name}": tensor.to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()}
    shape, progress = model.shape, saved["progress"]
    metadata = {
        "format": "pt",
        "shape": f"{shape.layers} layers, hidden {shape.hidden}, {shape.heads} heads, {shape.kv_heads} KV heads, "
        f"RoPE theta {shape.theta:g}, {sum(p.numel() for p in model.parameters()):,} parameters",
        **saved["facts"],
        "steps": str(progress["step"]),
        "tokens": str(progress["tokens"]),
    }
    write_weights(folder, weights, metadata)
    for name in TOKENIZER_FILES:
        if tokenizer_folder.resolve() != folder.resolve():
            shutil.copyfile(tokenizer_folder / name, folder / name)


def main(arguments: Sequence[str] | None = None) -> None:
    """Export the newest checkpoint of a run, which may still be training."""
    parser = argparse.ArgumentParser(description="Export a training checkpoint.")
    parser.add_argument("--run", type=Path, default=Path("runs/demo-model"), help="folder of the training run")
    parser.add_argument("--model", type=Path, required=True, help="folder to write")
    options = parser.parse_args(arguments)
    export(options.run / "checkpoint.pt", options.run, options.model)


if __name__ == "__main__":
    main()
