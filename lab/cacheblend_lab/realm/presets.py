"""Sets the defaults for a tiny BERT with random weights, for the bundled BERT, and for any other trained BERT."""

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
# Settings of the demonstration: a trained BERT needs lower learning rates, and its steps take longer.
_BUNDLED_DEMO: Final = replace(_TINY, bert=BUNDLED, warm_steps=150, warm_batch=32, warm_rate=1e-4, rate=3e-5)
_BUNDLED_DEMO_TUNING: Final = FinetuneSettings(steps=300, batch=12, rate=1e-4, refresh_every=30)


def pretraining(bert: str) -> PretrainSettings:
    """Return the settings of pre-training: minutes on one core for ``tiny``, else the paper's, with fewer steps."""
    return _TINY if bert == TINY else PretrainSettings(bert=bert)


def tuning(random: bool) -> FinetuneSettings:
    """Return the settings of fine-tuning, for a model that began with random weights or with a trained BERT."""
    return _TINY_TUNING if random else FinetuneSettings()


def demonstration(bert: str) -> tuple[PretrainSettings, FinetuneSettings]:
    """Return the demonstration's settings of pre-training and fine-tuning for ``tiny`` or ``minilm``."""
    if bert == TINY:
        return _TINY, _TINY_TUNING
    shape = replace(_BUNDLED_DEMO.shape, dtype=_fast_dtype())
    return replace(_BUNDLED_DEMO, shape=shape), _BUNDLED_DEMO_TUNING


def _fast_dtype() -> Dtype:
    """Return bfloat16 if the CPU has bfloat16 instructions, else float32; bfloat16 may be slower without them."""
    can: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # older torch versions lack the function
    return "bfloat16" if can.get("avx512_bf16") or can.get("amx_bf16") else "float32"
