"""Tests the formatting of prompts, the effect of settings, and the LLM's interface to LlamaIndex."""

from __future__ import annotations

import copy
import json
import pickle
from dataclasses import replace
from typing import Any

import llama_index.core
import pytest
from llama_index.core import Settings
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.prompts import PromptTemplate
from llama_index.core.schema import BaseNode, TextNode
from llama_index.core.utils import get_tokenizer
from scripted import ScriptedEngine

from cacheblend_rag import ChunkOutcome, InputError, TransformersEngine, make_chunk
from llama_index_cacheblend import CacheBlendLLM, node_text, register_nodes

FIRST = "The Marlow observatory was founded in 1911."
SECOND = "It stands on a hill above the harbour."
BOTH = f"{FIRST}\n\n{SECOND}"


class Ship(BaseModel):
    name: str


@pytest.fixture
def scripted(engine: TransformersEngine) -> ScriptedEngine:
    return ScriptedEngine(engine.tokenizer)


@pytest.fixture
def llm(scripted: ScriptedEngine) -> CacheBlendLLM:
    return CacheBlendLLM(engine=scripted)


def user(text: str, **extra: Any) -> list[ChatMessage]:
    return [ChatMessage(role="user", content=text, additional_kwargs=extra)]


# Formatting


def test_completions_are_user_messages_unless_formatted(scripted: ScriptedEngine, llm: CacheBlendLLM) -> None:
    llm.complete("Question: Who?")
    assert scripted.text_asked() == "<bos>Question: Who?\nAnswer:"
    llm.complete("Question: Who?", formatted=True)
    assert scripted.text_asked() == "Question: Who?"
    CacheBlendLLM(engine=scripted, completion_to_prompt=lambda text: f"[{text}]").complete("Who?")
    assert scripted.text_asked() == "[Who?]"
    CacheBlendLLM(engine=scripted, messages_to_prompt=lambda messages: f"<{messages[0].content}>").chat(user("Who?"))
    assert scripted.text_asked() == "<Who?>"


def test_each_prompt_is_rendered_once(scripted: ScriptedEngine, llm: CacheBlendLLM, monkeypatch: Any) -> None:
    scripted.precompute([make_chunk(text, scripted.tokenizer) for text in (FIRST, SECOND)])
    llm.chat(user("Who?"))  # reads once which tools the template shows
    render, rendered = scripted.tokenizer.apply_chat_template, []
    monkeypatch.setattr(
        scripted.tokenizer, "apply_chat_template", lambda *a, **k: rendered.append(a) or render(*a, **k)
    )
    llm.chat([ChatMessage(role="system", content=FIRST), *user(f"{BOTH}\n\nWho?")])
    assert (len(rendered), scripted.chunks_asked()) == (1, [FIRST, FIRST, SECOND])
    llm.complete(f"{BOTH}\n\nWho?")
    assert (len(rendered), scripted.chunks_asked()) == (2, [FIRST, SECOND])


def test_a_completion_without_a_chat_template_is_sent_unchanged(engine: TransformersEngine) -> None:
    tokenizer = copy.deepcopy(engine.tokenizer)
    tokenizer.chat_template = None
    scripted = ScriptedEngine(tokenizer)
    CacheBlendLLM(engine=scripted).complete("The capital of France is")
    assert scripted.text_asked() == "The capital of France is"


def test_the_chat_template_receives_its_arguments(engine: TransformersEngine) -> None:
    tokenizer = copy.deepcopy(engine.tokenizer)
    tokenizer.chat_template = "{{ messages[-1].content }}{% if enable_thinking is false %}<think></think>{% endif %}"
    scripted = ScriptedEngine(tokenizer)
    for given, asked in (({}, "Who?"), ({"enable_thinking": False}, "Who?<think></think>")):
        CacheBlendLLM(engine=scripted, chat_template_kwargs=given).chat(user("Who?"))
        assert scripted.text_asked() == asked


def test_the_default_header_is_reused_exactly(engine: TransformersEngine, nodes: list[BaseNode]) -> None:
    from llama_index_cacheblend import qa_template

    messages = qa_template().format_messages(context_str=node_text(nodes[0]), query_str="Who?")
    raw = CacheBlendLLM(engine=engine, max_tokens=1).chat(messages).raw
    chunk = make_chunk(node_text(nodes[0]), engine.tokenizer)
    assert raw["usage"]["reused_tokens"] == len(engine.header_ids) + len(chunk.token_ids)
    assert raw["usage"]["recomputed_tokens"] == 0


# Settings of a call


def test_settings_reach_the_engine_and_a_call_overrides_them(scripted: ScriptedEngine) -> None:
    llm = CacheBlendLLM(engine=scripted, max_tokens=9, temperature=0.5, top_p=0.9, seed=3, stop=["\n"], ratio=0.3)
    llm.chat(user("x"))
    sampling, blend = scripted.asked[-1].sampling, scripted.asked[-1].settings
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.seed) == (9, 0.5, 0.9, 3)
    assert (sampling.stop, blend.ratio) == (("\n",), 0.3)
    llm.chat(user("x"), max_tokens=5, stop="!", quality="full", temperature=0.0)
    sampling, blend = scripted.asked[-1].sampling, scripted.asked[-1].settings
    assert (sampling.max_tokens, sampling.stop, sampling.temperature, blend.reuse) == (5, ("!",), 0.0, "off")


@pytest.mark.parametrize(
    "wrong", [{"max_tokens": 0}, {"temperature": -1}, {"top_p": 0}, {"no_such": 1}, {"engine": "gpt"}]
)
def test_wrong_options_are_refused(scripted: ScriptedEngine, wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        CacheBlendLLM(**{"engine": scripted, **wrong})


def test_structured_prediction_is_guided_if_the_engine_supports_it(
    scripted: ScriptedEngine, llm: CacheBlendLLM
) -> None:
    scripted.answer = '{"name": "Lonely Tide"}'
    assert llm.structured_predict(Ship, PromptTemplate("A ship")) == Ship(name="Lonely Tide")
    assert scripted.asked[-1].sampling.json_schema == Ship.model_json_schema()
    assert llm.as_structured_llm(Ship).complete("A ship").raw == Ship(name="Lonely Tide")


async def test_async_structured_prediction_is_guided(scripted: ScriptedEngine, llm: CacheBlendLLM) -> None:
    scripted.answer = '{"name": "Lonely Tide"}'
    assert await llm.astructured_predict(Ship, PromptTemplate("A ship")) == Ship(name="Lonely Tide")
    assert scripted.asked[-1].sampling.json_schema is not None


def test_an_unparsable_answer_without_guided_decoding_is_an_error(
    engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(engine), "supports_json_schema", False)
    with pytest.raises(ValueError, match="(?i)json"):  # noqa: RUF043 - a pattern
        CacheBlendLLM(engine=engine, max_tokens=4).structured_predict(Ship, PromptTemplate("A ship"))
    with pytest.raises(InputError, match="json_schema"):
        CacheBlendLLM(engine=engine).chat(user("x"), json_schema={"type": "object"})


# Interface to LlamaIndex


def test_context_window_tokenizer_and_name_are_those_of_the_model(engine: TransformersEngine) -> None:
    llama_index.core.global_tokenizer = None
    llm = CacheBlendLLM(engine=engine, max_tokens=77)
    assert (llm.metadata.context_window, llm.metadata.num_output) == (engine.context_window, 77)
    assert llm.metadata.model_name == engine.fingerprint.name
    text = "The Marlow observatory <bos> was founded in 1911."
    assert Settings.tokenizer(text) == llm.tokenizer(text) == list(make_chunk(text, engine.tokenizer).token_ids)
    Settings.llm = llm
    assert (Settings.context_window, Settings.num_output) == (engine.context_window, 77)


def test_llama_indexs_default_tokenizer_is_replaced_and_a_custom_one_is_not(engine: TransformersEngine) -> None:
    llama_index.core.global_tokenizer = None
    get_tokenizer()
    llm = CacheBlendLLM(engine=engine)
    assert Settings.tokenizer("Hello there") == llm.tokenizer("Hello there")
    mine = str.split
    Settings.tokenizer = mine
    CacheBlendLLM(engine=engine)
    assert Settings.tokenizer is mine
    llama_index.core.global_tokenizer = None
    CacheBlendLLM(engine=engine, set_tokenizer=False)
    assert llama_index.core.global_tokenizer is None


def test_splitters_made_after_the_llm_cut_by_the_models_tokens(engine: TransformersEngine) -> None:
    llama_index.core.global_tokenizer = None
    llm = CacheBlendLLM(engine=engine)
    pieces = SentenceSplitter(chunk_size=64, chunk_overlap=0).split_text("Wind north-west, sea calm at dawn. " * 40)
    assert 40 < max(len(llm.tokenizer(piece)) for piece in pieces) <= 64


def test_serialisation_contains_settings_and_no_engine(engine: TransformersEngine) -> None:
    llm = CacheBlendLLM(engine=engine, max_tokens=7, ratio=0.2, check_layers=(1, 3), system_prompt="Be brief.")
    data = json.loads(llm.to_json())
    assert (data["max_tokens"], data["ratio"], data["system_prompt"]) == (7, 0.2, "Be brief.")
    assert "engine" not in data
    again = CacheBlendLLM.from_dict(data, engine=engine)
    assert (again.max_tokens, again.ratio, again.policy, again.check_layers) == (7, 0.2, None, (1, 3))
    assert "TransformersEngine" not in repr(data)


def test_a_model_is_never_pickled(engine: TransformersEngine) -> None:
    with pytest.raises(InputError, match="cannot be sent to another"):
        pickle.dumps(CacheBlendLLM(engine=engine))


def test_an_answer_contains_every_fact_of_the_outcome(engine: TransformersEngine, monkeypatch: Any) -> None:
    told: dict[str, Any] = {
        "chunks": (ChunkOutcome("a", 1, 2, "exact"),),
        "expected_s": 0.5,
        "policy": "static",
        "load_s": 0.25,
    }
    done = replace(engine.generate("Who?"), **told)
    monkeypatch.setattr(engine, "generate", lambda *_: done)
    raw = CacheBlendLLM(engine=engine, max_tokens=2).chat(user("Who?")).raw
    assert (raw["chunks"][0]["fate"], raw["expected_s"]) == ("exact", 0.5)
    assert {name: raw[name] for name in done.facts} == {**done.facts, "usage": raw["usage"]}
    assert done.facts["usage"].items() <= raw["usage"].items()


def test_usage_reports_reused_recomputed_and_missing_tokens(engine: TransformersEngine) -> None:
    llm = CacheBlendLLM(engine=engine, max_tokens=2, ratio=0.5)
    text = "A note that nobody has seen before: the bell tower leans to the east by four degrees."
    register_nodes(engine, [TextNode(text=text)])
    (size,) = [len(c.token_ids) for c in engine.registry if c.text == text]
    prompt = user(f"By the way:\n{text}\nQuestion: Why?")
    engine.reset_prefix_cache()
    first = llm.chat(prompt).raw
    engine.reset_prefix_cache()  # it has the whole first prompt, exactly
    second = llm.chat(prompt).raw
    assert (first["mode"], first["chunks"][0]["fate"], first["usage"]["reused_tokens"]) == ("prefill", "missing", 0)
    assert (second["mode"], second["chunks"][0]["lacks"]) == ("blend", [])
    usage = second["usage"]
    assert usage["reused_tokens"] + usage["recomputed_tokens"] == size
    assert usage["recomputed_tokens"] == round(0.5 * size)
    assert usage["prompt_tokens"] == usage["reused_tokens"] + usage["computed_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": usage["reused_tokens"]}
    assert json.dumps(second)
