"""Tests the contents of the built distributions, which hatchling builds offline in this environment."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("hatchling", reason="hatchling is not installed; make setup installs it")

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent


def build(kind: str, directory: Path, project: Path = ROOT) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "--target", kind, "--directory", str(directory)]
    subprocess.run(command, cwd=project, check=True, capture_output=True)
    (built,) = directory.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    with zipfile.ZipFile(build("wheel", tmp_path_factory.mktemp("wheel"))) as archive:
        return set(archive.namelist())


def test_the_wheel_holds_only_the_package(wheel: set[str]) -> None:
    tops = {name.partition("/")[0] for name in wheel}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"cacheblend_rag"}
    # These words find the generators of training in any folder.
    folders = {part for name in wheel for part in name.split("/")[:-1]}
    assert not folders & {"training", "tests"}
    assert not [name for name in wheel if name.endswith("/train.py") or "make_corpus" in name]


def test_the_wheel_holds_every_file_of_the_package(wheel: set[str]) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "cacheblend_rag"], cwd=ROOT, check=False, capture_output=True, text=True
    ).stdout.split("\n")
    assert {name for name in listed if name} <= wheel


def test_the_wheel_holds_the_data_files(wheel: set[str]) -> None:
    writer = ("adapter_config.json", "adapter_model.safetensors", "cacheblend.json", "writer.json")
    needed = {
        "py.typed",
        "demo/questions.json",
        "demo/corpus/handbook.md",
        "demo/corpus/observatory-notes.txt",
        "demo/model/cacheblend.json",
        "demo/model/config.json",
        "demo/model/model.safetensors",
        "demo/model/tokenizer.json",
        *(f"engines/writers/smollm2/{name}" for name in writer),
        *(f"engines/writers/probe/{name}" for name in ("cacheblend.json", "writer.json")),
    }
    assert {f"cacheblend_rag/{name}" for name in needed} <= wheel


def test_the_labs_wheel_holds_only_its_package_and_its_sdist_the_training_files(tmp_path: Path) -> None:
    with zipfile.ZipFile(build("wheel", tmp_path / "wheel", ROOT / "lab")) as archive:
        names = archive.namelist()
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"cacheblend_lab"}
    assert "cacheblend_lab/evaluation/report.html.j2" in names
    with tarfile.open(build("sdist", tmp_path / "sdist", ROOT / "lab")) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    assert {"training/train.py", "training/make_corpus.py", "training/common_words.txt"} <= set(names)


def test_the_labs_entry_points_declare_its_list_of_commands() -> None:
    from cacheblend_lab.commands import COMMANDS

    from cacheblend_rag import cli

    declared = tomllib.loads((ROOT / "lab/pyproject.toml").read_text("utf-8"))["project"]["entry-points"]
    assert declared["cacheblend_rag.commands"] == COMMANDS
    assert COMMANDS.keys() == cli._OF_THE_LAB
