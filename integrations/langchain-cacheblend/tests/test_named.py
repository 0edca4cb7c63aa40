"""Tests models made with a name instead of an engine."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from langchain_core.load import dumps, loads
from langchain_core.prompts import ChatPromptTemplate, HumanMessagePromptTemplate, PromptTemplate
from langchain_core.runnables import ConfigurableField, RunnableLambda, RunnableSequence

from cacheblend_rag import InputError, ServerError, TransformersEngine
from langchain_cacheblend import CacheBlendLLM, CacheBlendRetriever, ChatCacheBlend

from scripted import ScriptedEngine


@pytest.mark.parametrize("kind", [ChatCacheBlend, CacheBlendLLM])
def test_a_named_model_is_loaded_on_first_use_and_shared(kind: Any, tmp_path: Path) -> None:
    made = kind(model="bundled", store=str(tmp_path / "kv"), max_tokens=3)
    assert not (tmp_path / "kv").exists()
    assert made.invoke("Who?")
    assert isinstance(made.engine, TransformersEngine)
    assert kind(model="bundled", store=str(tmp_path / "kv"), temperature=0.5).engine is made.engine
    assert copy.deepcopy(made).engine is made.engine
    assert made.model_copy().engine is made.engine
    made.engine.close()
    assert made.invoke("Who?"), "it is opened anew"
    made.engine.close()


@pytest.mark.parametrize("kind", [ChatCacheBlend, CacheBlendLLM])
def test_a_named_model_runs_with_its_fields(kind: Any) -> None:
    threads = torch.get_num_threads()
    made = kind(model="bundled", dtype="bfloat16", writer="probe", threads=threads, max_tokens=3)
    assert made.invoke("Who?")
    assert (made.engine.dtype, made.engine.writer is None) == (torch.bfloat16, False)
    made.engine.close()
    for wrong in ({"dtype": "fp16"}, {"dtype": torch.float16}, {"threads": 0}):
        with pytest.raises(InputError, match=str(*wrong)):
            kind(model="bundled", **wrong)


def test_a_server_is_contacted_on_first_use_and_its_key_is_never_shown() -> None:
    made = ChatCacheBlend(base_url="http://127.0.0.1:9", api_key="not for you", timeout=1.0, max_retries=0)
    with pytest.raises(ServerError, match=r"127\.0\.0\.1:9"):
        made.invoke("Who?")
    assert "not for you" not in repr(made) + str(made.model_dump())


def test_the_environment_may_name_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CACHEBLEND_BASE_URL", "CACHEBLEND_STORE", "CACHEBLEND_MODEL"):
        monkeypatch.delenv(name, raising=False)
    made = ChatCacheBlend(max_tokens=3)
    with pytest.raises(InputError, match="CACHEBLEND_MODEL"):
        made.invoke("Who?")
    monkeypatch.setenv("CACHEBLEND_MODEL", "bundled")
    assert made.invoke("Who?")
    made.engine.close()


def test_an_engine_and_the_name_of_one_exclude_each_other(scripted: ScriptedEngine) -> None:
    for field in ("model", "store", "device", "writer", "base_url"):
        with pytest.raises(InputError, match=f"either engine= or {field}="):
            ChatCacheBlend(engine=scripted, **{field: "x"})
    with pytest.warns(UserWarning, match="timeout, max_retries|max_retries, timeout"):
        ChatCacheBlend(engine=scripted, timeout=3.0, max_retries=1)
    with pytest.raises(InputError, match="'tensorrt'"):
        ChatCacheBlend(engine="tensorrt", model="bundled")


@pytest.mark.parametrize("kind", [ChatCacheBlend, CacheBlendLLM])
def test_every_copy_made_by_langchain_uses_the_engine_of_its_original(
    kind: Any, scripted: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CACHEBLEND_MODEL", "bundled")  # a copy without an engine would silently use it
    llm = kind(engine=scripted, max_tokens=5)
    tokens = ConfigurableField(id="tokens")
    failing = RunnableLambda(lambda _: 1 / 0)
    copies = {
        "configurable_fields": (llm.configurable_fields(max_tokens=tokens).with_config(configurable={"tokens": 7}), 7),
        "configured by the call": (llm.configurable_fields(max_tokens=tokens), 5),
        "configurable_alternatives": (
            llm.configurable_alternatives(
                ConfigurableField(id="which"), short=llm.model_copy(update={"max_tokens": 3})
            ).with_config(configurable={"which": "short"}),
            3,
        ),
        "bind": (llm.bind(max_tokens=6), 6),
        "with_config": (llm.with_config(tags=["x"]), 5),
        "with_retry": (llm.with_retry(), 5),
        "with_fallbacks": (failing.with_fallbacks([llm]), 5),
        "model_copy": (llm.model_copy(deep=True), 5),
        "copy": (copy.copy(llm), 5),
    }
    for made, (model, max_tokens) in copies.items():
        model.invoke("Who?")
        assert scripted.requests.pop().sampling.max_tokens == max_tokens, made
        assert not scripted.requests, made
    llm.configurable_fields(max_tokens=tokens).invoke("Who?", {"configurable": {"tokens": 9}})
    assert scripted.requests.pop().sampling.max_tokens == 9


def test_a_model_given_by_name_can_be_pickled_and_one_with_an_engine_explains_the_refusal(
    scripted: ScriptedEngine, tmp_path: Path
) -> None:
    named = ChatCacheBlend(model="bundled", store=str(tmp_path / "kv"), max_tokens=3)
    assert pickle.loads(pickle.dumps(named)).model == "bundled"
    retriever = CacheBlendRetriever(base_retriever=RunnableLambda(str), engine=named.engine)
    assert pickle.loads(pickle.dumps(retriever.engine)) is named.engine
    assert copy.deepcopy(retriever).engine is named.engine
    named.engine.close()
    for holder in (ChatCacheBlend(engine=scripted), CacheBlendLLM(engine=scripted)):
        with pytest.raises(InputError, match="model given by name"):
            pickle.dumps(holder)
        assert copy.deepcopy(holder).engine is scripted


def test_a_model_given_by_name_survives_json_without_its_key(
    scripted: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_back(text: str) -> Any:
        allowed = [ChatCacheBlend, CacheBlendLLM, RunnableSequence, ChatPromptTemplate, HumanMessagePromptTemplate]
        allowed.append(PromptTemplate)
        names = ["langchain_cacheblend"]
        return loads(text, allowed_objects=allowed, valid_namespaces=names, secrets_from_env=True)

    monkeypatch.setenv("CACHEBLEND_API_KEY", "of the reader")
    for kind in (ChatCacheBlend, CacheBlendLLM):
        remote = kind(base_url="http://127.0.0.1:9", api_key="not for you", ratio=0.3, check_layers=(2,), stop=["."])
        text = dumps(remote)
        assert "not for you" not in text
        found = read_back(text)
        assert isinstance(found, kind)
        assert found.api_key.get_secret_value() == "of the reader"
        assert found.model_dump() == remote.model_dump()
        assert read_back(dumps(kind(engine="vllm", model="bundled"))).given_engine == "vllm"
        held = dumps(kind(engine=scripted))
        assert json.loads(held)["type"] == "not_implemented"
        with pytest.raises(NotImplementedError, match=kind.__name__):
            read_back(held)
    prompted = ChatPromptTemplate.from_template("{question}") | ChatCacheBlend(model="bundled", max_tokens=3)
    assert read_back(dumps(prompted)).last.model == "bundled"
