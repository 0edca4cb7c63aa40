"""Calibrates the model of an engine, and saves its profile."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch

from cacheblend_rag.blending.plan import BlendPlan
from cacheblend_rag.blending.profile import save_profile, user_folder
from cacheblend_rag.calibrate.calibration import Calibration, CalibrationPrompt, Progress, calibrate
from cacheblend_rag.calibrate.compared import Coarser, Planner
from cacheblend_rag.calibrate.ledger import Ledger
from cacheblend_rag.calibrate.measure import describe_machine
from cacheblend_rag.calibrate.rounding import rounded_weights
from cacheblend_rag.calibrate.standard import Standard
from cacheblend_rag.calibrate.workbench import own_attention
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.errors import InputError, ModelError
from cacheblend_rag.prompts.prompt import TokenizedPrompt
from cacheblend_rag.prompts.registry import ChunkRegistry
from cacheblend_rag.store import open_store


def calibrate_engine(
    engine: TransformersEngine,
    prompts: Sequence[CalibrationPrompt],
    output: Path | None = None,
    progress: Progress | None = None,
    standard: Standard | None = None,
    *,
    margin: int = 0,
    everything: bool = False,
    by_deviation: bool = True,
) -> tuple[Calibration, Path]:
    """Calibrate the model of ``engine`` and write its profile; engines opened afterwards use the profile.

    Measurements are stored among the user's files until the calibration is complete: after a stop, the same call
    resumes.

    Args:
        engine: The model; its parity gate must have passed. Its store and registry are left unchanged.
        prompts: RAG prompts; see :func:`cacheblend_rag.calibrate.prompts.collect_prompts`.
        output: Directory of the model, or of its KV writer, to write the profile into; None for the user's files.
        progress: See :func:`calibrate`.
        standard: See :func:`calibrate`.
        margin: See :func:`calibrate`.
        everything: See :func:`calibrate`.
        by_deviation: See :func:`calibrate`.

    Returns:
        The calibration, and the path of the profile.

    Raises:
        ModelError: The model is not blended.
        InputError: No prompt is usable, there is no ratio to find, or the profile cannot be written.
    """
    planner = planner_of(engine)
    assert engine.rope is not None
    if engine.profile.blockwise:
        why = "this model was trained for chunks by themselves (blockwise): there is no ratio to find"
        raise InputError(f"{engine.profile.origin} says that {why}.")
    end = getattr(engine.tokenizer, "eos_token_id", None)

    # This store lies in RAM and has a budget: evicted KV is computed again when it is needed.
    kept = engine.store, engine.ranking, engine.registry
    ledger = Ledger(user_folder("cache") / "calibrations" / f"{_measured_by(engine, end)}.jsonl")
    bits = None if standard is None else standard.bits
    engine.store, engine.ranking, engine.registry = open_store(), "now", ChunkRegistry()
    try:
        found = calibrate(
            engine.subject(), engine.rope, engine.header_ids, prompts, standard, end, progress,
            planner=planner, margin=margin, everything=everything, by_deviation=by_deviation,
            coarser=None if bits is None else _coarser(engine, bits), ledger=ledger,
        )  # fmt: skip
    finally:
        engine.store, engine.ranking, engine.registry = kept
    file = _saved(found, engine, output)  # the measurements are deleted only after the profile is saved
    if not found.stopped:
        ledger.remove()
    return found, file


def _saved(found: Calibration, engine: TransformersEngine, output: Path | None) -> Path:
    """Write the profile and return its file; raises InputError if the profile cannot be written."""
    try:
        return save_profile(found.profile, engine.fingerprint.digest, output, engine.writer)
    except OSError as error:
        raise InputError(
            f"The profile cannot be written ({error}). What was measured is kept: give another directory (--output), and the "
            "same command goes on."
        ) from error


def planner_of(engine: TransformersEngine) -> Planner:
    """Return a function that plans a prompt from an engine's store, and first computes KV that the store lacks.

    Raises:
        ModelError: The model is not blended.
    """
    if engine.rope is None or not engine.gate.passed:
        raise ModelError(f"This model is not blended, so there is nothing to measure: {engine.gate.reason}.")

    def plan(prompt: TokenizedPrompt) -> BlendPlan:
        chunks = [span.chunk for span in prompt.spans]
        engine.precompute(chunks)
        engine.precompute_first(chunks[:1])
        layers = engine.num_layers
        return engine.entries.plan(prompt, lambda hand, ids: hand.get(ids, layers), longest=engine.runner.longest)

    return plan


def _coarser(engine: TransformersEngine, bits: int) -> Coarser:
    """Return a function that computes the logits of a prompt's last tokens with weights of ``bits`` bits."""
    model, device = engine.runner.model, engine.runner.device

    @torch.no_grad()
    def logits(ids: Sequence[int], last: int) -> torch.Tensor:
        with own_attention(model), rounded_weights(model, bits):
            given = torch.tensor([list(ids)], device=device)
            found: torch.Tensor = model(input_ids=given, use_cache=False, logits_to_keep=last).logits[0, -last:]
        return found

    return logits


def _measured_by(engine: TransformersEngine, end_token: int | None) -> str:
    """Return a hash of the model, the KV writer, the header, the end token and the versions that measurements depend on."""
    machine = describe_machine(engine.runner.device)
    versions = {name: value for name, value in machine.items() if "memory" not in name and name != "threads"}
    writer = None if engine.writer is None else engine.writer.digest
    told = (engine.fingerprint.digest, writer, tuple(engine.header_ids), end_token, sorted(versions.items()))
    return hashlib.sha256(repr(told).encode()).hexdigest()[:32]
