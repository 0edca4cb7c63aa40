"""How to treat stored KV in one prompt, and the paper's baselines as settings (paper section 7)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cacheblend_rag.errors import InputError

Reuse = Literal["chunks", "prefix", "nothing"]


@dataclass(frozen=True)
class BlendSettings:
    """How to treat stored KV in one prompt.

    Attributes:
        ratio: Recompute ratio: the share of reused chunk tokens (outside the exact prefix) that is recomputed.
            None takes the model profile's.
        policy: Name of a token-selection policy (:mod:`cacheblend_rag.blending.policies`).
        check_layers: Layers at which KV deviation is measured, ascending; None takes the model profile's.
        reuse: ``"chunks"`` blends all stored chunks, ``"prefix"`` reuses only what an ordinary prefix cache could,
            ``"nothing"`` is the full prefill.
    """

    ratio: float | None = None
    policy: str = "hkvd"
    check_layers: tuple[int, ...] | None = None
    reuse: Reuse = "chunks"

    def __post_init__(self) -> None:
        """Refuse a ratio outside [0, 1]."""
        if self.ratio is not None and not 0 <= self.ratio <= 1:
            raise InputError(f"ratio is {self.ratio}; give a value from 0 (full KV reuse) to 1 (full recompute).")


FULL_RECOMPUTE = BlendSettings(reuse="nothing")
PREFIX_CACHING = BlendSettings(reuse="prefix")
FULL_REUSE = BlendSettings(0.0, "none")
