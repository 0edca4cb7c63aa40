"""Tests which versions of vLLM are refused, and which are used with a warning."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; make setup installs it")

from cacheblend_rag.engines.vllm import versions
from cacheblend_rag.engines.vllm.arguments import step_size
from cacheblend_rag.errors import ModelError


@pytest.mark.parametrize("found", ["0.32.0", "0.32.3+cpu", "0.33.0", "0.33.1rc1"])
def test_tested_versions_are_used_without_a_warning(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr(versions, "installed_version", lambda: found)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        versions.check_version()


@pytest.mark.parametrize("found", ["0.34.0", "1.0.0"])
def test_a_newer_version_is_used_with_a_warning(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr(versions, "installed_version", lambda: found)
    with pytest.warns(UserWarning, match=rf"{found} has not been tried"):
        versions.check_version()


@pytest.mark.parametrize(("found", "match"), [("0.31.2", "older"), ("0.9.0", "older"), (None, "not installed")])
def test_an_older_version_and_a_missing_vllm_are_refused(
    monkeypatch: pytest.MonkeyPatch, found: str | None, match: str
) -> None:
    monkeypatch.setattr(versions, "installed_version", lambda: found)
    with pytest.raises(ModelError, match=match):
        versions.check_version()


def test_the_report_of_a_step_is_found_in_every_kind_of_output() -> None:
    report = SimpleNamespace()
    plain = SimpleNamespace(kv_connector_output=report)
    outputs = [
        plain,
        SimpleNamespace(_model_runner_output=plain),
        SimpleNamespace(model_runner_output=plain),
        SimpleNamespace(get_kv_connector_output=lambda: report),
    ]
    assert [versions.connector_output(output) for output in outputs] == [report] * 4
    assert versions.connector_output(SimpleNamespace(kv_connector_output=None)) is None
    assert versions.connector_output(SimpleNamespace()) is None


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"max_num_batched_tokens": 8192, "max_num_seqs": 1024}),
        ({"max_num_batched_tokens": 512}, {"max_num_seqs": 512}),
        ({"max_num_batched_tokens": 512, "max_num_seqs": 7}, {}),
        ({"max_num_seqs": 7}, {"max_num_batched_tokens": 8192}),
        ({"enable_chunked_prefill": False}, {"max_num_seqs": 1024}),
    ],
)
def test_the_step_size_on_a_gpu_is_the_servers_unless_the_user_sets_it(
    given: dict[str, int], expected: dict[str, int]
) -> None:
    assert step_size(given) == expected
