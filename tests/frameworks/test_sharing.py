"""Tests that equal arguments share an engine that is opened once, and that conflicting arguments are refused."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cacheblend_rag import InputError, ServerError, TransformersEngine
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.frameworks import shared_engine, sharing
from tests.fake_engine import FakeEngine

ENVIRONMENT = ("CACHEBLEND_MODEL", "CACHEBLEND_STORE", "CACHEBLEND_BASE_URL", "CACHEBLEND_API_KEY")


@pytest.fixture(autouse=True)
def nothing_open(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    opened: dict = {}
    monkeypatch.setattr(sharing, "_opened", opened)
    yield
    for engine in opened.values():
        engine.close()


@pytest.mark.slow
def test_equal_arguments_share_an_engine_and_different_arguments_do_not(tmp_path: Path) -> None:
    first = shared_engine("bundled", store=tmp_path)
    assert shared_engine("bundled", store=str(tmp_path)) is first
    assert shared_engine("bundled") is not first
    assert first.generate("Who?", SamplingParams(2)).token_ids


@pytest.mark.slow
def test_a_shared_engine_has_the_given_dtype_writer_and_threads() -> None:
    given = torch.get_num_threads()
    try:
        named = shared_engine("bundled", dtype="bfloat16", writer="probe", threads=given + 1)
        assert isinstance(named, TransformersEngine)
        assert (named.dtype, torch.get_num_threads()) == (torch.bfloat16, given + 1)
        assert named.writer is not None
        plain = shared_engine("bundled", threads=given)
        assert isinstance(plain, TransformersEngine)
        assert (plain.dtype, plain.writer, torch.get_num_threads()) == (torch.float32, None, given)
        assert shared_engine("bundled", dtype="bfloat16", writer="probe") is named, "threads are the process's"
    finally:
        torch.set_num_threads(given)


def test_vllm_is_started_with_dtype_and_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict = {}
    module = types.ModuleType("cacheblend_rag.engines.vllm")
    module.VLLMEngine = lambda model, **given: asked.update(given) or FakeEngine()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    shared_engine("bundled", engine="vllm", dtype="bfloat16", writer=Path("w"))
    assert asked == {"store": None, "dtype": "bfloat16", "writer": "w"}


@pytest.mark.slow
def test_a_closed_engine_raises_and_its_name_opens_a_new_engine() -> None:
    first = shared_engine("bundled")
    first.close()
    assert first.closed
    with pytest.raises(InputError, match="TransformersEngine was closed"):
        first.generate("Who?")
    with pytest.raises(InputError, match="was closed"):
        first.precompute([])
    again = shared_engine("bundled")
    assert again is not first
    assert not again.closed


def test_concurrent_threads_open_an_engine_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made, gate = [], threading.Barrier(4)
    monkeypatch.setattr(
        "cacheblend_rag.engines.transformers.TransformersEngine",
        lambda *_, **__: made.append(TransformersEngine()) or made[-1],
    )
    found = []

    def take() -> None:
        gate.wait()
        found.append(shared_engine("bundled"))

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert found == made * 4


@pytest.mark.slow
def test_the_environment_fills_in_missing_arguments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="CACHEBLEND_MODEL"):
        shared_engine()
    monkeypatch.setenv("CACHEBLEND_MODEL", "bundled")
    monkeypatch.setenv("CACHEBLEND_STORE", str(tmp_path / "kv"))
    assert shared_engine() is shared_engine("bundled", store=tmp_path / "kv")
    assert (tmp_path / "kv").is_dir()
    monkeypatch.setenv("CACHEBLEND_BASE_URL", "http://127.0.0.1:9")
    with pytest.raises(ServerError, match=r"127\.0\.0\.1:9"):
        shared_engine(max_retries=0)
    assert shared_engine("bundled").fingerprint  # an argument overrides the environment


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"base_url": "http://127.0.0.1:9", "store": "x"}, "store="),
        ({"base_url": "http://127.0.0.1:9", "device": "cpu"}, "device="),
        ({"base_url": "http://127.0.0.1:9", "engine": "vllm"}, "engine="),
        ({"base_url": "http://127.0.0.1:9", "dtype": "bfloat16"}, "dtype="),
        ({"base_url": "http://127.0.0.1:9", "writer": "none"}, "writer="),
        ({"base_url": "http://127.0.0.1:9", "threads": 1}, "threads="),
        ({"model": "bundled", "dtype": "fp16"}, "'fp16'"),
        ({"model": "bundled", "dtype": torch.float16}, "float16"),
        ({"model": "bundled", "threads": 0}, "threads is 0"),
        ({"model": "bundled", "engine": "vllm", "threads": 2}, "threads="),
        ({"model": "bundled", "api_key": "x"}, "api_key="),
        ({"model": "bundled", "timeout_s": 3.0}, "timeout="),
        ({"model": "bundled", "max_retries": 3}, "max_retries="),
        ({"model": "bundled", "engine": "vllm", "device": "cpu"}, "device="),
        ({"model": "bundled", "engine": "tensorrt"}, "'tensorrt'"),
    ],
)
def test_conflicting_and_invalid_arguments_are_refused(arguments: dict, word: str) -> None:
    with pytest.raises(InputError, match=word):
        shared_engine(**arguments)


@pytest.mark.slow
def test_a_shared_engine_is_closed_without_an_error_at_process_exit(tmp_path: Path) -> None:
    code = (
        "from cacheblend_rag.frameworks import shared_engine; shared_engine('bundled', store=__import__('sys').argv[1])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def test_a_pickled_shared_engine_is_opened_by_its_name(tmp_path: Path) -> None:
    first = shared_engine("bundled", store=tmp_path)
    assert pickle.loads(pickle.dumps(first)) is first
    tenant = first.within("acme")
    assert pickle.loads(pickle.dumps(tenant)) is tenant
    with TransformersEngine() as given, pytest.raises(InputError, match="model given by name"):
        pickle.dumps(given)


def test_deepcopy_shares_the_engine() -> None:
    with TransformersEngine() as engine:
        assert copy.deepcopy({"engine": engine})["engine"] is engine
        assert copy.deepcopy(engine.within("acme")).namespace.name == "acme"
