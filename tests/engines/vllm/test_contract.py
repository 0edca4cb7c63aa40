"""Run the contracts of all engines on the vLLM engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import transformers as hf

from cacheblend_rag.engines.base import BlendEngine
from tests.conftest import tokenizer_named
from tests.engines.contract import SHORT, EngineContract
from tests.engines.contract_controller import ControllerContract
from tests.engines.contract_conversation import ConversationContract
from tests.engines.contract_spans import SpansContract
from tests.engines.vllm.engines import SHAPE, clear, save_model, start

_SHAPE = {**SHAPE, "vocab_size": 448, "max_position_embeddings": 1024}


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_model(hf.Qwen3Config(**_SHAPE, head_dim=32), directory)
    tokenizer_named("byte_level").save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def shared(model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    # Without a RAM tier the engine sees a test's changes of files at once.
    store = tmp_path_factory.mktemp("store")
    with start(model_directory, store, ram_budget=0, skip_tokenizer_init=False) as engine:
        engine.root = store
        yield engine


class TestVLLMEngine(EngineContract, ControllerContract, ConversationContract, SpansContract):
    block = 128

    @pytest.fixture(autouse=True)
    def _directory(self, model_directory: Path) -> None:
        self.directory = model_directory

    def make_with_budget(self, nbytes: int) -> BlendEngine:
        return start(self.directory, None, ram_budget=nbytes, disk_budget=nbytes, skip_tokenizer_init=False)

    @pytest.fixture
    def engine(self, shared: Any) -> Any:
        clear(shared)
        shared.costs = None
        return shared

    @pytest.fixture
    def reopened(self, engine: Any) -> Callable[[], Any]:
        return lambda: nullcontext(engine)

    @pytest.fixture
    def root(self, shared: Any) -> Path:
        return shared.root

    def test_a_chunk_forgotten_while_its_prompt_runs_is_not_stored_afterwards(
        self, engine, chunks, prompt, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        report = engine.report

        def forget_and_report(*given: Any, **options: Any) -> Any:
            engine.forget(chunks[:2])
            return report(*given, **options)

        monkeypatch.setattr(engine, "report", forget_and_report)
        engine.registry.add(chunks)
        engine.generate(prompt, SHORT)
        engine.flush()
        assert [engine.entries.contains(chunk.token_ids) for chunk in chunks] == [False, False, True, True]
        assert {chunk.id for chunk in engine.registry} == {chunk.id for chunk in chunks[2:]}
