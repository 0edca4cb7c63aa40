"""Tests LLMs made with a name instead of an engine."""

from __future__ import annotations

import multiprocessing
import pickle
from pathlib import Path

import pytest
import torch
from llama_index.core import Document
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter

from cacheblend_rag import BlendEngine, InputError, ServerError, TransformersEngine
from llama_index_cacheblend import CacheBlendLLM, CacheBlendPrecompute, precompute_nodes


def test_llms_with_equal_names_share_a_model(tmp_path: Path) -> None:
    first = CacheBlendLLM(model="bundled", store=str(tmp_path / "kv"), max_tokens=3)
    second = CacheBlendLLM(model="bundled", store=str(tmp_path / "kv"), temperature=0.5)
    assert first.engine is second.engine
    assert first.complete("Who?").raw
    first.engine.close()
    with pytest.raises(InputError, match="was closed"):
        second.complete("Who?")
    third = CacheBlendLLM(model="bundled", store=str(tmp_path / "kv"), max_tokens=3)
    assert third.complete("Who?").raw
    third.engine.close()


def test_a_named_model_runs_with_its_arguments() -> None:
    threads = torch.get_num_threads()
    llm = CacheBlendLLM(model="bundled", dtype="bfloat16", writer="probe", threads=threads, max_tokens=3)
    assert isinstance(llm.engine, TransformersEngine)
    assert (llm.engine.dtype, llm.engine.writer is None) == (torch.bfloat16, False)
    assert llm.complete("Who?").raw
    llm.engine.close()
    for wrong in ({"dtype": "fp16"}, {"dtype": torch.float16}, {"threads": 0}):
        with pytest.raises(InputError, match=str(*wrong)):
            CacheBlendLLM(model="bundled", **wrong)


def test_a_server_that_does_not_answer_is_named() -> None:
    with pytest.raises(ServerError, match=r"127\.0\.0\.1:9"):
        CacheBlendLLM(base_url="http://127.0.0.1:9", api_key="x", max_retries=0)


def test_an_engine_and_the_name_of_one_exclude_each_other(engine: BlendEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    for field in (
        "model",
        "store",
        "device",
        "dtype",
        "writer",
        "threads",
        "base_url",
        "api_key",
        "timeout",
        "max_retries",
    ):
        with pytest.raises(InputError, match=f"engine= or {field}="):
            CacheBlendLLM(engine=engine, **{field: "x"})
    for name in ("CACHEBLEND_BASE_URL", "CACHEBLEND_MODEL"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(InputError, match="CACHEBLEND_MODEL"):
        CacheBlendLLM()


def test_a_pipeline_of_two_workers_computes_with_a_model_given_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The workers are as new as spawned ones, but take their imports from a third process.
    imported = multiprocessing.get_context("forkserver")
    imported.set_forkserver_preload(["llama_index_cacheblend", "cacheblend_rag.engines.transformers"])
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: imported)
    llm = CacheBlendLLM(model="bundled", store=str(tmp_path / "kv"), max_tokens=3)
    documents = [Document(text=f"The bell of harbour {n} was cast in 18{n}0, by two brothers.") for n in range(4)]
    pipeline = IngestionPipeline(transformations=[SentenceSplitter(), CacheBlendPrecompute(llm.engine)])
    nodes = pipeline.run(documents=documents, num_workers=2)
    assert precompute_nodes(llm.engine, nodes).present == 4
    again = pickle.loads(pickle.dumps(llm))
    assert (again.engine, again.max_tokens) == (llm.engine, 3)
    assert again.complete("Who?").raw
    llm.engine.close()


def test_computing_in_another_process_without_a_shared_store_is_refused() -> None:
    llm = CacheBlendLLM(model="bundled")
    with pytest.raises(InputError, match="would be lost"):
        pickle.dumps(CacheBlendPrecompute(llm.engine))
    llm.engine.close()
