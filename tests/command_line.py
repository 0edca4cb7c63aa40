"""Gives tests of the command line a small random model on disk, a few documents, and a separate home.

Folders whose tests run commands import these fixtures in their ``conftest.py``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner, Result

from cacheblend_rag.calibrate import costs, spot_check
from cacheblend_rag.cli import app
from cacheblend_rag.retrieval.embedding import Embedder
from tests.conftest import byte_level
from tests.gates import gate_once

DOCUMENTS = {
    "observatory.md": "# Observatory\n\nThe Marlow observatory was founded in 1911. It stands on a hill above the harbour.\n\n"
    "Its director is Ada Brenmoor. She came from the sea and knows every ship of the harbour by its bell.\n",
    "ships.txt": "The Proud Gull was launched in 1889. Her cargo is grain, and her captain keeps a canary.\n\n"
    "The Ivory Anchor sails at dawn. Her cargo is salt. Nobody on board plays the cello.\n",
}


_embedder = cache(Embedder.load)


def spend_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure bandwidths with 16 MiB, not 256; check an index by one question, not four; load an embedding model only once.

    A model passes the parity gate once for all commands.
    """
    gate_once(monkeypatch)
    monkeypatch.setattr(costs, "_BLOCK", 16 << 20)
    monkeypatch.setattr(spot_check, "_QUESTIONS", 1)
    monkeypatch.setattr(Embedder, "load", _embedder)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep the user's own profiles and store out of the tests, and let commands measure and check less."""
    spend_less(monkeypatch)
    monkeypatch.setenv("CACHEBLEND_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("model")
    tokenizer = byte_level()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.1,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    directory = tmp_path / "docs"
    directory.mkdir()
    for name, text in DOCUMENTS.items():
        (directory / name).write_text(text)
    return directory


@pytest.fixture
def run() -> Callable[..., Result]:
    """Run a command line; standard output and error are kept apart."""

    def invoke(*args: object, stdin: str | None = None) -> Result:
        return CliRunner().invoke(app, [str(arg) for arg in args], input=stdin)

    return invoke


def as_json(result: Result) -> dict:
    """Return what a successful command printed, which must be JSON and nothing else."""
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)
