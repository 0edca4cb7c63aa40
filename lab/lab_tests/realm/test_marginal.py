"""p(y|x) of the networks is a distribution, and its gradient is r(z) times that of f(x, z) (paper section 3.3, appendix
A)."""

from __future__ import annotations

import pytest
import torch

from cacheblend_lab.marginal import log_marginal, posterior
from cacheblend_lab.realm.model import RealmModel
from cacheblend_lab.realm.passages import Collator, Passage, Query, tokenize


def test_the_towers_gradient_is_r_times_the_gradient_of_f(model: RealmModel, passages: list[Passage]) -> None:
    model = model.double()
    collator = Collator(model.tokenizer, torch.device("cpu"))
    query = collator.queries([Query.question("Where is Ship AA?", model.tokenizer, 24)])
    documents = collator.documents([None, *tokenize(passages[:3], model.tokenizer, 40)])
    likelihood = torch.tensor([[-3.0, -0.5, -4.0, -2.0]], dtype=torch.float64)
    weights = [
        model.query.project.weight,
        model.document.project.weight,
        model.document.bert.embeddings.LayerNorm.weight,
    ]

    def f() -> torch.Tensor:
        return model.relevance(model.query(query), model.document(documents))

    whole = torch.autograd.grad(log_marginal(f(), likelihood).sum(), weights)
    r = posterior(f().detach(), likelihood) - f().detach().softmax(-1)
    summed = [torch.zeros_like(weight) for weight in weights]
    for z in range(4):
        for total, one in zip(summed, torch.autograd.grad(f()[0, z], weights), strict=True):
            total.add_(r[0, z] * one)
    for found, expected in zip(whole, summed, strict=True):
        assert torch.allclose(found, expected, atol=1e-6)
        assert expected.abs().max() > 1e-4


def test_p_of_y_sums_to_one_with_the_null_document_among_the_candidates(
    model: RealmModel, passages: list[Passage]
) -> None:
    model = model.double()
    collator = Collator(model.tokenizer, torch.device("cpu"))
    query = Query([*Query.question("Her home port is", model.tokenizer, 24).ids, collator.mask], [4], [0])
    candidates = [None, *tokenize(passages[:4], model.tokenizer, 40)]
    with torch.no_grad():
        relevance = model.relevance(
            model.query(collator.queries([query])), model.document(collator.documents(candidates))
        )
        states = model.states(collator.pairs([query] * 5, candidates))
        tokens = model.token_logprobs(states[:, 1 + query.masked[0]])  # [candidates, vocabulary]
        p = log_marginal(relevance.expand(tokens.shape[1], -1), tokens.T).exp()
    assert float(p.sum()) == pytest.approx(1, abs=1e-12)
