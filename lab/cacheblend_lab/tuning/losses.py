"""Computes the losses of a query encoder over a question's candidates; the null document is one of the candidates.

All losses take the relevance f(x, z) as logits and the reader's log p(y|z, x), both ``[questions, candidates]``. p(z|x)
is the softmax of f over the candidates, from the current parameters (REALM, section 3.1).
"""

from __future__ import annotations

from typing import Final, Literal, get_args

import torch

from cacheblend_lab.marginal import log_marginal

Loss = Literal["marginal", "kl", "infonce"]
LOSSES: Final[tuple[str, ...]] = get_args(Loss)


def marginal_loss(relevance: torch.Tensor, reader: torch.Tensor) -> torch.Tensor:
    """Return the mean of -log p(y|x)."""
    return -log_marginal(relevance, reader).mean()


def kl_loss(relevance: torch.Tensor, reader: torch.Tensor) -> torch.Tensor:
    """Return the mean KL of p(z|x) from the reader's likelihoods, normalised over the candidates (REPLUG)."""
    wanted = reader.log_softmax(-1)
    return torch.nn.functional.kl_div(relevance.log_softmax(-1), wanted, log_target=True, reduction="batchmean")


def infonce_loss(relevance: torch.Tensor, reader: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of the candidate with the reader's highest likelihood; the others are negatives.

    Candidates with more than half of the highest likelihood are left out.
    """
    best = reader.max(-1, keepdim=True)
    rivals = reader > best.values - torch.log(torch.tensor(2.0))
    rivals = rivals.scatter(-1, best.indices, False)
    logits = relevance.masked_fill(rivals, float("-inf"))
    return torch.nn.functional.cross_entropy(logits, best.indices[:, 0])


def loss_of(name: Loss, relevance: torch.Tensor, reader: torch.Tensor) -> torch.Tensor:
    """Return the loss called ``name``."""
    return {"marginal": marginal_loss, "kl": kl_loss, "infonce": infonce_loss}[name](relevance, reader)
