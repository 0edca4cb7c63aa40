"""Reads a KV writer: a LoRA that acts while the KV of chunks is computed, and never while a prompt is; or one without a LoRA.

A writer is a directory in peft's format (``adapter_config.json``, ``adapter_model.safetensors``) with a ``writer.json`` that
names the model it was made for. While ``header + chunk`` runs, it acts on all of these tokens, and of that run nothing but the
chunk's KV is kept. The header's own KV, questions and answers are the model's, whose weights stay as they are. The writer named
``"probe"`` has no LoRA: the model itself computes chunks behind header and probe, so that none stands at a prompt's begin.
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
# Options of peft's that change no number of a trained LoRA, or are read below. Any other that is switched on is refused.
_KNOWN = {
    "auto_mapping", "base_model_name_or_path", "bias", "exclude_modules", "inference_mode",
    "init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout", "megatron_core", "peft_type",
    "peft_version", "qalora_group_size", "r", "revision", "target_modules", "task_type", "use_rslora",
}  # fmt: skip
# Those that leave the model's own weights alone.
_INITIAL = (True, False, None, "gaussian", "orthogonal", "eva")


class Part(NamedTuple):
    """Holds what is added to a linear module's output: ``b @ (a @ x)``.

    Attributes:
        a: ``[rank, in_features]``.
        b: ``[out_features, rank]``, scaled.
    """

    a: torch.Tensor
    b: torch.Tensor


@dataclass(frozen=True)
class KVWriter:
    """Holds a writer as it was read.

    Attributes:
        name: Its identity, part of the keys of all that it writes.
        parts: What it adds to which of the model's linear modules, by their names in the transformers model.
        card: How it was made, as ``writer.json`` says.
    """

    name: WrittenBy
    parts: Mapping[str, Part]
    card: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, directory: str | Path, model: ModelFingerprint | None = None, files: Path | None = None) -> KVWriter:
        """Read the writer in a directory for a model.

        Args:
            directory: The writer's, or the name of a model that comes with one.
            model: The model it must be made for; None where that was checked before.
            files: Directory of the model's files, if any: a writer that was made for it in one dtype serves all.

        Raises:
            InputError: There is none, it is damaged or of another model, or takes something of peft's that is not supported.
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
        # Of a model with a name it is always the one: its files differ by where they came from, and by who has converted them.
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
        """Return what makes it act on a transformers model.

        Raises:
            InputError: The model has no linear module of a name or size that the writer adds to.
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
    """Makes a writer act: a context manager. Whoever enters it must have the model to himself."""

    def __init__(self, hooks: Collection[tuple[torch.nn.Module, Callable[..., Any]]]):
        """Act by forward ``hooks``, which their modules have inside the context alone."""
        self._hooks = tuple(hooks)
        self._acting: list[Any] = []

    def __enter__(self) -> None:
        self._acting = [module.register_forward_hook(hook) for module, hook in self._hooks]

    def __exit__(self, *_: object) -> None:
        for handle in self._acting:
            handle.remove()
        self._acting = []


class WriterNotice:
    """Says once that stored KV of chunks is not used, since the model itself has written it and not the KV writer."""

    _given = False

    def look(self, entries: Entries, missing: Sequence[Chunk]) -> None:
        """Look whether the chunks that are ``missing`` among an engine's ``entries`` are all there as the model has written them.

        Of a single one that says nothing: it may have come first in an earlier prompt, and the writer's KV of it be evicted.
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
    """Write the ``writer.json`` of a writer made for ``model`` beside peft's files; ``card`` says how it was made."""
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
    """Add a :class:`Part`, its ``b`` turned (``[rank, out_features]``), to a linear module's output, in place: a forward hook.

    The output may stand in front of others. ``over_ranks`` adds up over ranks that each have a share of the input.
    """
    low = inputs[0].reshape(-1, a.shape[1]) @ a.T
    if over_ranks is not None:
        low = over_ranks(low)
    (output if isinstance(output, torch.Tensor) else output[0]).view(-1, b.shape[1]).addmm_(low, b)


def unusable(place: Path | str, why: str) -> InputError:
    """Return the error that says why a writer cannot be used."""
    return InputError(f"The KV writer in {place} cannot be used: {why}.")


def _in_other_dtypes(about: Mapping[str, Any], model: ModelFingerprint, files: Path | None) -> list[str]:
    """Return the digests of a model in every dtype that models are run in, where the one it has is not the writer's."""
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
    """Return rank and scale of a LoRA by peft's configuration of it."""
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
