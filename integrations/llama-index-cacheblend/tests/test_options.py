"""Tests the options of the LLM and of a call: names, defaults and checks; the room left for an answer; and the cost of
a call."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.prompts import PromptTemplate
from scripted import ScriptedEngine

from cacheblend_rag import BlendEngine, BlendSettings, InputError
from cacheblend_rag.frameworks import encoder_for
from cacheblend_rag.prompts.prompt import TokenizedPrompt
from llama_index_cacheblend import CacheBlendLLM, CacheBlendSynthesizer, ChunkPreservingPromptHelper, use_engine

USER = [ChatMessage(role="user", content="Who is the captain?")]
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


@pytest.fixture
def scripted(engine: BlendEngine) -> ScriptedEngine:
    return ScriptedEngine(engine.tokenizer)


def test_the_options_are_fields_with_these_defaults() -> None:
    assert set(BLEND_DEFAULTS) == {option.name for option in fields(BlendSettings)}
    for name, default in (DEFAULTS | BLEND_DEFAULTS).items():
        assert CacheBlendLLM.model_fields[name].default == default, name


def test_unset_options_come_from_the_model_profile(scripted: ScriptedEngine) -> None:
    CacheBlendLLM(engine=scripted).chat(USER)
    asked = scripted.asked[-1]
    assert asked.settings == BlendSettings()
    assert asked.options == scripted.profile.resolve(BlendSettings(), 8)


def test_blend_options_of_a_call_override_those_of_the_llm(scripted: ScriptedEngine) -> None:
    llm = CacheBlendLLM(engine=scripted, **OTHERS)
    llm.chat(USER)
    assert scripted.asked[-1].settings == BlendSettings(**OTHERS)
    assert scripted.asked[-1].options == scripted.profile.resolve(BlendSettings(**OTHERS), 8)
    llm.complete("Who?", ratio=0.7, policy=None, check_layers=[2])
    options = scripted.asked[-1].options
    assert (options.ratio, options.policy.name, options.check_layers) == (0.7, scripted.profile.policy, (2,))
    llm.complete("Who?", quality="full")
    assert scripted.asked[-1].options.reuse == "off"
    with pytest.raises(InputError, match="quality='fast' chooses ratio"):
        llm.complete("Who?", quality="fast", ratio=0.7)


def test_options_of_a_synthesizer_override_the_quality_of_its_llm(scripted: ScriptedEngine) -> None:
    fast = CacheBlendLLM(engine=scripted, quality="fast")
    CacheBlendSynthesizer(llm=fast, ratio=0.7).get_response("Who?", ["A note."])
    assert scripted.asked[-1].settings.ratio == 0.7
    assert (fast.with_options(ratio=0.7).quality, fast.with_options(seed=3).quality) == (None, "fast")
    assert CacheBlendLLM(engine=scripted, ratio=0.7).with_options(quality="fast").ratio is None


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_wrong_value_is_named_by_the_constructor_and_by_a_call(
    scripted: ScriptedEngine, name: str, value: Any
) -> None:
    named = f"{name}.*{re.escape(str(value))}"
    with pytest.raises(InputError, match=named):
        CacheBlendLLM(engine=scripted, **{name: value})
    with pytest.raises(InputError, match=named):
        use_engine(scripted, **{name: value})
    llm = CacheBlendLLM(engine=scripted)
    with pytest.raises(InputError, match=named):
        llm.chat(USER, **{name: value})
    with pytest.raises(InputError, match=named):
        llm.stream_complete("Who?", **{name: value})
    assert scripted.asked == []


@pytest.mark.parametrize("layers", [(8,), (1, 10**30)])
def test_a_layer_beyond_the_model_is_refused_by_the_call(scripted: ScriptedEngine, layers: Any) -> None:
    with pytest.raises(InputError, match=f"check_layers is .*{layers[-1]}"):
        CacheBlendLLM(engine=scripted, check_layers=layers).chat(USER)
    with pytest.raises(InputError, match=f"check_layers is .*{layers[-1]}"):
        CacheBlendLLM(engine=scripted).complete("Who?", check_layers=layers)


def test_an_answer_without_max_tokens_gets_512_tokens_or_the_rest_of_the_window(engine: BlendEngine) -> None:
    wide, narrow = ScriptedEngine(engine.tokenizer), ScriptedEngine(engine.tokenizer, window=60)
    for scripted in (wide, narrow):
        CacheBlendLLM(engine=scripted).chat(USER)
    assert wide.asked[-1].sampling.max_tokens == 512
    assert narrow.asked[-1].sampling.max_tokens == 60 - len(narrow.asked[-1].prompt.token_ids) > 0
    CacheBlendLLM(engine=wide, max_tokens=9).chat(USER, max_tokens=None)
    assert wide.asked[-1].sampling.max_tokens == 512


@pytest.mark.parametrize(("window", "left"), [(8192, 512), (2048, 512), (1000, 250), (300, 75)])
def test_prompts_leave_room_for_an_answer_without_max_tokens(engine: BlendEngine, window: int, left: int) -> None:
    scripted = ScriptedEngine(engine.tokenizer, window=window)
    assert CacheBlendLLM(engine=scripted).metadata.num_output == left
    assert ChunkPreservingPromptHelper(scripted).num_output == left
    assert CacheBlendLLM(engine=scripted, max_tokens=7).metadata.num_output == 7
    template = PromptTemplate("{context_str}\n\nQuestion: {query_str}")
    (packed, *more) = ChunkPreservingPromptHelper(scripted).repack(template, ["The bell tower leans. "] * window)
    assert more
    CacheBlendLLM(engine=scripted).complete(template.format(context_str=packed, query_str="Which?"))
    assert scripted.asked[-1].sampling.max_tokens >= left


async def ask(llm: CacheBlendLLM, way: str) -> None:
    match way:
        case "chat":
            llm.chat(USER)
        case "complete":
            llm.complete("Who is the captain?")
        case "stream_chat":
            list(llm.stream_chat(USER))
        case "achat":
            await llm.achat(USER)
        case "astream_complete":
            async for _ in await llm.astream_complete("Who is the captain?"):
                pass


@pytest.mark.parametrize("way", ["chat", "complete", "stream_chat", "achat", "astream_complete"])
async def test_a_prompt_is_tokenised_once(way: str, engine: BlendEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, texts, prompts = encoder_for(engine.tokenizer), [], []
    encode, tokenize = encoder.between, engine.tokenize
    monkeypatch.setattr(encoder, "between", lambda *given: texts.append(given) or encode(*given))
    monkeypatch.setattr(engine, "tokenize", lambda prompt: prompts.append(prompt) or tokenize(prompt))
    await ask(CacheBlendLLM(engine=engine, max_tokens=1), way)
    assert len(texts) == 1
    # The engine receives tokens, not text.
    assert len([prompt for prompt in prompts if not isinstance(prompt, TokenizedPrompt)]) == 1


def test_a_prompt_without_known_chunks_carries_its_text_for_a_remote_engine(scripted: ScriptedEngine) -> None:
    CacheBlendLLM(engine=scripted).complete("Who is the captain?", formatted=True)
    assert scripted.asked[-1].prompt.text == scripted.text_asked() == "Who is the captain?"


def test_option_names_of_other_providers_are_accepted(scripted: ScriptedEngine) -> None:
    options = {"top_k": 5, "presence_penalty": 0.5, "frequency_penalty": -1.0, "stop_repeating": True}
    CacheBlendLLM(engine=scripted, max_completion_tokens=7, stop_sequences=["x"], **options).chat(USER)
    sampling = scripted.asked[-1].sampling
    assert (sampling.max_tokens, sampling.stop) == (7, ("x",))
    assert {name: getattr(sampling, name) for name in options} == options
    llm = CacheBlendLLM(engine=scripted)
    llm.complete("Who?", max_completion_tokens=3, stop_sequences=["y"], top_k=2)
    assert (scripted.asked[-1].sampling.max_tokens, scripted.asked[-1].sampling.top_k) == (3, 2)
    with pytest.raises(InputError, match="are the same"):
        llm.complete("Who?", max_completion_tokens=3, max_tokens=3)
    for name in ("timeout", "request_timeout"):
        with pytest.raises(InputError, match="engine= or timeout="):
            CacheBlendLLM(engine=scripted, **{name: 3})


def test_prompts_can_be_packed_for_a_smaller_window_but_not_for_a_larger_one(scripted: ScriptedEngine) -> None:
    assert CacheBlendLLM(engine=scripted, context_window=1000).metadata.context_window == 1000
    assert CacheBlendLLM(engine=scripted, context_window=1000).metadata.num_output == 250
    for wrong in (scripted.context_window + 1, 0):
        with pytest.raises(InputError, match=f"context_window is {wrong}"):
            CacheBlendLLM(engine=scripted, context_window=wrong)


def test_logprobs_have_llama_indexs_form_and_openais(engine: BlendEngine) -> None:
    response = CacheBlendLLM(engine=engine, max_tokens=3, logprobs=True, top_logprobs=2).chat(USER)
    assert response.logprobs is not None
    assert "".join(token.token for token, *_ in response.logprobs).strip() == response.message.content.strip()
    for chosen, likeliest, _ in response.logprobs:
        assert chosen.logprob == likeliest.logprob <= 0  # greedy
    assert len(response.raw["logprobs"]["content"]) == len(response.logprobs)
    assert CacheBlendLLM(engine=engine, max_tokens=3).chat(USER).logprobs is None
