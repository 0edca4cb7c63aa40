"""What to take where nothing is said: for a tiny BERT of random weights, and for a trained one."""

from __future__ import annotations

from typing import Final

from cacheblend_rag.realm.finetune import FinetuneSettings
from cacheblend_rag.realm.model import TINY, Shape
from cacheblend_rag.realm.pretrain import PretrainSettings

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


def pretraining(bert: str) -> PretrainSettings:
    """Return how to pre-train: ``tiny`` for minutes on one core, a BERT of a directory as in the paper but for the steps."""
    return _TINY if bert == TINY else PretrainSettings(bert=bert)


def tuning(random: bool) -> FinetuneSettings:
    """Return how to fine-tune a model that began with random weights, or a trained one."""
    return _TINY_TUNING if random else FinetuneSettings()
