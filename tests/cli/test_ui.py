"""Tests the options that `cacheblend ui` passes to the page; tests/ui tests the page itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from cacheblend_rag.ui.workspace import Choices


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Choices, int, bool]]:
    calls: list[Any] = []
    monkeypatch.setattr(
        "cacheblend_rag.ui.launch.serve", lambda choices, port, browser: calls.append((choices, port, browser))
    )
    return calls


def test_the_bundled_model_comes_with_example_documents(
    run: Callable[..., Result], served: list[tuple[Choices, int, bool]], home: Path
) -> None:
    result = run("ui", "--model", "bundled")
    assert result.exit_code == 0, result.stderr
    assert "http://127.0.0.1:7860" in result.stderr
    choices, port, browser = served[0]
    assert (port, browser) == (7860, True)
    assert choices.seed is not None and (choices.seed / "ship-logs.md").is_file()
    assert choices.store().parent == home and choices.store().name.startswith("demo-")


def test_ui_without_options_opens_the_default_store_without_examples(
    run: Callable[..., Result], served: list[tuple[Choices, int, bool]], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str | None] = []
    monkeypatch.setattr("cacheblend_rag.cli.ui.open_any_engine", lambda chosen, *rest: loaded.append(chosen.model))
    run("ui")
    choices = served[0][0]
    assert (choices.store(), choices.seed) == (home / "store", None)
    choices.load_engine(choices.store())
    assert loaded == ["smollm2"]


def test_ui_passes_its_options_to_the_page(
    run: Callable[..., Result], served: list[tuple[Choices, int, bool]], tmp_path: Path
) -> None:
    result = run("ui", "--store", tmp_path, "--port", 8123, "--no-browser", "--k", 3, "--ratio", 0.2, "--max-tokens", 9)
    assert result.exit_code == 0, result.stderr
    choices, port, browser = served[0]
    assert (choices.store(), choices.seed, port, browser) == (tmp_path, None, 8123, False)
    assert "The page is at http://127.0.0.1:8123" in result.stderr and "Opening" not in result.stderr
    assert (choices.k, choices.settings.ratio, choices.sampling.max_tokens) == (3, 0.2, 9)


def test_a_value_out_of_range_is_refused_before_the_page_is_served(
    run: Callable[..., Result], served: list[tuple[Choices, int, bool]]
) -> None:
    result = run("ui", "--ratio", 2)
    assert result.exit_code == 2 and "ratio is 2.0" in result.stderr and not served


def test_device_is_refused_together_with_server(run: Callable[..., Result], served: list[Any], tmp_path: Path) -> None:
    from cacheblend_rag.errors import InputError

    run("ui", "--server", "http://127.0.0.1:9", "--device", "cpu", "--store", tmp_path)
    with pytest.raises(InputError, match="--device does not go with --server"):
        served[0][0].load_engine(tmp_path)
