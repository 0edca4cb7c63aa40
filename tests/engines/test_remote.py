"""Run the contract of all engines on the remote engine with a real server."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openai", reason="the openai package is not installed; make setup installs it")

from cacheblend_rag.blending.settings import BlendSettings
from cacheblend_rag.engines.base import BlendEngine
from cacheblend_rag.engines.remote import RemoteEngine
from tests.engines.contract import SHORT, EngineContract
from tests.engines.contract_conversation import ConversationContract
from tests.server.running import KEY, RunningServer


class TestRemoteEngine(EngineContract, ConversationContract):
    block = 128

    @pytest.fixture
    def engine(self, server: RunningServer) -> Any:
        with RemoteEngine(server.url, api_key=KEY) as engine:
            yield engine

    @pytest.fixture
    def reopened(self, engine: BlendEngine) -> Callable[[], Any]:
        return lambda: nullcontext(engine)  # the server holds no KV in RAM

    @pytest.fixture
    def root(self, server: RunningServer) -> Path:
        return server.store

    def test_the_servers_controller_decides_the_ratio_auto(self, engine, chunks, prompt, server: RunningServer) -> None:
        engine.precompute(chunks)
        before = {n: server.metric(n) for n in ("decisions_total", "decided_first_token_seconds_sum")}
        # The decision depends on the machine's measured speed; the test asserts only that there is one and that it is reported.
        done = engine.generate(prompt, SHORT, BlendSettings("auto", "hkvd", (1,)))
        assert "stored KV for 4 of 4 chunks" in done.reason
        assert f"(expected in {done.expected_s:.3g} s, an ordinary prefill in " in done.reason
        decided = "prefilled" if done.mode == "prefill" else "partly_in_place" if done.in_place else "blended"
        assert server.metric("decisions_total", decision=decided) >= 1
        assert server.metric("decisions_total") == before["decisions_total"] + 1
        assert server.metric("decided_first_token_seconds_sum") > before["decided_first_token_seconds_sum"]
        given = engine.generate(prompt, SHORT, BlendSettings(ratio=0.3))
        assert given.expected_s is None
        assert server.metric("decisions_total") == before["decisions_total"] + 1

    def test_a_model_for_separate_chunks_stores_missing_chunks_before_it_computes_the_prompt(self) -> None:
        pytest.skip("the profile is the server's, which has one for all tests")

    def test_chunks_beyond_the_budget_are_reported_and_their_prompt_is_answered(self) -> None:
        pytest.skip("the budget is the server's, which has one for all tests")
