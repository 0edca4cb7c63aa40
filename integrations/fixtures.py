"""Fixtures that the tests of both integrations share; each ``conftest.py`` imports them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cacheblend_rag import BlendEngine, TransformersEngine
from cacheblend_rag.blending import controller


@pytest.fixture(autouse=True, scope="session")
def _blends() -> Iterator[float]:
    """Turn on blending for short prompts, whose blends these tests check: a prefill of the bundled model is as fast."""
    gain = controller.GAIN
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(controller, "GAIN", 0.0)
        yield gain


@pytest.fixture
def real_gain(_blends: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the users' setting: a prompt that is answered as fast without a blend is not blended."""
    monkeypatch.setattr(controller, "GAIN", _blends)


@pytest.fixture
def one_engine(engine: BlendEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every opening of the bundled model return the engine of all tests."""
    if isinstance(engine, TransformersEngine):
        monkeypatch.setattr("cacheblend_rag.TransformersEngine", lambda: engine)
