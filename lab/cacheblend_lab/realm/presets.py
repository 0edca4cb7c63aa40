"""Sets what the user leaves open: for a tiny BERT of random weights, the bundled one, and any other trained one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import torch

from cacheblend_lab.realm.finetune import FinetuneSettings
from cacheblend_lab.realm.model import BUNDLED, TINY, Dtype, Shape
from cacheblend_lab.realm.pretrain import PretrainSettings

_TINY: Final = PretrainSettings(
    bert=TINY,
    shape=Shape(query_tokens=32, passage_tokens=48, span_tokens=8),
    warm_steps=400,
    warm_rate=2e-3,
    steps=60,
    batch=12,
    rate=1e-4,
    candidates=3,
    refresh_every=20,
)
_TINY_TUNING: Final = FinetuneSettings(steps=400, batch=12, rate=1e-3)
# The demonstration's: a trained BERT learns at lower rates, and each of its steps takes longer.
_BUNDLED_DEMO: Final = replace(_TINY, bert=BUNDLED, warm_steps=150, warm_batch=32, warm_rate=1e-4, rate=3e-5)
_BUNDLED_DEMO_TUNING: Final = FinetuneSettings(steps=300, batch=12, rate=1e-4, refresh_every=30)


def pretraining(bert: str) -> PretrainSettings:
    """Return how to pre-train: ``tiny`` for minutes on one core, any other BERT as in the paper but for the steps."""
    return _TINY if bert == TINY else PretrainSettings(bert=bert)


def tuning(random: bool) -> FinetuneSettings:
    """Return how to fine-tune a model that began with random weights, or a trained one."""
    return _TINY_TUNING if random else FinetuneSettings()


def demonstration(bert: str) -> tuple[PretrainSettings, FinetuneSettings]:
    """Return how the demonstration trains ``tiny`` or ``minilm``."""
    if bert == TINY:
        return _TINY, _TINY_TUNING
    shape = replace(_BUNDLED_DEMO.shape, dtype=_fast_dtype())
    return replace(_BUNDLED_DEMO, shape=shape), _BUNDLED_DEMO_TUNING


def _fast_dtype() -> Dtype:
    """Return bfloat16 where this CPU multiplies in it; elsewhere it need not be any faster."""
    can: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # an older torch does not say
    return "bfloat16" if can.get("avx512_bf16") or can.get("amx_bf16") else "float32"
