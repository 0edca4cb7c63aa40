"""The contract of the OpenTelemetry spans of engines that compute. Subclass it beside `EngineContract`."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from cacheblend_rag import spans as told
from cacheblend_rag.blending.settings import BlendSettings
from cacheblend_rag.engines.base import BlendEngine
from cacheblend_rag.engines.sampling import SamplingParams
from tests.engines.contract import TEXTS
from tests.recorded_spans import exporter, named, said, tree

FEW = SamplingParams(max_tokens=3)
SETTINGS = BlendSettings(ratio=0.3, policy="hkvd", check_layers=(2,))


class SpansContract:
    @pytest.fixture
    def kept(self) -> Iterator[InMemorySpanExporter]:
        kept = exporter()
        kept.clear()
        yield kept
        kept.clear()

    @pytest.fixture
    def stored(self, engine: BlendEngine, chunks: Any, reopened: Any) -> Iterator[BlendEngine]:
        engine.precompute(chunks)
        with reopened() as engine:
            yield engine

    def test_a_blended_request_is_a_span_with_parts_and_counts_reused_tokens(
        self, stored, chunks, prompt, kept
    ) -> None:
        with told.span("mine"):
            answer = stored.generate(prompt, FEW, SETTINGS)
        spans = kept.get_finished_spans()
        parts = {f"cacheblend.{part}" for part in ("plan", "load", "fuse", "decode")}
        found = tree(spans)
        assert found["mine"] == {"cacheblend.generate"}
        assert parts <= found["cacheblend.generate"] <= {*parts, "cacheblend.prefill"}
        passes = {f"cacheblend.{name}_pass" for name in ("front", "dense", "sparse")}
        assert found["cacheblend.fuse"] == passes
        request, usage = named(spans, "cacheblend.generate"), answer.usage
        assert request["cacheblend.mode"] == "blend"
        assert (request["cacheblend.reason"], request["cacheblend.ratio"]) == (answer.reason, answer.ratio)
        counts = ("reused", "recomputed", "computed")
        assert [request[f"cacheblend.tokens.{n}"] for n in counts] == [getattr(usage, f"{n}_tokens") for n in counts]
        assert request["cacheblend.tier.disk.bytes"] == sum(load.nbytes for load in answer.loads)
        load, layers = named(spans, "cacheblend.load"), stored.num_layers
        assert load["cacheblend.reads"] <= layers * len(answer.loads)
        assert abs(load["cacheblend.tier.disk.bytes"] - sum(each.nbytes for each in answer.loads)) < layers * len(
            answer.loads
        )
        plan, tokens = named(spans, "cacheblend.plan"), [len(chunk.token_ids) for chunk in chunks]
        assert plan["cacheblend.tokens.missing"] == 0
        assert plan["cacheblend.tokens.exact"] == len(stored.header_ids) + tokens[0]
        assert plan["cacheblend.tokens.stale"] == sum(tokens[1:])

    def test_the_parts_of_a_request_follow_each_other_within_its_span(self, stored, prompt, kept) -> None:
        stored.generate(prompt, FEW, SETTINGS)
        times = {span.name: (span.start_time, span.end_time) for span in kept.get_finished_spans()}
        whole, slack = times["cacheblend.generate"], 2_000_000  # the two clocks are not read at the same moment
        for begin, end in times.values():
            assert whole[0] - slack <= begin <= end <= whole[1] + slack
        order = [times[f"cacheblend.{name}"] for name in ("plan", "fuse", "decode")]
        assert all(before[1] <= after[0] + slack for before, after in itertools.pairwise(order))

    def test_the_span_of_a_prefill_has_a_prefill_part_and_counts_missing_chunks(
        self, engine, chunks, prompt, kept
    ) -> None:
        engine.generate(prompt, FEW, BlendSettings(quality="full"))
        spans = kept.get_finished_spans()
        assert tree(spans)["cacheblend.generate"] == {"cacheblend.prefill", "cacheblend.decode"}
        assert named(spans, "cacheblend.generate")["cacheblend.mode"] == "prefill"
        kept.clear()
        engine.generate(prompt, FEW, SETTINGS)
        spans = kept.get_finished_spans()
        assert tree(spans)["cacheblend.generate"] == {"cacheblend.plan", "cacheblend.prefill", "cacheblend.decode"}
        assert named(spans, "cacheblend.plan")["cacheblend.tokens.missing"] == sum(
            len(chunk.token_ids) for chunk in chunks
        )
        assert named(spans, "cacheblend.generate")["cacheblend.chunks.missing"] == len(TEXTS)

    def test_streams_and_asynchronous_requests_are_children_of_the_current_span(self, stored, prompt, kept) -> None:
        async def ask() -> None:
            with told.span("asynchronous"):
                await stored.agenerate(prompt, FEW, SETTINGS)
                async for _ in stored.astream(prompt, FEW, SETTINGS):
                    assert trace.get_current_span().is_recording()

        asyncio.run(ask())
        asked = named_spans(kept, "cacheblend.generate")
        (parent,) = named_spans(kept, "asynchronous")
        assert [span.parent.span_id for span in asked] == [parent.context.span_id] * 2

    def test_a_closed_stream_ends_its_span_without_an_error(self, stored, prompt, kept) -> None:
        stream = stored.stream(prompt, SamplingParams(max_tokens=400), SETTINGS)
        next(stream)
        stream.close()
        stored.generate(prompt, FEW, SETTINGS)  # ends after the closed stream
        left, _ = sorted(named_spans(kept, "cacheblend.generate"), key=lambda span: span.start_time)
        assert left.status.is_unset or left.status.is_ok
        assert left.attributes["error.type"] in {"GeneratorExit", "CancelledError"}

    def test_no_span_contains_text_of_a_prompt_or_an_answer(self, stored, prompt, kept) -> None:
        answer = stored.generate(prompt, SamplingParams(max_tokens=20), SETTINGS)
        text = said(kept.get_finished_spans())
        words = {word for each in (*TEXTS, "Who runs the observatory?") for word in each.split() if len(word) > 4}
        assert not {word for word in words if word in text}
        assert answer.text not in text


def named_spans(kept: InMemorySpanExporter, name: str) -> list[Any]:
    return [span for span in kept.get_finished_spans() if span.name == name]
