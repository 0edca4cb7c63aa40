"""Tests the report on retrieved nodes: prompts escape, cut and re-flow nodes, with their metadata and without."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.prompts import PromptTemplate
from llama_index.core.query_engine import CitationQueryEngine, RetrieverQueryEngine
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.schema import ImageNode, MetadataMode, NodeWithScore, QueryBundle, TextNode
from scripted import ScriptedEngine

from cacheblend_rag import BlendEngine, InputError, TransformersEngine, chunk_id
from cacheblend_rag.errors import AlteredChunkError
from llama_index_cacheblend import (
    CacheBlendLLM,
    CacheBlendPostprocessor,
    CacheBlendPrecompute,
    CacheBlendQueryEngine,
    CacheBlendRetriever,
    collect_usage,
    node_text,
)
from llama_index_cacheblend.synthesizer import CacheBlendSynthesizer
from llama_index_cacheblend.watch import RETRIEVALS


def text(number: int, subject: str = "bell") -> str:
    return (
        f"Entry {number}: the {subject} of harbour {number} was cast in {1800 + number} by two brothers & their aunt.\n"
        f"It cracked in the winter of {1850 + number}, when the sexton of parish {number} rang it for a wedding in the frost."
    )


def nodes_of(*texts: str, **metadata: Any) -> list[TextNode]:
    return [TextNode(text=one, metadata=metadata) for one in texts]


class Fixed(BaseRetriever):
    """Returns the same nodes for every question."""

    def __init__(self, nodes: list[TextNode]):
        self._nodes = nodes
        super().__init__()

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return [NodeWithScore(node=node, score=1.0) for node in self._nodes]


def as_json(context_str: str, **_: Any) -> str:
    return json.dumps(context_str)


def re_flowed(context_str: str, **_: Any) -> str:
    return context_str.replace(" the ", "\nthe ")


def query_engine(llm: CacheBlendLLM, nodes: list[TextNode], form: Any = None, **options: Any) -> RetrieverQueryEngine:
    template = PromptTemplate(
        "{context_str}\n\nQuestion: {query_str}", function_mappings=form and {"context_str": form}
    )
    synthesizer = get_response_synthesizer(llm=llm, text_qa_template=template)
    return RetrieverQueryEngine(Fixed(nodes), synthesizer, **options)


def asked(engine: Any, question: str = "When?") -> dict[str, Any]:
    with collect_usage() as calls:
        engine.query(question)
    return calls[-1].retrieved


def statuses(report: dict[str, Any]) -> list[str]:
    return [each["status"] for each in report["chunks"]]


@pytest.fixture
def scripted(engine: TransformersEngine) -> ScriptedEngine:
    return ScriptedEngine(engine.tokenizer)


def test_an_unchanged_query_engine_reports_the_fate_of_each_node(
    scripted: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    llm = CacheBlendLLM(engine=scripted)
    nodes = nodes_of(text(1), text(2))
    report = asked(query_engine(llm, nodes))
    assert (report["summary"], report["retrieved"]) == ("2 of 2 retrieved chunks reused", 2)
    assert [each["id"] for each in report["chunks"]] == [chunk_id(node_text(node)) for node in nodes]
    report = asked(query_engine(llm, nodes, re_flowed))
    assert report["summary"] == "0 of 2 retrieved chunks reused"
    assert chunk_id(text(1)) in caplog.text


def test_nodes_without_a_text_may_be_retrieved_beside_text_nodes(scripted: ScriptedEngine) -> None:
    nodes = [ImageNode(image="aGk="), *nodes_of(text(1), " ")]
    assert asked(query_engine(CacheBlendLLM(engine=scripted), nodes))["summary"] == "1 of 1 retrieved chunks reused"
    own = CacheBlendQueryEngine(CacheBlendRetriever(Fixed(nodes), scripted), CacheBlendSynthesizer(scripted))
    assert asked(own)["summary"] == "1 of 1 retrieved chunks reused"


def test_on_miss_decides_between_silence_and_an_error(
    scripted: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = nodes_of(text(1))
    assert statuses(asked(query_engine(CacheBlendLLM(engine=scripted, on_miss="ignore"), nodes, re_flowed))) == [
        "not_reused"
    ]
    assert not caplog.records
    strict = CacheBlendLLM(engine=scripted, on_miss="error")
    calls = len(scripted.asked)
    with pytest.raises(AlteredChunkError, match=chunk_id(text(1))):
        query_engine(strict, nodes, re_flowed).query("When?")
    assert len(scripted.asked) == calls
    with pytest.raises(InputError, match="'ignore', 'warn', 'error'"):
        CacheBlendLLM(engine=scripted, on_miss="panic")


def test_a_named_policy_that_falls_back_may_be_an_error() -> None:
    with TransformersEngine("bundled", ranking="off", prefix_cache=0) as unranked:
        llm = CacheBlendLLM(engine=unranked, policy="static", max_tokens=2)
        asked(query_engine(llm, nodes_of(text(1), text(2))))  # stores the missing chunks
        unranked.flush()
        assert asked(query_engine(llm, nodes_of(text(1), text(2))))["reused"] == 2
        with pytest.raises(InputError, match=r"static fell back to hkvd .* not all chunks are ranked.*on_miss='warn'"):
            query_engine(llm.with_options(on_miss="error"), nodes_of(text(1), text(2))).query("When?")


def test_escaped_nodes_are_reused_from_the_second_prompt_on(engine: BlendEngine) -> None:
    nodes = nodes_of(text(1, "organ"))
    for expected in ("not_stored", "reused"):
        with collect_usage() as calls:
            query_engine(CacheBlendLLM(engine=engine, max_tokens=2, ratio=0.0), nodes, as_json).query("When?")
        engine.flush()
        assert statuses(calls[0].retrieved) == [expected]
    assert calls[0].usage["reused_tokens"] > 0.6 * calls[0].usage["prompt_tokens"]


def test_a_node_is_found_with_and_without_its_metadata(engine: BlendEngine) -> None:
    nodes = nodes_of(*(text(n, "sundial") for n in range(3)), page=7, title="Sundials of the coast")
    bodies = sum(len(CacheBlendLLM(engine=engine).tokenizer(node.text)) for node in nodes)
    CacheBlendPrecompute(engine)(nodes)  # this includes metadata
    llm = CacheBlendLLM(engine=engine, max_tokens=2, ratio=0.0)
    cited = CitationQueryEngine(Fixed(nodes), llm=llm, response_synthesizer=get_response_synthesizer(llm=llm))
    reused = []
    for one in (query_engine(llm, nodes), cited, cited):
        with collect_usage() as calls:
            one.query("When was the sundial cast?")
        engine.flush()
        assert "not_reused" not in statuses(calls[0].retrieved)
        reused.append(calls[0].usage["reused_tokens"])
    # Without metadata the texts differ: they are computed with the first prompt, reused from the second on.
    assert reused[0] >= bodies
    assert reused[2] >= bodies


def test_a_node_computed_without_metadata_is_found_in_prompts_with_metadata(engine: BlendEngine) -> None:
    nodes = nodes_of(*(text(n, "lantern") for n in range(3)), page=7)
    bodies = sum(len(CacheBlendLLM(engine=engine).tokenizer(node.text)) for node in nodes)
    CacheBlendPrecompute(engine, metadata_mode=MetadataMode.NONE)(nodes)
    with collect_usage() as calls:
        query_engine(CacheBlendLLM(engine=engine, max_tokens=2, ratio=0.0), nodes).query("When?")
    assert calls[0].usage["reused_tokens"] >= bodies
    assert statuses(calls[0].retrieved) == ["reused"] * 3


def test_concurrent_queries_do_not_see_each_others_nodes(scripted: ScriptedEngine) -> None:
    llm = CacheBlendLLM(engine=scripted)
    with collect_usage() as calls, ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: query_engine(llm, nodes_of(text(n))).query("When?"), range(8)))
    assert sorted(call.retrieved["chunks"][0]["id"] for call in calls) == sorted(chunk_id(text(n)) for n in range(8))
    assert {call.retrieved["retrieved"] for call in calls} == {1}


async def test_concurrent_async_queries_do_not_see_each_others_nodes(scripted: ScriptedEngine) -> None:
    llm = CacheBlendLLM(engine=scripted)
    with collect_usage() as calls:
        await asyncio.gather(*(query_engine(llm, nodes_of(text(n))).aquery("When?") for n in range(6)))
    assert sorted(call.retrieved["chunks"][0]["id"] for call in calls) == sorted(chunk_id(text(n)) for n in range(6))
    assert {call.retrieved["retrieved"] for call in calls} == {1}


def test_finished_spans_are_forgotten(scripted: ScriptedEngine) -> None:
    def broken(context_str: str, **_: Any) -> str:
        raise RuntimeError("no")

    llm = CacheBlendLLM(engine=scripted)
    before = len(RETRIEVALS._parents)
    for _ in range(2):
        query_engine(llm, nodes_of(text(1))).query("When?")
        with pytest.raises(RuntimeError):
            query_engine(llm, nodes_of(text(1)), broken).query("When?")
    assert len(RETRIEVALS._parents) == before


class Halving(BaseNodePostprocessor):
    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        return [NodeWithScore(node=TextNode(text=node.node.get_content()[:120])) for node in nodes]


def test_nodes_made_by_a_postprocessor_count_as_retrieved(scripted: ScriptedEngine) -> None:
    llm, short = CacheBlendLLM(engine=scripted), text(1)[:120].strip()
    options = {"node_postprocessors": [Halving(), CacheBlendPostprocessor(scripted)]}
    report = asked(query_engine(llm, nodes_of(text(1)), **options))
    assert [(each["id"], each["status"]) for each in report["chunks"]] == [(chunk_id(short), "reused")]
    whole = CacheBlendQueryEngine(
        retriever=CacheBlendRetriever(Fixed(nodes_of(text(1))), scripted),
        response_synthesizer=CacheBlendSynthesizer(scripted),
        node_postprocessors=[Halving()],
    )
    assert statuses(asked(whole)) == ["reused"]


def test_a_retriever_and_a_model_called_in_succession_report_the_chunks_in_the_prompt(scripted: ScriptedEngine) -> None:
    llm = CacheBlendLLM(engine=scripted, on_miss="error")
    found = Fixed(nodes_of(text(21), text(22), text(23))).retrieve("When?")
    prompt = node_text(found[0]) + "\n\n" + re_flowed(node_text(found[1]))
    raw = llm.chat([ChatMessage(role="user", content=prompt)]).raw
    # Chunks absent from the prompt may have been retrieved for a different one.
    assert statuses(raw["retrieved"]) == ["reused"]
