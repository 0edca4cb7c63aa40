"""Diagnoses a model on a machine for `cacheblend doctor`: whether and how the model is blended, and the expected gain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from cacheblend_rag.blending.controller import Load
from cacheblend_rag.blending.costs import ComputeCost, Costs, TierCost
from cacheblend_rag.blending.gate import CODEC_LIMIT, check_codecs
from cacheblend_rag.blending.rope import Rope
from cacheblend_rag.calibrate.bandwidth import measure_device_copy, measure_disk, measure_ram_copy
from cacheblend_rag.calibrate.compute import fit_compute, measure_prefills, with_placing
from cacheblend_rag.calibrate.measure import describe_machine
from cacheblend_rag.calibrate.spelling import joins_are_plain
from cacheblend_rag.calibrate.storage import blend_times, typical_load
from cacheblend_rag.calibrate.workbench import Workbench
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.store.codec import LOSSY

_CHUNKS, _CHUNK_TOKENS = 6, 512
_SLOWEST = "slowest"


@dataclass(frozen=True)
class RotationGroup:
    """Holds layers that rotate alike: the pairing of dimensions (``half``, ``interleaved``, ``none``) and the RoPE table."""

    layers: tuple[int, ...]
    layout: str
    table: int


@dataclass(frozen=True)
class Estimate:
    """Holds the computed, not measured, cost of a prompt of 6 chunks of 512 tokens and a question.

    Attributes:
        prompt_tokens: Length of the prompt.
        full_s: Seconds of a full recompute.
        blend_s: Seconds of a blend with the profile's policy and ratio; loading and computing overlap as the policy
            allows.
        load_s: Seconds of loading alone, from the slowest place measured.
    """

    prompt_tokens: int
    full_s: float
    blend_s: float
    load_s: float


@dataclass(frozen=True)
class Diagnosis:
    """Holds all that `doctor` prints. Bandwidths are in bytes per second; ``prefill_s`` has seconds by number of tokens.

    ``plain_joins`` states whether chunks' edges are tokenised as in the whole prompt. ``codecs`` has, for each KV codec
    that changes numbers, the KL in nats by which it moves the model's predictions; ``codec_limit`` nats are allowed.
    """

    model: str
    fingerprint: str
    device: str
    dtype: str
    context_window: int
    layers: int
    blended: bool
    reason: str
    plain_joins: bool | None
    gate_errors: dict[str, float]
    gate_limit: float | None
    first_token_kl: float | None
    codecs: dict[str, float]
    codec_limit: float
    rotation: list[RotationGroup]
    policy: str
    ratio: float
    reuse: str
    check_layers: tuple[int, ...]
    widths: tuple[float, ...]
    profile_origin: str
    writer: str | None
    calibrated: dict[str, Any]
    kv_bytes_per_token: int | None
    bandwidth: dict[str, float]
    prefill_s: dict[int, float]
    compute: ComputeCost
    estimate: Estimate | None
    machine: dict[str, Any]


def diagnose(
    engine: TransformersEngine, store: Path | None = None, progress: Callable[[str], None] | None = None
) -> Diagnosis:
    """Examine a loaded model.

    Args:
        engine: The model; its parity gate has run.
        store: Directory of a store whose disk is measured.
        progress: Called with a line of text before each step.
    """
    say = progress or (lambda line: None)
    device, blended = engine.runner.device, engine.gate.passed
    say("bandwidths")
    bandwidth = _bandwidths(device, store)
    say("prefill")
    place = Workbench.of(engine)
    prefill_s = measure_prefills(place)
    compute = with_placing(fit_compute(prefill_s), place)
    load = typical_load(place, _CHUNKS, _CHUNK_TOKENS)
    schedule = engine.profile.schedule()
    return Diagnosis(
        model=engine.fingerprint.name,
        fingerprint=engine.fingerprint.digest,
        device=str(device),
        dtype=str(engine.runner.dtype).removeprefix("torch."),
        context_window=engine.context_window,
        layers=engine.runner.num_layers,
        blended=blended,
        reason=engine.gate.reason,
        plain_joins=None if engine.tokenizer is None else joins_are_plain(engine.tokenizer),
        gate_errors=engine.gate.errors,
        gate_limit=engine.gate.limit,
        first_token_kl=engine.gate.first_token_kl,
        codecs=check_codecs(engine.subject(), engine.rope, [LOSSY]) if engine.rope is not None and blended else {},
        codec_limit=CODEC_LIMIT,
        rotation=rotation_groups(engine.rope) if engine.rope is not None else [],
        policy=engine.profile.policy,
        ratio=engine.profile.ratio,
        reuse=engine.profile.reuse,
        check_layers=schedule.check_layers,
        widths=schedule.widths,
        profile_origin=f"{engine.profile.origin or 'defaults'}{'' if engine.profile.is_calibrated else ', not calibrated'}",
        writer=None if engine.writer is None else engine.writer.directory,
        calibrated=engine.profile.calibrated,
        kv_bytes_per_token=None if load is None else load.spans[0].nbytes // _CHUNK_TOKENS,
        bandwidth=bandwidth,
        prefill_s=prefill_s,
        compute=compute,
        estimate=None if load is None else estimate(load, compute, engine.num_layers, min(bandwidth.values())),
        machine=describe_machine(device),
    )


def _bandwidths(device: torch.device, store: Path | None) -> dict[str, float]:
    """Return bytes per second, by source and way of reading."""
    found = {"ram copy": measure_ram_copy()}
    if device.type == "cuda":
        found["host to device"] = measure_device_copy(device)
    if store is not None and store.is_dir():
        for name, cold in (("disk read, cold", True), ("disk read, warm", False)):
            if (disk := measure_disk(store, cold)) is not None:
                found[name] = disk.bytes_per_s
    return found


def rotation_groups(rope: Rope) -> list[RotationGroup]:
    """Return the layers of ``rope``, grouped by how they rotate."""
    groups: dict[tuple[str, int], list[int]] = {}
    for layer, key in enumerate(zip(rope.layout_of_layer, rope.table_of_layer, strict=True)):
        groups.setdefault(key, []).append(layer)
    return [RotationGroup(tuple(layers), layout, table) for (layout, table), layers in groups.items()]


def estimate(load: Load, compute: ComputeCost, layers: int, bandwidth: float) -> Estimate:
    """Compute the cost of the standard prompt as the loading controller does; its first chunk counts as an exact prefix."""
    first, *others = load.spans
    load = replace(load, spans=[replace(first, exact=True), *others])
    times = blend_times(load, Costs(layers, compute, {_SLOWEST: TierCost(0.0, bandwidth)}), _SLOWEST)
    return Estimate(load.tokens, compute.seconds(load.tokens, load.tokens), times.seconds, times.load_s)
