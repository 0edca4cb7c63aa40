"""A sequence's pages in vLLM's cache, and positions of it as attention kernels take them: in runs of neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from cacheblend_rag.blending.fetch import sent

if TYPE_CHECKING:
    from cacheblend_rag.engines.vllm.paged import PagedModel


class Pages:
    """The pages of one sequence, and with them the slots of its positions: worked out once, for all layers and passes.

    Attributes:
        slots: ``[positions]``, in host memory: as many as have a page, at most ``tokens``.
        on_device: The same, on the model's device.
        table: The block ids, ``[1, blocks]``, on the model's device.
    """

    def __init__(self, paged: PagedModel, block_ids: Sequence[int], tokens: int):
        """Take the pages ``block_ids`` of a sequence of ``tokens``."""
        covered = min(tokens, len(block_ids) * paged.block_size)
        self.slots = paged.slots(block_ids, torch.arange(covered))
        self.on_device = sent(self.slots, paged.device)
        self.table = sent(torch.tensor(list(block_ids), dtype=torch.int32)[None], paged.device)


def first_part(positions: torch.Tensor, max_tokens: int, max_runs: int) -> torch.Tensor:
    """Return the first of ascending ``positions``: at most ``max_tokens``, in at most ``max_runs`` runs of neighbours."""
    part = positions[:max_tokens]
    breaks = torch.nonzero(gaps(part)).flatten()
    return part if len(breaks) < max_runs else part[: int(breaks[max_runs - 1]) + 1]


def runs_in_pages(slots: torch.Tensor, size: int) -> Sequence[torch.Tensor]:
    """Cut ``slots`` where neighbours end and where a page of ``size`` does."""
    cuts = torch.nonzero(gaps(slots) | (slots[1:] % size == 0)).flatten() + 1
    return torch.tensor_split(slots, cuts)


def gaps(values: torch.Tensor) -> torch.Tensor:
    """Say of every value but the first whether it does not follow the one before it."""
    return values[1:] != values[:-1] + 1
