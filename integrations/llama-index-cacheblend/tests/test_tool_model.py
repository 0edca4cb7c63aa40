"""Function calling on a model whose template shows tools: random weights, which guided decoding makes valid."""

from collections.abc import Iterator
from typing import Any, Literal

import pytest
import torch
from llama_index.core.base.llms import types
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from pydantic import BaseModel
from scripted import ScriptedEngine
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from cacheblend_rag import InputError, TransformersEngine, bundled_corpus, make_chunk
from llama_index_cacheblend import CacheBlendLLM, collect_usage

NOTE = "The harbour of Marlow was built in 1911 by Ada Brenmoor, who came from the company and stayed for long."
TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>\n{% endif %}"
    "{% for m in messages %}<<{{ m['role'] }}>>{{ m['content'] }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<<end>>\n{% endfor %}"
    "{% if add_generation_prompt %}<<assistant>>{% endif %}"
)
Topic = Literal["harbour", "bakery"]


class Verdict(BaseModel):
    """The answer that the notes give."""

    known: bool
    about: Topic


def look_up(topic: Topic) -> str:
    """Look a topic up in the notes."""
    return f"{NOTE} ({topic})"


def write_down(text: str) -> str:
    """Write something down."""
    return text


LOOK_UP, WRITE_DOWN = FunctionTool.from_defaults(look_up), FunctionTool.from_defaults(write_down)


@pytest.fixture(scope="module")
def engine() -> Iterator[TransformersEngine]:
    """Random weights behind a template with tools."""
    pytest.importorskip("llguidance", reason="llguidance is not installed; make setup installs it")
    tokenizer = AutoTokenizer.from_pretrained(bundled_corpus().parent / "model")
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=4096, **shape)).eval()
    with TransformersEngine(model, tokenizer=tokenizer, device="cpu") as engine:
        engine.precompute([make_chunk(NOTE, engine.tokenizer)])
        yield engine


@pytest.fixture
def llm(engine: TransformersEngine) -> CacheBlendLLM:
    return CacheBlendLLM(engine=engine, max_tokens=100, temperature=1.5, seed=1, set_tokenizer=False)


def test_a_required_call_has_arguments_valid_for_the_tool(llm: CacheBlendLLM) -> None:
    assert llm.metadata.is_function_calling_model
    answer = llm.chat_with_tools([LOOK_UP], user_msg="What of the harbour?", tool_required=True)
    (call,) = llm.get_tool_calls_from_response(answer)
    assert call.tool_name == "look_up" and call.tool_kwargs["topic"] in ("harbour", "bakery")
    assert answer.message.content in ("", None)
    *_, last = llm.stream_chat_with_tools([LOOK_UP], user_msg="What of the harbour?", tool_required=True)
    assert [c.tool_kwargs for c in llm.get_tool_calls_from_response(last)] == [call.tool_kwargs]


async def test_a_call_is_executed_and_its_result_reused_in_the_next_prompt(llm: CacheBlendLLM) -> None:
    done = llm.predict_and_call([LOOK_UP], user_msg="What of the harbour?", tool_required=True)
    assert str(done).startswith(NOTE)
    answer = await llm.achat_with_tools([LOOK_UP], user_msg="What of the harbour?", tool_required=True)
    asked = ChatMessage(role="user", content="What of the harbour?")
    told = ChatMessage(role="tool", content=str(done))
    with collect_usage() as calls:
        llm.chat([asked, answer.message, told])
    assert calls[0].mode == "blend"
    text = llm.engine.tokenizer.decode(llm.engine.tokenize(str(done)).token_ids)
    assert NOTE in text


def test_a_truncated_required_call_is_no_call_and_no_answer(engine: TransformersEngine) -> None:
    """Use random weights, which fill a string without end."""
    llm = CacheBlendLLM(engine=engine, max_tokens=24, temperature=1.5, seed=1, set_tokenizer=False)
    answer = llm.chat_with_tools([WRITE_DOWN], user_msg="Write.", tool_required=True)
    assert answer.message.content in ("", None)
    assert answer.raw["finish_reason"] == "length"
    assert llm.get_tool_calls_from_response(answer, error_on_no_tool_call=False) == []
    with pytest.raises(ValueError, match="cut off"):
        llm.get_tool_calls_from_response(answer)


def test_objects_are_predicted_by_forced_calls(llm: CacheBlendLLM) -> None:
    made = llm.structured_predict(Verdict, PromptTemplate("What of {it}?"), it="the harbour")
    assert isinstance(made, Verdict)


def test_calls_are_parsed_from_an_unforced_answer(engine: TransformersEngine) -> None:
    spoken = 'Let me see.\n<tool_call>{"name": "look_up", "arguments": {"topic": "bakery"}}</tool_call>'
    llm = CacheBlendLLM(engine=ScriptedEngine(engine.tokenizer, spoken), set_tokenizer=False)
    answer = llm.chat_with_tools([LOOK_UP], user_msg="x")
    assert answer.message.content == "Let me see.\n"
    assert [c.tool_kwargs for c in llm.get_tool_calls_from_response(answer)] == [{"topic": "bakery"}]
    assert llm.chat([ChatMessage(role="user", content="x")]).message.content == spoken


def test_a_call_in_a_code_fence_is_parsed_if_its_tool_is_bound(engine: TransformersEngine) -> None:
    """Qwen2.5-Coder writes its calls so."""
    spoken = 'Let me see.\n```json\n{\n  "name": "look_up",\n  "arguments": {"topic": "bakery"}\n}\n```'
    llm = CacheBlendLLM(engine=ScriptedEngine(engine.tokenizer, spoken), set_tokenizer=False)
    *_, streamed = llm.stream_chat_with_tools([LOOK_UP], user_msg="x")
    for answer in (llm.chat_with_tools([LOOK_UP], user_msg="x"), streamed):
        assert answer.message.content == "Let me see.\n"
        assert [c.tool_kwargs for c in llm.get_tool_calls_from_response(answer)] == [{"topic": "bakery"}]
    assert llm.chat_with_tools([WRITE_DOWN], user_msg="x").message.content == spoken
    assert llm.chat([ChatMessage(role="user", content="x")]).message.content == spoken


def test_a_model_whose_template_shows_no_tools_is_refused(llm: CacheBlendLLM) -> None:
    plain: Any = AutoTokenizer.from_pretrained(bundled_corpus().parent / "model")
    other = CacheBlendLLM(engine=ScriptedEngine(plain), set_tokenizer=False)
    assert not other.metadata.is_function_calling_model
    with pytest.raises(InputError, match="does not show tools"):
        other.chat_with_tools([LOOK_UP], user_msg="x")
    with pytest.raises(InputError, match="formatted without it"):
        llm.complete("x", formatted=True, tools=[LOOK_UP.metadata.to_openai_tool()])


def test_calls_and_their_results_keep_the_ids_required_by_templates() -> None:
    """Use a check like that of Mistral's templates, which refuse missing ids and ids other than nine letters and
    digits."""
    tokenizer = AutoTokenizer.from_pretrained(bundled_corpus().parent / "model")
    refused = (
        "{% if ID is not defined or ID|length != 9 or not ID.isalnum() %}{{ raise_exception('no id') }}{% endif %}"
    )
    tokenizer.chat_template = (
        "{{ tools | tojson if tools else '' }}{% for m in messages %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}" + refused.replace("ID", "c.id") + "{% endfor %}"
        "{% if m.role == 'tool' %}" + refused.replace("ID", "m.tool_call_id") + "{% endif %}{% endfor %}"
    )
    scripted = ScriptedEngine(tokenizer, '[{"name": "look_up", "arguments": {"topic": "bakery"}}]')
    llm = CacheBlendLLM(engine=scripted, set_tokenizer=False)
    asking = llm.chat_with_tools([LOOK_UP], user_msg="What of it?")
    (call,) = llm.get_tool_calls_from_response(asking)
    told = ChatMessage(role="tool", content=NOTE, additional_kwargs={"tool_call_id": call.tool_id})
    scripted.answer = "Fine."
    asked = ChatMessage(role="user", content="What of it?")
    assert llm.chat_with_tools([LOOK_UP], chat_history=[asked, asking.message, told]).message.content == "Fine."
    if hasattr(types, "ToolCallBlock"):  # the lowest supported version has none
        named = {"tool_name": call.tool_name, "tool_kwargs": call.tool_kwargs}
        block = types.ToolCallBlock(tool_call_id=call.tool_id, **named)
        assert llm.chat([asked, ChatMessage(role="assistant", blocks=[block]), told]).message.content == "Fine."
