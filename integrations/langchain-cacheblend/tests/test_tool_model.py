"""Tools and structured output on a model whose template shows tools: random weights, which guided decoding makes valid."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from langchain.agents import create_agent
from langchain.agents.structured_output import ToolStrategy
from langchain_core.documents import Document
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.tools import tool
from langchain_core.utils.function_calling import convert_to_json_schema
from langgraph.errors import GraphRecursionError
from pydantic import BaseModel
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from cacheblend_rag import BlendEngine, make_chunk
from langchain_cacheblend import ChatCacheBlend

from plain import BUNDLED
from scripted import TEMPLATE
from tested_engine import engine_of

NOTES = {
    "harbour": "The harbour of Marlow was built in 1911 by Ada Brenmoor, who came from the company and stayed for long.",
    "bakery": "The bakery was founded by Sonia Halston, whose daughter runs it now, behind the old lighthouse in the west.",
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlendEngine]:
    """Random weights behind a template with tools."""
    pytest.importorskip("llguidance", reason="llguidance is not installed; make setup installs it")
    directory: Path = tmp_path_factory.mktemp("tools")
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=4096, **shape)).save_pretrained(
        directory
    )
    with engine_of(str(directory)) as engine:
        engine.precompute([make_chunk(note, engine.tokenizer) for note in NOTES.values()])
        yield engine


@tool(response_format="content_and_artifact")
def look_up(topic: Literal["harbour", "bakery"]) -> tuple[str, list[Document]]:
    """Look a topic up in the notes."""
    return NOTES[topic], [Document(NOTES[topic])]


@tool
def write_down(text: str) -> str:
    """Write something down."""
    return text


class Verdict(BaseModel):
    """The answer that the notes give."""

    known: bool
    about: Literal["harbour", "bakery"]


def hot(engine: BlendEngine, seed: int = 0, **options: Any) -> ChatCacheBlend:
    return ChatCacheBlend(engine=engine, **{"max_tokens": 100, "temperature": 1.5, "seed": seed, **options})


@pytest.mark.parametrize("choice", ["any", "look_up"])
def test_a_forced_call_has_arguments_valid_for_the_tool(engine: BlendEngine, choice: str) -> None:
    for seed in range(4):
        answer = hot(engine, seed).bind_tools([look_up], tool_choice=choice).invoke("What of the harbour?")
        (call,) = answer.tool_calls
        assert (call["name"], answer.content, answer.invalid_tool_calls) == ("look_up", "", [])
        assert look_up.invoke(call).artifact[0].page_content in NOTES.values()


def test_a_truncated_forced_call_is_reported_as_invalid(engine: BlendEngine) -> None:
    """Use random weights, which fill a string without end."""
    llm = hot(engine, max_tokens=24).bind_tools([write_down], tool_choice="any")
    whole = llm.invoke("Write.")
    streamed = None
    for chunk in llm.stream("Write."):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed is not None
    for answer in (whole, streamed):
        assert (answer.tool_calls, answer.content) == ([], "")
        assert len(answer.invalid_tool_calls) == 1
        assert answer.response_metadata["finish_reason"] == "length"
    assert whole.invalid_tool_calls[0]["args"].startswith('{"name"')


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_conforms_with_any_weights(engine: BlendEngine, method: Any) -> None:
    for seed in range(4):
        made = hot(engine, seed).with_structured_output(Verdict, method=method).invoke("What of it?")
        assert isinstance(made, Verdict)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
@pytest.mark.parametrize("schema", [Verdict, convert_to_json_schema(Verdict)], ids=["class", "schema"])
async def test_a_truncated_object_is_an_error_that_names_the_cause(
    engine: BlendEngine, schema: Any, method: Any
) -> None:
    made = hot(engine, max_tokens=6).with_structured_output(schema, method=method)
    with pytest.raises(OutputParserException, match="cut off by max_tokens"):
        made.invoke("What of it?")
    with pytest.raises(OutputParserException, match="cut off"):
        list(made.stream("What of it?"))
    with pytest.raises(OutputParserException, match="cut off"):
        async for _ in made.astream("What of it?"):
            pass
    raw = hot(engine, max_tokens=6).with_structured_output(schema, method=method, include_raw=True)
    answer = await raw.ainvoke("What of it?")
    assert answer["parsed"] is None and "cut off" in str(answer["parsing_error"])


@pytest.mark.parametrize("form", [ToolStrategy(Verdict), Verdict], ids=["as a tool", "as such"])
def test_an_agent_calls_its_tools_and_reuses_their_results(form: Any, engine: BlendEngine) -> None:
    """A random model calls either of the two: some run looks something up, and ends soon after."""
    torch.manual_seed(0)
    llm = hot(engine, ratio=0.15).model_copy(update={"seed": None})  # a seed would repeat the same choice each turn
    agent = create_agent(llm, [look_up], response_format=form)
    for _ in range(30):
        try:
            state = agent.invoke({"messages": [("human", "What of the harbour?")]}, {"recursion_limit": 12})
        except GraphRecursionError:
            continue
        assert isinstance(state["structured_response"], Verdict)
        found = [m for m in state["messages"] if isinstance(m, ToolMessage) and m.name == "look_up"]
        last = [m for m in state["messages"] if isinstance(m, AIMessage)][-1]
        assert last.response_metadata["cacheblend"]["mode"] == ("blend" if found else "prefill")
        if found:
            return
    raise AssertionError("Nothing was ever looked up.")
