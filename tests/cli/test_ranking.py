"""Tests when the command line ranks tokens, and that an answer names its policy."""

from __future__ import annotations

import pytest

from tests.command_line import as_json

pytestmark = pytest.mark.slow

QUESTION = "When was the Marlow observatory founded?"


@pytest.fixture
def index(run, model_dir, documents, tmp_path):
    def indexed(rank: str) -> dict:
        where = ["--store", tmp_path / rank, "--model", model_dir, "--chunk-tokens", 40]
        return as_json(run("index", documents, *where, "--ranking", rank, "--json"))

    return indexed


@pytest.fixture
def policy_of(run, model_dir, tmp_path):
    def asked(rank: str) -> str:
        where = ["--store", tmp_path / rank, "--model", model_dir, "--max-tokens", 1, "--json"]
        return as_json(run("ask", QUESTION, "--policy", "static", "--ratio", 0.3, *where))["policy"]

    return asked


def test_index_ranks_now_later_or_not_at_all(index, policy_of):
    now, lazy, off = (index(rank) for rank in ("now", "lazy", "off"))
    assert now["ranked"] == now["chunks"] > 0
    assert lazy["ranked"] == off["ranked"] == 0
    assert policy_of("now") == "static"
    # The first answer finds no ranks; its chunks are ranked after it.
    assert [policy_of("lazy"), policy_of("lazy")] == ["hkvd", "static"]
