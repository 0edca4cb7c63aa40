"""The log-likelihood of given completions behind a prompt that has been run."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cacheblend_rag.engines.results import Score
from cacheblend_rag.engines.transformers.cache import ModelsOwnCache, PositionedCache
from cacheblend_rag.engines.transformers.target import ModelRunner


def score_behind(
    runner: ModelRunner,
    cache: PositionedCache | ModelsOwnCache,
    logits: torch.Tensor,
    completions: Sequence[Sequence[int]],
) -> list[Score]:
    """Score ``completions`` one after another behind the same prompt.

    Args:
        runner: The model.
        cache: The prompt's; a :class:`ModelsOwnCache` serves one completion only, since it cannot go back.
        logits: Of the prompt's last token, ``[vocab]``.
        completions: Token ids of each, none empty.
    """
    if isinstance(cache, ModelsOwnCache):
        (only,) = completions
        return [_score(_token_by_token(runner, cache, logits, only), only)]
    behind, scores = cache.length, []
    for ids in completions:
        rows = logits[None]
        if len(ids) > 1:
            rows = torch.cat([rows, runner.follow(torch.tensor([ids[:-1]], device=runner.device), cache)[0]])
            cache.filled(behind)
        scores.append(_score(rows, ids))
    return scores


def _token_by_token(
    runner: ModelRunner, cache: ModelsOwnCache, logits: torch.Tensor, ids: Sequence[int]
) -> torch.Tensor:
    rows = [logits]
    for token in ids[:-1]:
        rows.append(runner.append(torch.tensor([[token]], device=runner.device), cache)[0])
    return torch.stack(rows)


def _score(logits: torch.Tensor, ids: Sequence[int]) -> Score:
    """Read the score of ``ids`` off ``logits``, ``[tokens, vocab]``, each row the one before its token."""
    wanted = torch.tensor([list(ids)], device=logits.device).T
    return Score(tuple(logits.float().log_softmax(-1).gather(1, wanted)[:, 0].tolist()))
