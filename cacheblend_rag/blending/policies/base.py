"""The interface of a token-selection policy: which of the tokens with stored KV to recompute."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch


@dataclass(frozen=True)
class Candidates:
    """Tokens with stored, inexact KV, in ascending position. All tensors are ``[candidates]`` on one device.

    Attributes:
        positions: Absolute positions in the prompt.
        chunk: Which chunk of the prompt each belongs to, counting chunks with candidates from 0.
        offset: Index within its chunk.
        deviation: KV deviation at the check layer (fp32, summed over KV heads and dimensions of K and V), for policies
            that need it.
        attention: How much the question attends to each (fp32, mean over layers, heads and question tokens), measured over
            stored KV, for policies that need it.
        static: Static deviation (:mod:`cacheblend_rag.blending.static`), where every chunk's is stored.
    """

    positions: torch.Tensor
    chunk: torch.Tensor
    offset: torch.Tensor
    deviation: torch.Tensor | None = None
    attention: torch.Tensor | None = None
    static: torch.Tensor | None = None


class SelectionPolicy(ABC):
    """Chooses tokens to recompute. The question, text between chunks and missing chunks are always recomputed besides.

    Attributes:
        name: What users call it.
        needs_static: Whether it ranks by the static deviation stored with each chunk (costs nothing at the question).
        needs_deviation: Whether KV deviation must be measured first (costs the dense pass up to the check layer).
        needs_attention: Whether the question's attention must be measured first (costs a pass of the question, and waiting for
            the stored KV of all layers).
        without_static: Name of the policy that takes its place where a chunk has no static deviation; for those that need it.
    """

    name: ClassVar[str]
    needs_static: ClassVar[bool] = False
    needs_deviation: ClassVar[bool] = False
    needs_attention: ClassVar[bool] = False
    without_static: ClassVar[str] = ""

    @abstractmethod
    def select(self, candidates: Candidates, count: int) -> torch.Tensor:
        """Return a boolean mask ``[candidates]`` of the tokens to recompute, about ``count`` of them.

        Must depend on its arguments alone, so that every tensor-parallel rank chooses the same tokens.
        """


def highest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Return a boolean mask ``[candidates]`` of the ``count`` highest ``scores``; the earlier one where two are equal."""
    mask = torch.zeros_like(scores, dtype=torch.bool)
    mask[torch.argsort(scores, descending=True, stable=True)[:count]] = True
    return mask
