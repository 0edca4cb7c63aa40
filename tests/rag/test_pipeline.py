from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from cacheblend_rag.blending.outcome import PromptOutcome
from cacheblend_rag.engines.results import Generation, PrecomputeReport
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.errors import InputError, PromptTooLongError, StoreError, StoreMismatchError
from cacheblend_rag.prompts.chunk import EDGE, Chunk, _encode
from cacheblend_rag.prompts.prompt import BlendPrompt, TokenizedPrompt, header_ids, rag_header
from cacheblend_rag.rag.indexing import IndexProgress, vanished
from cacheblend_rag.rag.pipeline import RagPipeline
from cacheblend_rag.rag.results import Turn
from cacheblend_rag.retrieval.database import IndexDatabase
from cacheblend_rag.retrieval.embedding import Embedder
from cacheblend_rag.retrieval.index import ChunkIndex, Hit
from cacheblend_rag.store import DiskStore, MemoryStore, TieredStore
from tests.conftest import CHATML, byte_level, thinking
from tests.fake_engine import FakeEngine
from tests.recorded_spans import exporter, said, tree

pytestmark = pytest.mark.slow

load_embedder = Embedder.load

DOCUMENTS = {
    "observatory.md": "The Marlow observatory stands on a hill.\n\nIts director has been Ada Brenmoor since 1911.\n\n"
    "Visitors may come on Sundays to look at the moon.",
    "bakery.txt": "Seldale Bakery sells rye bread.\n\nIts emblem is a crown of wheat.",
    "ships/log.txt": "The ship Corvik sailed at dawn with a cargo of copper.\n\nThe captain kept a parrot.",
}


@pytest.fixture(autouse=True)
def _one_embedding_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Embedder, "load", staticmethod(_embedder))


@cache
def _embedder(name: str) -> Embedder:
    return load_embedder(name)


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    for name, text in DOCUMENTS.items():
        file = tmp_path / "docs" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path / "docs"


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def pipeline(tmp_path: Path, engine: FakeEngine) -> RagPipeline:
    return RagPipeline(engine, tmp_path / "store", chunk_tokens=24)


def names(paths: list[str]) -> list[str]:
    return [Path(path).name for path in paths]


def stored(engine: FakeEngine) -> int:
    return engine.store.stats().entries


def test_indexing_reports_documents_chunks_and_tokens(pipeline: RagPipeline, engine: FakeEngine, docs: Path) -> None:
    (docs / "empty.txt").touch()
    seen: list[IndexProgress] = []
    report = pipeline.index([docs], seen.append)
    assert names(report.added) == ["bakery.txt", "observatory.md", "log.txt"]
    assert [(Path(s.path).name, "empty" in s.reason) for s in report.skipped] == [("empty.txt", True)]
    assert report.chunks == len(list(pipeline.chunks.chunks())) == stored(engine) == len(engine.registry)
    assert report.tokens == sum(len(c.token_ids) for c in pipeline.chunks.chunks())
    assert seen[-1].documents_done == seen[-1].documents == 4
    assert max(p.chunks_done for p in seen) == max(p.chunks for p in seen) == max(p.embedded for p in seen) > 1
    assert seen[-1].plan is not None and seen[-1].planned_done == seen[-1].plan.chunks == report.chunks


def test_unchanged_documents_are_left_alone_and_changed_ones_replaced(
    pipeline: RagPipeline, engine: FakeEngine, docs: Path
) -> None:
    pipeline.index([docs])
    engine.computed.clear()
    again = pipeline.index([docs, docs / "bakery.txt"])
    assert len(again.unchanged) == 3 and not again.added and not engine.computed
    (docs / "bakery.txt").write_text("Seldale Bakery sells rye bread.\n\nIts emblem is now a golden key.")
    before = {chunk.id for chunk in pipeline.chunks.chunks()}
    report = pipeline.index([docs])
    assert names(report.changed) == ["bakery.txt"] and len(report.unchanged) == 2
    assert engine.computed == ["Its emblem is now a golden key."]  # the unchanged chunk still has its KV
    after = {chunk.id for chunk in pipeline.chunks.chunks()}
    assert stored(engine) == len(after) and {c.id for c in engine.registry} == after != before


def test_the_number_of_store_listings_does_not_grow_with_unchanged_documents(
    pipeline: RagPipeline, docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline.index([docs])
    stats, listed = MemoryStore.stats, []
    monkeypatch.setattr(MemoryStore, "stats", lambda self: listed.append(1) or stats(self))
    counts = []
    for paths in ([docs / "bakery.txt"], [docs]):
        listed.clear()
        assert not pipeline.index(paths).added
        counts.append(len(listed))
    assert counts[0] == counts[1] > 0


def test_documents_below_an_inaccessible_folder_do_not_count_as_deleted() -> None:
    assert vanished(["/docs/a.txt"], [Path("l" * 300)]) == []


def test_deleted_documents_lose_their_kv_unless_another_document_has_the_chunk(
    pipeline: RagPipeline, engine: FakeEngine, docs: Path
) -> None:
    (docs / "copy.txt").write_text(DOCUMENTS["bakery.txt"])
    pipeline.index([docs])
    entries = stored(engine)
    (docs / "bakery.txt").unlink()
    assert names(pipeline.index([docs]).removed) == ["bakery.txt"]
    assert stored(engine) == entries
    (docs / "copy.txt").unlink()
    (docs / "ships" / "log.txt").unlink()
    (docs / "ships").rmdir()
    assert names(pipeline.index([docs]).removed) == ["copy.txt", "log.txt"]
    assert stored(engine) == len(list(pipeline.chunks.chunks())) == len(engine.registry) < entries


def test_a_link_out_of_the_folder_is_not_indexed_and_is_reported(
    pipeline: RagPipeline, docs: Path, tmp_path: Path
) -> None:
    (tmp_path / "secret.txt").write_text("The password is rye.")
    (docs / "notes.txt").symlink_to(tmp_path / "secret.txt")
    report = pipeline.index([docs])
    assert "notes.txt" not in names(report.added)
    assert [(Path(each.path).name, "link out" in each.reason) for each in report.skipped] == [("notes.txt", True)]


def test_a_store_inside_the_folder_is_not_indexed_except_for_documents_put_into_it(docs: Path) -> None:
    store, reports = docs / "store", []
    for name in ("documents", "tmp"):
        with FakeEngine(DiskStore(store)) as engine, RagPipeline(engine, store, chunk_tokens=24) as pipeline:
            reports.append(pipeline.index([docs]))
        (store / name).mkdir(exist_ok=True)
        (store / name / "note.txt").write_text("The harbour lies below.")
    with FakeEngine(DiskStore(store)) as engine, RagPipeline(engine, store, chunk_tokens=24) as pipeline:
        reports.append(pipeline.index([docs]))
    assert any(store.glob("kv/*/*"))
    assert [len(report.added) for report in reports] == [len(DOCUMENTS), 1, 1]
    assert not any(report.skipped for report in reports[1:])


def test_a_document_is_removed_by_its_indexed_path(
    pipeline: RagPipeline, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pipeline.index(["docs"])
    pipeline.remove("docs/bakery.txt")
    pipeline.remove(docs / "ships/log.txt")
    assert names([document.path for document in pipeline.chunks.documents()]) == ["observatory.md"]
    with pytest.raises(InputError, match=r"bakery\.txt is not in the index"):
        pipeline.remove("docs/bakery.txt")


def test_files_outside_the_given_directories_stay_indexed(pipeline: RagPipeline, docs: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside.txt"
    outside.write_text("A note from outside.")
    pipeline.index([outside, docs])
    outside.unlink()
    assert pipeline.index([docs]).removed == []
    with pytest.raises(InputError, match=r"outside\.txt"):
        pipeline.index([outside])


def test_an_unreadable_file_leaves_its_former_version_and_an_emptied_file_is_removed(
    pipeline: RagPipeline, docs: Path
) -> None:
    pipeline.index([docs])
    (docs / "bakery.txt").write_bytes(b"\x00\x01\x02")
    (docs / "observatory.md").write_bytes(b"")
    report = pipeline.index([docs])
    assert names(report.removed) == ["observatory.md"]
    assert any("the version indexed before stays" in s.reason for s in report.skipped)
    assert names([d.path for d in pipeline.chunks.documents()]) == ["bakery.txt", "log.txt"]


def test_a_store_error_leaves_a_document_out_and_the_next_run_adds_it(
    pipeline: RagPipeline, engine: FakeEngine, docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = engine.precompute

    def full(chunks: list[Chunk], progress: object = None) -> PrecomputeReport:
        if any("ship" in chunk.text for chunk in chunks):
            raise StoreError("The disk is full.")
        return compute(chunks)

    monkeypatch.setattr(engine, "precompute", full)
    with pytest.raises(StoreError, match="disk is full"):
        pipeline.index([docs])
    monkeypatch.undo()
    report = pipeline.index([docs])
    assert names(report.added) == ["log.txt"] and len(report.unchanged) == 2


def test_an_answer_has_sources_usage_and_the_documented_json(pipeline: RagPipeline, docs: Path) -> None:
    pipeline.index([docs])
    answer = pipeline.ask("Who is the director of the Marlow observatory?")
    assert answer.answer == "two words"
    assert any("Ada Brenmoor" in source.text for source in answer.sources)
    shown = json.loads(json.dumps(answer.to_dict()))
    facts = [each.name for each in fields(PromptOutcome)]
    assert list(shown) == ["answer", "reasoning", "sources", *facts, "timings", "notes"]
    assert set(shown["sources"][0]) == {"id", "path", "page", "score", "text"}
    assert set(shown["usage"]) == {
        *(
            "prompt_tokens",
            "reused_tokens",
            "kept_tokens",
            "exact_tokens",
            "recomputed_tokens",
            "computed_tokens",
            "completion_tokens",
            "selection_tokens",
        )
    }
    assert set(shown["timings"]) == {"retrieve_s", "ttft_s", "total_s"}


def test_chunks_stand_in_the_prompt_in_reading_order_once_each_behind_the_header(
    pipeline: RagPipeline, engine: FakeEngine, docs: Path
) -> None:
    pipeline.index([docs])
    answer = pipeline.ask("The director, the emblem, the moon, and the captain?")
    tokens = engine.prompts[-1]
    found = {source.id: (source.path, source.ordinal) for source in answer.sources}
    places = [found[span.chunk.id] for span in tokens.spans]
    assert places == sorted(set(places)) and len(places) == len(answer.sources) == 6
    header = header_ids(engine.tokenizer, rag_header(engine.tokenizer))
    assert tokens.token_ids[: len(header)] == header and tokens.spans[0].start == len(header)


def test_sources_are_listed_by_relevance_with_following_chunks_last(pipeline: RagPipeline, docs: Path) -> None:
    pipeline.index([docs])
    asked = "What did the ship Corvik carry?"
    for sources in (pipeline.ask(asked).sources, next(pipeline.stream(asked)).sources):
        assert sources is not None and "Corvik" in sources[0].text  # in order of paths it would be the last
        scores = [source.score for source in sources if source.score is not None]
        assert scores == sorted(scores, reverse=True) and len(scores) > 1
        assert all(source.score is None for source in sources[len(scores) :])


def test_an_unrelated_chunk_is_no_source_unless_it_is_the_nearest(
    pipeline: RagPipeline, docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline.index([docs])
    search = ChunkIndex.search

    def scored(scores: list[float]) -> list[float | None]:
        def found(index: ChunkIndex, question: str, k: int) -> list[Hit]:
            return [replace(hit, score=s) for hit, s in zip(search(index, question, k), scores, strict=False)]

        monkeypatch.setattr(ChunkIndex, "search", found)
        hits = pipeline.retrieve("Who keeps a parrot?").hits
        monkeypatch.undo()
        monkeypatch.setattr(Embedder, "load", staticmethod(_embedder))
        return [hit.score for hit in hits if hit.score is not None]

    assert scored([0.4, 0.1, 0.0, -0.001, -0.2]) == [0.4, 0.1]
    assert scored([-0.1, -0.2]) == [-0.1]


def test_an_index_is_opened_once_and_a_prompt_tokenised_once(
    tmp_path: Path, engine: FakeEngine, docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, given = [], []
    connect, tokenize = IndexDatabase.__init__, engine.tokenize
    monkeypatch.setattr(IndexDatabase, "__init__", lambda self, *how: opened.append(how) or connect(self, *how))
    monkeypatch.setattr(engine, "tokenize", lambda prompt: given.append(prompt) or tokenize(prompt))
    with RagPipeline(engine, tmp_path / "store", chunk_tokens=24) as pipeline:
        pipeline.index([docs])
        pipeline.ask("Who kept a parrot?")
    assert len(opened) == 1
    assert [type(each) for each in given if not isinstance(each, TokenizedPrompt)] == [BlendPrompt]


def test_a_question_is_rendered_once_and_no_text_of_its_prompt_is_tokenised_twice(
    tmp_path: Path, docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine(tokenizer=byte_level(CHATML))
    render, rendered, encoded = engine.tokenizer.apply_chat_template, [], []
    with RagPipeline(engine, tmp_path / "store", chunk_tokens=24) as pipeline:
        pipeline.index([docs])
        pipeline.ask("Who sells bread?")  # the first question looks up how the template treats thoughts
        monkeypatch.setattr(
            engine.tokenizer, "apply_chat_template", lambda *a, **k: rendered.append(a) or render(*a, **k)
        )
        monkeypatch.setattr(
            "cacheblend_rag.prompts.chunk._encode",
            lambda by, text, *how: encoded.append(text) or _encode(by, text, *how),
        )
        for history in ([], [Turn("Who sells bread?", "The bakery.", ())]):
            for _ in range(2):  # the first question with a chunk looks at the chunk's end
                rendered.clear()
                encoded.clear()
                pipeline.ask("Who kept a parrot?", history=history)
                assert len(rendered) == 1
            spans = engine.prompts[-1].spans
            assert spans
            assert len(encoded) == len(set(encoded)) == len(spans) + 1  # these are the texts around the chunks
            long = [span.chunk.text for span in spans if len(span.chunk.text) > EDGE]
            assert long and not any(chunk in text for chunk in long for text in encoded)


def test_the_best_hits_bring_the_chunk_that_follows_them(tmp_path: Path, engine: FakeEngine) -> None:
    about = [f"The Marlow observatory and its telescope, part {n}." for n in range(6)]
    about.insert(3, "Who founded the Marlow observatory? That is known.")
    about.insert(4, "It was a baker with a wooden leg.")
    (tmp_path / "a.txt").write_text("\n\n".join(about))
    question = "Who founded the Marlow observatory?"
    for follow, expected in ((0, False), (1, True)):
        with RagPipeline(engine, tmp_path / "s", k=2, follow=follow, chunk_tokens=24) as pipeline:
            pipeline.index([tmp_path / "a.txt"])
            texts = [source.text for source in pipeline.retrieve(question).hits]
        assert any("wooden leg" in text for text in texts) == expected and len(texts) == 2


def test_sources_that_do_not_fit_are_left_out_least_similar_first_with_a_note(tmp_path: Path, docs: Path) -> None:
    engine = FakeEngine(window=150)
    pipeline = RagPipeline(engine, tmp_path / "store", chunk_tokens=24, follow=0)
    pipeline.index([docs])
    question = "Who is the director of the Marlow observatory?"
    full = pipeline.retrieve(question)
    answer = pipeline.ask(question, SamplingParams(max_tokens=40))
    assert 0 < len(answer.sources) < len(full.hits)
    assert answer.generation.usage.prompt_tokens + 40 <= 150
    lost = [h for h in full.hits if h.chunk.id not in {source.id for source in answer.sources}]
    assert max(h.score or 0 for h in lost) <= min(source.score or 0 for source in answer.sources)
    assert answer.notes == (f"{len(lost)} of {len(full.hits)} sources left out: the context window is 150 tokens.",)
    with pytest.raises(PromptTooLongError, match="Shorten it"):
        pipeline.ask("word " * 200)


def test_streaming_yields_sources_then_text_then_the_answer(
    pipeline: RagPipeline, engine: FakeEngine, docs: Path
) -> None:
    pipeline.index([docs])
    first, *texts, last = list(pipeline.stream("Who keeps a parrot?"))
    assert first.sources and not first.text
    assert first.prompt is not None and {span.chunk.id for span in first.prompt.spans} == {s.id for s in first.sources}
    assert "".join(e.text for e in [*texts, last]) == " two words "
    assert last.answer is not None and last.answer.sources == first.sources
    events = pipeline.stream("Who keeps a parrot?")
    next(events), next(events)
    events.close()
    assert engine.closed_streams == 2


async def test_thoughts_of_a_model_are_no_part_of_its_answer_or_of_later_prompts(tmp_path: Path, docs: Path) -> None:
    engine, question = FakeEngine(tokenizer=thinking()), "Who keeps a parrot?"
    engine.says = ("Is it", " Ada?\n</thi", "nk>\n\nThe", " captain.")
    with RagPipeline(engine, tmp_path / "store") as pipeline:
        pipeline.index([docs])
        answer = pipeline.ask(question)
        for events in ([*pipeline.stream(question)], [event async for event in pipeline.astream(question)]):
            assert [event.text for event in events] == ["", "", "", "The", " captain."]
            assert "".join(event.reasoning for event in events) == "Is it Ada?"
            last = events[-1].answer
            assert last is not None and (last.answer, last.reasoning) == (answer.answer, answer.reasoning)
        assert (answer.answer, answer.reasoning, answer.notes) == ("The captain.", "Is it Ada?", ())
        assert answer.turn(question).answer == "The captain." and "think" in answer.generation.text
        engine.says = ("Is it", " Ada?")
        cut = pipeline.ask(question)
    assert (cut.answer, cut.reasoning) == ("", "Is it Ada?")
    assert cut.notes == ("no answer: the model was still thinking after 2 tokens. Give it more (max_tokens).",)


async def test_async_methods_agree_with_sync_methods(pipeline: RagPipeline, docs: Path) -> None:
    await asyncio.to_thread(pipeline.index, [docs])
    question = "Who keeps a parrot?"
    streamed = [event async for event in pipeline.astream(question)]
    answers = await asyncio.gather(*(pipeline.aask(question) for _ in range(4)))
    assert {a.sources for a in answers} == {pipeline.ask(question).sources, streamed[0].sources}
    assert streamed[-1].answer is not None


async def test_cancelling_a_question_cancels_the_engines_request(
    pipeline: RagPipeline, docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await asyncio.to_thread(pipeline.index, [docs])
    asked, cancelled = asyncio.Event(), asyncio.Event()

    async def agenerate(*_: Any) -> Generation:
        asked.set()
        try:
            return await asyncio.Future()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    monkeypatch.setattr(pipeline.engine, "agenerate", agenerate)
    question = asyncio.create_task(pipeline.aask("Who keeps a parrot?"))
    await asyncio.wait_for(asked.wait(), 60)
    question.cancel()
    with pytest.raises(asyncio.CancelledError):
        await question
    assert cancelled.is_set()


def test_opening_an_index_registers_its_chunks_for_matching_in_plain_text(
    pipeline: RagPipeline, docs: Path, tmp_path: Path
) -> None:
    pipeline.index([docs])
    fresh = FakeEngine()
    with RagPipeline(fresh, tmp_path / "store") as reopened:
        chunk = next(reopened.chunks.chunks())
        assert fresh.registry.find(f"Notes: {chunk.text} Thanks.") == ["Notes: ", chunk, " Thanks."]
        assert reopened.chunks.config.chunk_tokens == 24


def test_documents_indexed_by_another_process_are_found_without_reopening(
    pipeline: RagPipeline, docs: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="Nothing is indexed"):
        pipeline.ask("Who keeps a parrot?")
    with RagPipeline(FakeEngine(), tmp_path / "store") as other:
        other.index([docs])
    assert any("parrot" in source.text for source in pipeline.ask("Who keeps a parrot?").sources)


def test_an_index_of_another_model_or_chunk_size_is_refused(pipeline: RagPipeline, tmp_path: Path) -> None:
    with pytest.raises(StoreMismatchError, match=r"fake.*other"):
        RagPipeline(FakeEngine(name="other"), tmp_path / "store")
    with pytest.raises(StoreMismatchError, match="24 tokens"):
        RagPipeline(FakeEngine(), tmp_path / "store", chunk_tokens=48)


def test_an_index_being_created_by_another_process_is_opened_with_its_settings(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = tmp_path / "store" / "index.sqlite3"
    index.parent.mkdir()
    index.touch()  # the other process creates this file first

    def make_it(database: IndexDatabase, create: bool) -> sqlite3.Connection:
        monkeypatch.undo()
        RagPipeline(FakeEngine(), index.parent, chunk_tokens=24).close()
        return IndexDatabase._connect(database, create)

    monkeypatch.setattr(IndexDatabase, "_connect", make_it)
    with RagPipeline(engine, index.parent) as pipeline:
        assert pipeline.chunks.config.chunk_tokens == 24


def test_a_failed_opening_leaves_the_engine_unchanged(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    RagPipeline(FakeEngine(), tmp_path).close()

    def fail(*_: object) -> NoReturn:
        raise StoreError("the disk is gone")

    with monkeypatch.context() as broken:
        broken.setattr(ChunkIndex, "signatures_after", fail)
        for _ in range(20):
            with pytest.raises(StoreError, match="disk is gone"):
                RagPipeline(engine, tmp_path)
    RagPipeline(engine, tmp_path).close()
    opened = [RagPipeline(engine, tmp_path) for _ in range(15)]
    with pytest.raises(InputError, match="close"):
        RagPipeline(engine, tmp_path)
    for pipeline in opened:
        pipeline.close()


def test_indexing_more_kv_than_the_store_can_hold_is_refused_unless_beyond_budget_is_set(
    tmp_path: Path, docs: Path
) -> None:
    engine = FakeEngine(MemoryStore(1500))
    with RagPipeline(engine, tmp_path / "store", chunk_tokens=24) as pipeline:
        with pytest.raises(StoreError, match=r"The KV of these \d+ chunks .* the store can hold .*beyond_budget=True"):
            pipeline.index([docs])
        assert len(engine.computed) == 1 and not pipeline.chunks.documents()
        report = pipeline.index([docs], beyond_budget=True)
        assert len(report.added) == 3 and report.without_kv


def test_chunks_larger_than_the_disks_budget_are_refused(tmp_path: Path, docs: Path) -> None:
    engine = FakeEngine(TieredStore([MemoryStore(), DiskStore(tmp_path / "store", 50)]))
    with RagPipeline(engine, tmp_path / "store", chunk_tokens=24) as pipeline:
        with pytest.raises(StoreError, match="store can hold 50 B"):
            pipeline.index([docs])
        report = pipeline.index([docs], beyond_budget=True)
    (why,) = set(report.without_kv.values())
    assert "budget, 50 B, is smaller than the KV of one" in why


def test_kv_still_being_written_to_the_only_lasting_tier_is_not_reported_as_lost(
    tmp_path: Path, docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = DiskStore(tmp_path / "store", writes="back")
    put, flush, asked = disk.put, TieredStore.flush, threading.Event()
    monkeypatch.setattr(disk, "put", lambda *entry: asked.wait(30) and put(*entry))
    monkeypatch.setattr(TieredStore, "flush", lambda store: asked.set() or flush(store))
    engine = FakeEngine(TieredStore([MemoryStore(), disk]))
    with RagPipeline(engine, tmp_path / "store", chunk_tokens=24) as pipeline:
        report = pipeline.index([docs])
    assert report.without_kv == {}
    assert report.kv_bytes == disk.stats().nbytes


def test_a_disk_holds_no_more_than_its_free_space_whatever_its_budget(
    tmp_path: Path, docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine(DiskStore(tmp_path / "store", 1 << 40))
    with RagPipeline(engine, tmp_path / "store", chunk_tokens=24) as pipeline:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
        with pytest.raises(StoreError, match="store can hold"):
            pipeline.index([docs])


def test_bad_pipeline_arguments_are_named_in_the_error(
    pipeline: RagPipeline, engine: FakeEngine, tmp_path: Path
) -> None:
    sizes = (
        ({"chunk_tokens": 0}, "max_tokens is 0"),
        ({"overlap": -1}, "overlap is -1"),
        ({"overlap": 400}, "overlap is 400"),
    )
    for arguments, message in (({"k": 0}, "k is 0"), ({"follow": -1}, "follow is -1"), *sizes):
        with pytest.raises(InputError, match=message):
            RagPipeline(engine, tmp_path / "x", **arguments)
    assert not ChunkIndex.exists(tmp_path / "x")  # a wrong index would stay there
    with pytest.raises(InputError, match="question is empty"):
        pipeline.ask("  ")
    with pytest.raises(InputError, match="question is not valid Unicode"):
        pipeline.ask("Where is the \udcff?")  # a terminal's byte that is no UTF-8 arrives so


DIE = """
import os, signal, sys
from pathlib import Path
from cacheblend_rag.rag.pipeline import RagPipeline
from cacheblend_rag.retrieval.embedding import DEFAULT_EMBEDDING, Embedder
from cacheblend_rag.retrieval.index import ChunkIndex
from cacheblend_rag.store import DiskStore
from tests.fake_engine import FakeEngine

def index_until(where, store, docs):
    engine = FakeEngine(DiskStore(store))
    pipeline = RagPipeline(engine, store, chunk_tokens=24)
    target, name = (engine, "precompute") if where == "precompute" else (ChunkIndex, "add")
    original, calls = getattr(target, name), []

    def die(*arguments):
        calls.append(1)
        # The first document takes two: its first chunk alone shows how large the KV will be.
        if len(calls) == (3 if where == "precompute" else 2) and where != "after-add":
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*arguments)
        if len(calls) == 2 and where == "after-add":
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(target, name, die)
    pipeline.index([docs])

embedder = Embedder.load(DEFAULT_EMBEDDING)
Embedder.load = lambda name: embedder
for where in sys.argv[3:]:
    if not (child := os.fork()):  # no thread runs yet; what is imported and loaded once serves all
        index_until(where, Path(sys.argv[1]) / where, sys.argv[2])
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.slow
def test_a_killed_run_loses_nothing_and_the_next_run_continues(tmp_path: Path, docs: Path) -> None:
    indexed = {"precompute": 1, "before-add": 1, "after-add": 2}
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, "-c", DIE, tmp_path, docs, *indexed]
    killed = subprocess.run(command, cwd=root, env=environment, check=True, capture_output=True, text=True)
    assert killed.stdout.split() == [str(-signal.SIGKILL)] * 3
    for where, documents in indexed.items():
        assert_goes_on(tmp_path / where, docs, documents)


def assert_goes_on(store: Path, docs: Path, indexed: int) -> None:
    with ChunkIndex(store) as index:
        assert len(index.documents()) == indexed
    engine = FakeEngine(DiskStore(store))
    kept = stored(engine)
    with RagPipeline(engine, store) as pipeline:
        report = pipeline.index([docs])
        assert len(report.unchanged) == indexed and len(report.added) == 3 - indexed
        chunks = list(pipeline.chunks.chunks())
        assert len(engine.computed) == len(chunks) - kept
        assert all(engine.store.contains(engine.key(chunk)) for chunk in chunks)


def test_a_question_is_a_span_with_retrieval_and_the_engines_request_in_it(pipeline: RagPipeline, docs: Path) -> None:
    pipeline.index([docs])
    question = "Who is the director?"

    async def asynchronously() -> None:
        async for _ in pipeline.astream(question):
            pass

    kept = exporter()
    for ask in (lambda: pipeline.ask(question), lambda: asyncio.run(asynchronously())):
        kept.clear()
        ask()
        spans = kept.get_finished_spans()
        assert tree(spans) == {
            "cacheblend.ask": {"cacheblend.retrieve", "cacheblend.generate"},
            "cacheblend.retrieve": set(),
            "cacheblend.generate": set(),
        }
        assert "director" not in said(spans)
        assert all(span.end_time for span in spans)


def test_a_failing_question_ends_its_span_without_recording_the_question(pipeline: RagPipeline) -> None:
    kept = exporter()
    kept.clear()
    with pytest.raises(InputError):
        pipeline.ask("Who is the director?")
    (asked,) = (span for span in kept.get_finished_spans() if span.name == "cacheblend.ask")
    assert (asked.attributes or {})["error.type"] == "InputError"
    assert "director" not in asked.to_json()
