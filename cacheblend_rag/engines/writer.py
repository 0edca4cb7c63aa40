"""Reads a KV writer: a LoRA that is active while the KV of chunks is computed, and inactive while prompts are computed.

A writer is a directory in peft's format (``adapter_config.json``, ``adapter_model.safetensors``) with a ``writer.json``
that names the writer's model. While ``header + chunk`` runs, the LoRA acts on all these tokens, and only the chunk's KV
of the run is used. The model alone, with unchanged weights, computes the header's own KV, questions and answers. The
writer named ``"probe"`` has no LoRA: the model itself computes chunks behind header and probe, so that no chunk is
computed at the beginning of a prompt.
"""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from cacheblend_rag.blending.static import probe_digest
from cacheblend_rag.engines.entries import Entries
from cacheblend_rag.engines.models import shipped_writer, writer_directory
from cacheblend_rag.errors import InputError
from cacheblend_rag.prompts.chunk import Chunk
from cacheblend_rag.store.kv import ModelFingerprint, WrittenBy

FILE: Final = "writer.json"
_FORMAT: Final = 1
CONFIG: Final = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_BASE = "base_model.model."
# peft options that change no number of a trained LoRA, or that are read below. Any other active option is rejected.
_KNOWN = {
    "auto_mapping", "base_model_name_or_path", "bias", "exclude_modules", "inference_mode",
    "init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout", "megatron_core", "peft_type",
    "peft_version", "qalora_group_size", "r", "revision", "target_modules", "task_type", "use_rslora",
}  # fmt: skip
# Values of init_lora_weights that do not change the model's own weights.
_INITIAL = (True, False, None, "gaussian", "orthogonal", "eva")


class Part(NamedTuple):
    """Holds one linear module's LoRA, which adds ``b @ (a @ x)`` to the module's output.

    Attributes:
        a: ``[rank, in_features]``.
        b: ``[out_features, rank]``, multiplied by the LoRA's scale.
    """

    a: torch.Tensor
    b: torch.Tensor


@dataclass(frozen=True)
class KVWriter:
    """Holds a KV writer that was read from a directory.

    Attributes:
        name: Identity of the writer, part of the key of every entry that it writes.
        parts: LoRA parts, by the names of their linear modules in the transformers model.
        card: Description from ``writer.json`` of how the writer was made.
    """

    name: WrittenBy
    parts: Mapping[str, Part]
    card: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, directory: str | Path, model: ModelFingerprint | None = None, files: Path | None = None) -> KVWriter:
        """Read the writer for a model from a directory.

        Args:
            directory: Directory of the writer, ``"smollm2"`` or ``"probe"``.
            model: Model that the writer must have been made for; None skips the check.
            files: Directory of the model's files, if any; then a writer made for another dtype of the model fits too.

        Raises:
            InputError: The directory holds no writer, the writer is damaged or made for another model, or it uses an
                unsupported peft option.
        """
        place = writer_directory(directory)
        refuse = partial(unusable, place)
        if not (place / FILE).is_file():
            raise refuse(f"it has no {FILE}; give the directory that `cacheblend learn` has made")
        about = _json(place, FILE)
        if about.get("format") != _FORMAT:
            raise refuse(f"its format is {about.get('format')!r}, and this version reads {_FORMAT}")
        if about.get("behind_probe") is True:
            return cls(WrittenBy(probe_digest(), str(place), behind_probe=True), {})
        config = _json(place, CONFIG)
        # A shipped writer always fits its model: the model's files differ by source and by who converted them.
        named = model is not None and shipped_writer(model.name) == place
        if model and not named and about.get("model") not in (model.digest, *_in_other_dtypes(about, model, files)):
            raise refuse(
                f"it was made for another model ({str(about.get('model'))[:8]}) than {model.name} ({model.digest[:8]}); make one "
                f"with `cacheblend learn --model {model.name}`, or leave the writer out"
            )
        parts = _parts(place, *_scale(place, config))
        card = about.get("card")
        return cls(WrittenBy(_digest(parts), str(place)), parts, card if isinstance(card, dict) else {})

    def on(self, model: torch.nn.Module, dtype: torch.dtype, device: torch.device) -> Writing:
        """Return a context manager in which the writer acts on a transformers model.

        Raises:
            InputError: The model lacks a linear module of the writer, or the module has another size.
        """
        modules, hooks = dict(model.named_modules()), []
        for name, part in self.parts.items():
            module = modules.get(name)
            if not isinstance(module, torch.nn.Linear):
                raise unusable(self.name.directory, f"the model has no linear module {name}")
            sizes = part.a.shape[1], part.b.shape[0]
            if sizes != (module.in_features, module.out_features):
                has = f"{module.in_features} to {module.out_features}"
                raise unusable(
                    self.name.directory, f"{name} goes from {has} features, not from {sizes[0]} to {sizes[1]}"
                )
            a, b = (each.to(device, dtype) for each in part)
            hooks.append((module, partial(add, a, b.T)))
        return Writing(hooks)


class Writing:
    """Activates a writer within a context; the caller must have exclusive use of the model."""

    def __init__(self, hooks: Collection[tuple[torch.nn.Module, Callable[..., Any]]]):
        """Take pairs of module and forward hook; the hooks are registered inside the context only."""
        self._hooks = tuple(hooks)
        self._acting: list[Any] = []

    def __enter__(self) -> None:
        self._acting = [module.register_forward_hook(hook) for module, hook in self._hooks]

    def __exit__(self, *_: object) -> None:
        for handle in self._acting:
            handle.remove()
        self._acting = []


class WriterNotice:
    """Warns once that stored KV of chunks is not used, since the model itself and not the KV writer computed it."""

    _given = False

    def look(self, entries: Entries, missing: Sequence[Chunk]) -> None:
        """Warn if all chunks that are ``missing`` among an engine's ``entries`` are stored as the model's own KV.

        A single such chunk is no reason to warn: it may have been the first chunk of an earlier prompt, and its KV from
        the writer may have been evicted.
        """
        texts = {chunk.token_ids for chunk in missing}
        if self._given or entries.writer is None or len(texts) < 2:
            return
        own = entries.by(None)
        if all(own.contains(token_ids) and not entries.contains(token_ids) for token_ids in texts):
            self._given = True
            warnings.warn(
                f"The store has KV that was written without the KV writer in {entries.writer.directory}. But for a prompt's "
                "first chunk it is not used: the others are computed anew. Index their documents once with it (cacheblend index "
                "--writer DIR).",
                stacklevel=2,
            )


def describe(directory: Path, model: ModelFingerprint, card: Mapping[str, Any]) -> None:
    """Write the ``writer.json`` of a writer for ``model`` beside peft's files; ``card`` describes how it was made."""
    text = json.dumps({"format": _FORMAT, "model": model.digest, "card": dict(card)}, indent=2)
    (directory / FILE).write_text(text + "\n", encoding="utf-8")


def add(
    a: torch.Tensor,
    b: torch.Tensor,
    _module: Any,
    inputs: tuple[torch.Tensor, ...],
    output: Any,
    over_ranks: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> None:
    """Add a :class:`Part`, with ``b`` transposed (``[rank, out_features]``), in place to a linear module's output.

    The function is a forward hook. The module may return a tuple whose first item is the output. ``over_ranks`` sums a
    tensor over ranks that each hold a share of the input features.
    """
    low = inputs[0].reshape(-1, a.shape[1]) @ a.T
    if over_ranks is not None:
        low = over_ranks(low)
    (output if isinstance(output, torch.Tensor) else output[0]).view(-1, b.shape[1]).addmm_(low, b)


def unusable(place: Path | str, why: str) -> InputError:
    """Return the error for a writer in ``place`` that cannot be used, with the reason ``why``."""
    return InputError(f"The KV writer in {place} cannot be used: {why}.")


def _in_other_dtypes(about: Mapping[str, Any], model: ModelFingerprint, files: Path | None) -> list[str]:
    """Return the model's digests in all supported dtypes; none without ``files`` or if the writer names ``model``."""
    every = [torch.float32, torch.bfloat16, torch.float16]
    return [] if files is None or about.get("model") == model.digest else ModelFingerprint.digests(files, every)


def _json(place: Path, name: str) -> dict[str, Any]:
    try:
        found = json.loads((place / name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise unusable(place, f"{name} cannot be read ({error})") from error
    if not isinstance(found, dict):
        raise unusable(place, f"{name} is no JSON object")
    return found


def _scale(place: Path, config: Mapping[str, Any]) -> tuple[int, float]:
    """Return rank and scale of a LoRA from its peft configuration."""
    if config.get("peft_type") != "LORA":
        raise unusable(place, f"it is a {config.get('peft_type')} of peft's, and only LORA is supported")
    switched_on = sorted(name for name, value in config.items() if value and name not in _KNOWN)
    if config.get("bias", "none") != "none":
        switched_on.append("bias")
    if config.get("init_lora_weights") not in _INITIAL:
        switched_on.append("init_lora_weights")
    if switched_on:
        raise unusable(place, f"it takes {', '.join(switched_on)} of peft's, which is not supported")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, (int, float)):
        raise unusable(place, f"{CONFIG} has no rank (r) or no lora_alpha")
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _parts(place: Path, rank: int, scale: float) -> dict[str, Part]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(place / _WEIGHTS)
    except (OSError, SafetensorError, ValueError) as error:
        raise unusable(place, f"{_WEIGHTS} cannot be read ({error})") from error
    parts: dict[str, Part] = {}
    for key in sorted(tensors):
        name, _, side = key.removeprefix(_BASE).rpartition(".lora_")
        other = f"{key.removesuffix('A.weight')}B.weight"
        if not name or side not in ("A.weight", "B.weight") or (side == "A.weight" and other not in tensors):
            raise unusable(place, f"{_WEIGHTS} holds {key}, which is no half of a pair lora_A, lora_B")
        if side == "B.weight":
            continue
        a, b = tensors[key].float(), tensors[other].float()
        if a.ndim != 2 or b.ndim != 2 or a.shape[0] != rank or b.shape[1] != rank:
            raise unusable(place, f"{name} is not of rank {rank}, as {CONFIG} says")
        if not (torch.isfinite(a).all() and torch.isfinite(b).all()):
            raise unusable(place, f"{name} holds numbers that are none")
        parts[name] = Part(a, b * scale)
    if not parts or 2 * len(parts) != len(tensors):
        raise unusable(place, f"{_WEIGHTS} holds no LoRA, or half of one")
    return parts


def _digest(parts: Mapping[str, Part]) -> str:
    state = hashlib.sha256()
    for name, part in parts.items():
        for tensor in part:
            state.update(f"{name} {list(tensor.shape)} ".encode())
            state.update(tensor.contiguous().numpy().data)
    return state.hexdigest()[:32]
