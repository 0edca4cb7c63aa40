"""The index finds the largest inner products, and is whole or absent, whenever its writer is stopped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cacheblend_lab.realm.index import PassageIndex, bring_index, clear_unfinished, embed, newest_step
from cacheblend_lab.realm.model import RealmModel
from cacheblend_lab.realm.passages import Collator, Passage, tokenize
from cacheblend_rag.errors import InputError


def test_a_search_equals_a_plain_product_without_the_excluded_passage() -> None:
    torch.manual_seed(0)
    vectors, queries = torch.randn(30, 8), torch.randn(5, 8)
    index = PassageIndex.build(vectors, 3)
    order = (queries @ vectors.T).argsort(1, descending=True).tolist()
    assert index.search(queries, 4) == [row[:4] for row in order]
    without = [row[1] for row in order]
    assert index.search(queries, 4, without) == [[row[0], *row[2:5]] for row in order]
    assert index.search(queries, 99, without)[0] == [at for at in order[0] if at != without[0]]
    assert torch.equal(index.vectors([[3, 1], [0, 3]]), vectors[torch.tensor([[3, 1], [0, 3]])])


def test_an_index_gets_its_name_when_complete_and_two_are_kept(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="realm pretrain"):
        PassageIndex.load(tmp_path)
    for step in (0, 10, 20):
        PassageIndex.build(torch.full((4, 2), float(step + 1)), step).save(tmp_path)
    (tmp_path / ".building-77").mkdir()  # its writer was killed
    assert newest_step(tmp_path) == 20
    assert sorted(path.name for path in tmp_path.iterdir()) == [".building-77", "step-00000010", "step-00000020"]
    loaded = PassageIndex.load(tmp_path)
    assert (loaded.step, loaded.size) == (20, 4)
    assert loaded.vectors([[2]]).tolist() == [[[21.0, 21.0]]]
    clear_unfinished(tmp_path)
    assert not (tmp_path / ".building-77").exists()


@pytest.mark.parametrize("links", [True, False])
def test_a_run_starts_with_the_newest_index_of_another_run_as_step_0(
    links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise OSError("no links here")

    if not links:
        monkeypatch.setattr("os.link", refuse)
    for step in (3, 60):
        PassageIndex.build(torch.full((2, 4), float(step)), step).save(tmp_path / "one")
    (tmp_path / "other" / ".building-1").mkdir(parents=True)  # a killed writer left it
    bring_index(tmp_path / "one", tmp_path / "other")
    found = PassageIndex.load(tmp_path / "other")
    assert (found.step, found.size) == (0, 2)
    assert found.vectors([[0, 1]]).tolist() == [[[60.0] * 4] * 2]
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["step-00000000"]
    assert PassageIndex.load(tmp_path / "one").step == 60


def test_faiss_index_kinds_are_built_and_unknown_kinds_named(tmp_path: Path) -> None:
    torch.manual_seed(0)
    PassageIndex.build(torch.randn(200, 8), 0, "IVF2,Flat").save(tmp_path)
    assert PassageIndex.load(tmp_path).size == 200
    with pytest.raises(InputError, match="'Nothing'"):
        PassageIndex.build(torch.randn(9, 8), 0, "Nothing")


def test_vectors_follow_the_order_of_passages_and_embedding_stops_on_request(
    model: RealmModel, passages: list[Passage]
) -> None:
    tokenized = tokenize(passages, model.tokenizer, 40)
    collator = Collator(model.tokenizer, torch.device("cpu"))
    found = embed(model.document, tokenized, collator)
    assert found is not None
    for passage, vector in zip(tokenized, found, strict=True):
        alone = model.document(collator.documents([passage]))[0]
        assert torch.allclose(vector, alone, atol=1e-5)
    assert embed(model.document, tokenized, collator, lambda: False) is None
