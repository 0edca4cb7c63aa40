"""Tests the networks: spans against a loop, weights on disk, and the null document."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cacheblend_lab.realm.model import RealmModel, Shape, SpanHead
from cacheblend_lab.realm.passages import Collator, Passage, Query, tokenize
from cacheblend_rag.errors import ModelError
from lab_tests.realm.conftest import SHAPE


def test_the_span_head_scores_as_an_mlp_over_both_ends() -> None:
    torch.manual_seed(1)
    head, states = SpanHead(8, 3), torch.randn(2, 6, 8)
    readable = torch.tensor([[0, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1]])
    found = head(states, readable)
    first = torch.cat([head.start.weight, head.end.weight], 1)  # weights over the concatenation
    for text in range(2):
        scores = {}
        for start in range(6):
            for end in range(start, min(start + 3, 6)):
                if readable[text, start : end + 1].all():
                    hidden = first @ torch.cat([states[text, start], states[text, end]]) + head.start.bias
                    scores[start, end - start] = head.score(head.norm(hidden.relu())).item()
        expected = torch.tensor(list(scores.values())).log_softmax(0)
        assert torch.allclose(torch.stack([found[(text, *at)] for at in scores]), expected, atol=1e-5)
        assert int((found[text] > -torch.inf).sum()) == len(scores)
        assert found[text].exp().sum().item() == pytest.approx(1, abs=1e-5)


def test_a_passage_without_a_span_has_no_likelihood_and_finite_gradients() -> None:
    head, states = SpanHead(8, 3), torch.randn(2, 4, 8, requires_grad=True)
    found = head(states, torch.tensor([[0, 0, 0, 0], [0, 1, 1, 0]]))
    assert torch.isneginf(found[0]).all()
    found[1, 1, 0].backward()
    assert states.grad is not None
    assert torch.isfinite(states.grad).all()
    assert states.grad[1].abs().sum() > 0


def test_pairs_are_laid_out_in_berts_format(model: RealmModel) -> None:
    tokenizer = model.tokenizer
    (passage,) = tokenize([Passage("Ship AA", "She carries salt.")], tokenizer, 40)
    query = Query.question("Where is Ship AA?", tokenizer, 24)
    pairs = Collator(tokenizer, torch.device("cpu")).pairs([query, query], [passage, None])
    text = tokenizer.convert_ids_to_tokens(pairs.ids[0].tolist())
    whole = " ".join(text).replace(" ##", "")
    assert whole == "[CLS] where is ship aa ? [SEP] ship aa [SEP] she carries salt . [SEP]"
    body = pairs.readable()[0].bool()
    assert tokenizer.convert_tokens_to_string([t for t, inside in zip(text, body, strict=True) if inside]) in (
        "she carries salt.",
        "she carries salt .",
    )
    null = [t for t, real in zip(pairs.ids[1].tolist(), pairs.mask[1].tolist(), strict=True) if real]
    assert null == [*pairs.ids[0, : len(query.ids) + 2].tolist(), tokenizer.sep_token_id]
    assert int(pairs.readable()[1].sum()) == 0
    assert pairs.segments[0].tolist() == [0] * (len(query.ids) + 2) + [1] * (pairs.ids.shape[1] - len(query.ids) - 2)


def test_a_saved_model_is_loaded_unchanged(model: RealmModel, tmp_path: Path) -> None:
    model.save(tmp_path)
    loaded = RealmModel.load(tmp_path)
    assert loaded.shape == model.shape
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name]), name


def test_towers_and_encoder_start_from_the_given_bert(model: RealmModel, bert: Path) -> None:
    from transformers import BertForMaskedLM

    given = BertForMaskedLM.from_pretrained(str(bert)).eval()
    ids = torch.tensor([[2, 7, 8, 3]])
    with torch.no_grad():
        expected = given(input_ids=ids).logits
        assert torch.allclose(model.encoder(input_ids=ids).logits, expected)
        states = given.bert(input_ids=ids).last_hidden_state
        for tower in (model.query, model.document):
            assert torch.allclose(tower.bert(input_ids=ids).last_hidden_state, states)
    assert not model.shape.random


def test_a_bert_without_a_head_loads_its_layers_and_is_marked_for_a_new_head(
    bert: Path, headless: Path, tmp_path: Path
) -> None:
    whole, made = RealmModel.create(str(bert), SHAPE), RealmModel.create(str(headless), SHAPE)
    assert (whole.shape.new_head, made.shape.new_head) == (False, True)
    assert not made.shape.random
    for name, tensor in whole.encoder.bert.state_dict().items():
        assert torch.equal(tensor, made.encoder.bert.state_dict()[name]), name
    made.save(tmp_path / "saved")
    assert RealmModel.load(tmp_path / "saved").shape == made.shape


def test_a_bert_with_a_missing_layer_is_refused(headless: Path) -> None:
    config = json.loads((headless / "config.json").read_text())
    (headless / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(ModelError, match=r"it has no bert\.encoder\.layer\.2"):
        RealmModel.create(str(headless), SHAPE)


def test_bfloat16_applies_to_berts_products_only(model: RealmModel, bert: Path, tmp_path: Path) -> None:
    half = RealmModel.create(str(bert), replace(SHAPE, dtype="bfloat16")).eval()
    queries = Collator(model.tokenizer, torch.device("cpu")).queries([Query([7, 8, 9], [], [])])
    exact, near = model.states(queries), half.states(queries)
    assert near.dtype == torch.float32
    assert 0 < (exact - near).abs().max() < 0.05
    near.sum().backward()
    assert half.encoder.bert.embeddings.word_embeddings.weight.grad.dtype == torch.float32
    half.save(tmp_path)
    assert torch.equal(RealmModel.load(tmp_path).states(queries), near)


@pytest.mark.slow
def test_minilm_loads_the_bundled_embeddings_bert() -> None:
    made = RealmModel.create("minilm", SHAPE)
    assert (made.config.num_hidden_layers, made.config.hidden_size) == (6, 384)
    assert made.shape.new_head
    assert not made.shape.random


def test_lengths_are_cut_to_the_limit_of_the_bert(bert: Path) -> None:
    assert (
        RealmModel.create(str(bert), Shape(query_tokens=24, passage_tokens=500)).shape.passage_tokens == 128 - 24 - 32
    )


@pytest.mark.slow
def test_tiny_has_two_layers_of_128_and_the_bundled_vocabulary() -> None:
    tiny = RealmModel.create("tiny", SHAPE)
    assert (tiny.config.num_hidden_layers, tiny.config.hidden_size) == (2, 128)
    assert len(tiny.tokenizer) == tiny.config.vocab_size == 30522
    assert tiny.shape.random
    waves = tiny.encoder.bert.embeddings.position_embeddings.weight.detach()
    products = waves @ waves.T
    for distance in (0, 1, 7):  # similarity depends on distance alone
        assert products.diagonal(distance).std() < 1e-4 * products[0, 0]


@pytest.mark.parametrize("what", ["missing", "another kind"])
def test_a_directory_without_a_bert_is_named(what: str, tmp_path: Path) -> None:
    if what == "another kind":
        (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(
        ModelError, match="Give the directory of a BERT, minilm or tiny" if what == "missing" else "llama"
    ):
        RealmModel.create(str(tmp_path), SHAPE)
    with pytest.raises(ModelError, match="--output of pretrain"):
        RealmModel.load(tmp_path)
