"""Computes p(y|x) = Σ p(y|z,x) p(z|x) over candidates (REALM, arXiv 2002.08909)."""

from __future__ import annotations

from torch import Tensor


def log_marginal(relevance: Tensor, likelihood: Tensor) -> Tensor:
    """Return log p(y|x) (section 3.1).

    The gradient in ``relevance`` is r(z) = [p(y|z,x) / p(y|x) - 1] p(z|x) (section 3.3), posterior minus prior.
    Autograd computes the gradient through both softmaxes.

    Args:
        relevance: f(x, z) of all candidates, the null document among them, ``[x, z]``.
        likelihood: log p(y|z,x), ``[x, z]``; minus infinity where y is impossible.

    Returns:
        log p(y|x), ``[x]``; minus infinity where no candidate makes y possible.
    """
    return (relevance.log_softmax(-1) + likelihood).logsumexp(-1)


def posterior(relevance: Tensor, likelihood: Tensor) -> Tensor:
    """Return p(z|x,y), ``[x, z]``: the probability that candidate z explains y."""
    return (relevance.log_softmax(-1) + likelihood).softmax(-1)
