"""Calibrating an engine's model and keeping the profile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from cacheblend_rag.blending.calibration.rules import Calibration, calibrate
from cacheblend_rag.blending.profile import save_profile
from cacheblend_rag.blending.static import probe_ids
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.errors import ModelError
from cacheblend_rag.prompts.prompt import TokenizedPrompt


def calibrate_engine(
    engine: TransformersEngine,
    prompts: Sequence[TokenizedPrompt],
    output: Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> tuple[Calibration, Path]:
    """Calibrate the model of ``engine`` and write its profile; engines opened from now on use it.

    Args:
        engine: The model; its parity gate must have passed.
        prompts: RAG prompts; see :func:`collect_prompts`.
        output: Model directory to write the profile into; None for the user's files.
        progress: Called with a line of text before each step.

    Returns:
        What was measured, and the file.

    Raises:
        ModelError: The model is not blended.
        InputError: No prompt is of use.
    """
    if engine.rope is None or not engine.gate.passed:
        raise ModelError(f"This model is not blended, so there is nothing to calibrate: {engine.gate.reason}.")
    end = getattr(engine.tokenizer, "eos_token_id", None)
    subject = engine.subject()
    probe = probe_ids(engine.tokenizer, subject.vocab_size, engine.context_window)
    found = calibrate(subject, engine.rope, engine.header_ids, prompts, end, progress, probe)
    return found, save_profile(found.profile, engine.fingerprint.digest, output)
