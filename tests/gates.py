"""Spares tests the parity gate for a model that has already passed the gate in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from cacheblend_rag.blending.gate import GateReport

_passed: dict[tuple[str, str], GateReport] = {}


def gate_once(patch: pytest.MonkeyPatch) -> None:
    """Let a transformers model that has passed the gate pass again without comparison; its rotation is measured each time."""
    from cacheblend_rag.blending import gate
    from cacheblend_rag.engines.transformers.target import TransformersSubject
    from cacheblend_rag.store.kv import ModelFingerprint

    compare = gate._compare

    def remembered(subject: Any, rope: Any) -> GateReport:
        if not isinstance(subject, TransformersSubject):
            return compare(subject, rope)
        config = subject.runner.config
        found = ModelFingerprint.from_module(subject.runner.model, config.to_dict(), subject.dtype, "")
        key = found.digest, str(config._attn_implementation)
        if key in _passed:
            return _passed[key]
        report = compare(subject, rope)
        if report.passed:
            _passed[key] = report
        return report

    patch.setattr(gate, "_compare", remembered)
