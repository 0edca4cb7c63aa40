"""Tests the options of a model and of a call: both models share names, defaults and checks; and the cost of a call."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import pytest

from cacheblend_rag import BlendEngine, BlendSettings, InputError
from cacheblend_rag.frameworks import Request, encoder_for
from cacheblend_rag.prompts.prompt import TokenizedPrompt
from langchain_cacheblend import CacheBlendLLM, ChatCacheBlend

from scripted import ScriptedEngine

BOTH = pytest.mark.parametrize("model", [ChatCacheBlend, CacheBlendLLM])
DEFAULTS = {"max_tokens": None, "temperature": 0.0, "top_p": 1.0, "seed": None, "stop": None}
BLEND_DEFAULTS = {"ratio": None, "policy": None, "check_layers": None, "quality": None}
OTHERS = {"ratio": 0.3, "policy": "sink", "check_layers": (1, 3)}
WRONG = [
    ("ratio", -0.1),
    ("ratio", 10**30),
    ("ratio", "0.5"),
    ("policy", "no such"),
    ("policy", ["hkvd"]),
    ("check_layers", (3, 1)),
    ("check_layers", (-1,)),
    ("check_layers", 10**30),
    ("quality", "nothing"),
    ("temperature", -1.0),
    ("top_p", 0.0),
    ("max_tokens", 0),
]


@BOTH
def test_the_options_are_fields_with_these_defaults(model: Any) -> None:
    assert set(BLEND_DEFAULTS) == {option.name for option in fields(BlendSettings)}
    for name, default in (DEFAULTS | BLEND_DEFAULTS).items():
        assert model.model_fields[name].default == default, name


@BOTH
def test_unset_options_come_from_the_model_profile(model: Any, scripted: ScriptedEngine) -> None:
    model(engine=scripted).invoke("Who?")
    asked = scripted.requests[-1]
    assert asked.settings == BlendSettings()
    assert asked.options == scripted.profile.resolve(BlendSettings(), 8)


@BOTH
def test_blend_options_of_a_call_override_those_of_the_model(model: Any, scripted: ScriptedEngine) -> None:
    llm = model(engine=scripted, **OTHERS)
    llm.invoke("Who?")
    assert scripted.requests[-1].settings == BlendSettings(**OTHERS)
    assert scripted.requests[-1].options == scripted.profile.resolve(BlendSettings(**OTHERS), 8)
    llm.invoke("Who?", ratio=0.7, policy=None, check_layers=[2])
    options = scripted.requests[-1].options
    assert (options.ratio, options.policy.name, options.check_layers) == (0.7, scripted.profile.policy, (2,))
    llm.invoke("Who?", quality="full")
    assert scripted.requests[-1].options.reuse == "off"
    with pytest.raises(InputError, match="quality='fast' chooses ratio"):
        llm.invoke("Who?", quality="fast", ratio=0.7)


@BOTH
@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_wrong_value_is_named_by_the_constructor_and_by_a_call(
    model: Any, scripted: ScriptedEngine, name: str, value: Any
) -> None:
    named = f"{name}.*{re.escape(str(value))}"
    with pytest.raises(InputError, match=named):
        model(engine=scripted, **{name: value})
    llm = model(engine=scripted)
    with pytest.raises(InputError, match=named):
        llm.invoke("Who?", **{name: value})
    with pytest.raises(InputError, match=named):
        list(llm.stream("Who?", **{name: value}))
    assert scripted.requests == []


@BOTH
@pytest.mark.parametrize("layers", [(8,), (1, 10**30)])
def test_a_layer_beyond_the_model_is_refused_by_the_call(model: Any, scripted: ScriptedEngine, layers: Any) -> None:
    with pytest.raises(InputError, match=f"check_layers is .*{layers[-1]}"):
        model(engine=scripted, check_layers=layers).invoke("Who?")
    with pytest.raises(InputError, match=f"check_layers is .*{layers[-1]}"):
        model(engine=scripted).invoke("Who?", check_layers=layers)


@BOTH
def test_a_single_stop_string_is_accepted(model: Any, scripted: ScriptedEngine) -> None:
    model(engine=scripted).invoke("Who?", stop="to:")
    assert scripted.requests[-1].sampling.stop == ("to:",)


async def ask(llm: Any, way: str) -> None:
    match way:
        case "invoke":
            llm.invoke("Who is the captain?")
        case "stream":
            list(llm.stream("Who is the captain?"))
        case "ainvoke":
            await llm.ainvoke("Who is the captain?")
        case "astream":
            async for _ in llm.astream("Who is the captain?"):
                pass


@BOTH
@pytest.mark.parametrize("way", ["invoke", "stream", "ainvoke", "astream"])
async def test_a_prompt_is_tokenised_once(
    model: Any, way: str, engine: BlendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder, texts, prompts = encoder_for(engine.tokenizer), [], []
    encode, tokenize = encoder.between, engine.tokenize
    monkeypatch.setattr(encoder, "between", lambda *given: texts.append(given) or encode(*given))
    monkeypatch.setattr(engine, "tokenize", lambda prompt: prompts.append(prompt) or tokenize(prompt))
    await ask(model(engine=engine, max_tokens=1), way)
    assert len(texts) == 1
    # The engine receives tokens, not text.
    assert len([prompt for prompt in prompts if not isinstance(prompt, TokenizedPrompt)]) == 1


@BOTH
def test_the_engine_receives_a_request(model: Any, scripted: ScriptedEngine) -> None:
    model(engine=scripted).invoke("Who?")
    assert len(scripted.tokenized) == 1
    assert isinstance(scripted.requests[-1], Request)


@BOTH
def test_option_names_of_other_providers_are_accepted(model: Any, scripted: ScriptedEngine) -> None:
    options = {"top_k": 5, "presence_penalty": 0.5, "frequency_penalty": -1.0, "stop_repeating": True}
    model(engine=scripted, max_completion_tokens=7, stop_sequences=["never"], **options).invoke("Who?")
    sampling = scripted.requests[-1].sampling
    assert (sampling.max_tokens, sampling.stop) == (7, ("never",))
    assert {name: getattr(sampling, name) for name in options} == options
    llm = model(engine=scripted)
    llm.invoke("Who?", max_completion_tokens=3, stop_sequences=["x"], top_k=2, presence_penalty=1)
    sampling = scripted.requests[-1].sampling
    assert (sampling.max_tokens, sampling.stop, sampling.top_k) == (3, ("x",), 2)
    with pytest.raises(InputError, match="are the same"):
        llm.invoke("Who?", max_completion_tokens=3, max_tokens=3)
    with pytest.raises(InputError, match="top_k is -1"):
        model(engine=scripted, top_k=-1)
    with pytest.warns(UserWarning, match="timeout"):
        model(engine=scripted, request_timeout=3)


def test_logprobs_have_openais_form(engine: BlendEngine) -> None:
    llm = ChatCacheBlend(engine=engine, max_tokens=3)
    answer = llm.invoke("Who is the captain?", logprobs=True, top_logprobs=2)
    content = answer.response_metadata["logprobs"]["content"]
    assert "".join(each["token"] for each in content).strip() == answer.content.strip()
    for each in content:
        assert each["logprob"] == each["top_logprobs"][0]["logprob"] <= 0  # greedy
        assert len(each["top_logprobs"]) == 2
    assert "logprobs" not in llm.invoke("Who?").response_metadata
    text = CacheBlendLLM(engine=engine, max_tokens=3, logprobs=0).generate(["Who?"])
    assert text.generations[0][0].generation_info["logprobs"]["content"]
