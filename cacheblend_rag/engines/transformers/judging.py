"""Remembers which models have passed the parity gate on this machine: a model of 1.5B parameters takes half a minute."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers

from cacheblend_rag.blending.gate import GateReport, GateSubject, run_gate
from cacheblend_rag.blending.rope import Rope
from cacheblend_rag.engines.precision import cpu_name
from cacheblend_rag.homes import remembered
from cacheblend_rag.store.kv import ModelFingerprint

_PACKAGE = Path(__file__).parents[2]


def judge(
    subject: GateSubject, codecs: Collection[str], model: Any, files: ModelFingerprint | None
) -> tuple[GateReport, Rope | None]:
    """Run the parity gate, or return the report of the run in which these files passed the gate on this machine.

    Other weights, another dtype, device, number of threads, codec, version of torch or transformers, or another state of
    this package's code make another run. A gate that fails is never remembered.

    Args:
        subject: The model's interface for the gate.
        codecs: See :func:`run_gate`.
        model: The model itself.
        files: Fingerprint of the files that the model was loaded from; None for a model from the caller's memory, whose
            modules may have been changed: its gate always runs.
    """
    if files is None or getattr(model, "is_quantized", False):
        return run_gate(subject, codecs)
    ran: list[tuple[GateReport, Rope | None]] = []

    def run() -> dict[str, Any]:
        ran.append(run_gate(subject, codecs))
        return asdict(ran[0][0])

    known = remembered("gates", _conditions(model, files, codecs), dict, run, lambda: ran[0][0].passed)
    if ran:
        return ran[0]
    try:
        return run_gate(subject, codecs, GateReport(**known))
    except TypeError:  # the remembered report is damaged
        return run_gate(subject, codecs)


def _conditions(model: Any, files: ModelFingerprint, codecs: Collection[str]) -> list[Any]:
    code = [(str(file.relative_to(_PACKAGE)), file.stat().st_mtime_ns) for file in sorted(_PACKAGE.rglob("*.py"))]
    device = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else cpu_name()
    how = [device, torch.get_num_threads(), torch.get_float32_matmul_precision(), model.config._attn_implementation]
    return [files.digest, sorted(codecs), how, torch.__version__, transformers.__version__, code]
