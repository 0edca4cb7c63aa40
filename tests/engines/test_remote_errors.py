"""Tests of the remote engine against servers that are down, slow, foreign or refuse requests."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import socket
import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("openai", reason="the openai package is not installed; make setup installs it")
pytest.importorskip("uvicorn", reason="uvicorn is not installed; make setup installs it, with vLLM")

from starlette.responses import JSONResponse, PlainTextResponse, Response

from cacheblend_rag.blending.settings import BlendSettings
from cacheblend_rag.engines.remote import RemoteEngine
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.errors import InputError, ModelError, PromptTooLongError, ServerError, UnknownChunkError
from cacheblend_rag.prompts.chunk import make_chunk
from cacheblend_rag.prompts.prompt import BlendPrompt, ChunkRef
from cacheblend_rag.store.kv import ModelFingerprint
from tests.conftest import tokenizer_named
from tests.engines.fake_server import FakeServer, piece, stream, unused_port, usage
from tests.outcomes import differing, filled

pytestmark = pytest.mark.slow

SHORT = SamplingParams(max_tokens=8)


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


def connect(fake: FakeServer, **options: Any) -> RemoteEngine:
    given = {"tokenizer": tokenizer_named("byte_level"), "max_retries": 0, **options}
    return RemoteEngine(fake.url, **given)


def refusal(status: int, message: str, kind: str = "x", param: str | None = None) -> Response:
    return JSONResponse({"error": {"message": message, "type": kind, "param": param, "code": status}}, status)


def test_the_error_without_a_server_names_the_command_that_starts_one() -> None:
    with unused_port() as port, pytest.raises(ServerError, match="cacheblend serve") as error:
        RemoteEngine(f"http://127.0.0.1:{port}", max_retries=0)
    assert error.value.status is None
    with pytest.raises(InputError, match="http://HOST:PORT"):
        RemoteEngine("localhost:8000")


def test_a_machine_that_accepts_no_connection_is_not_reported_as_busy() -> None:
    with ExitStack() as opened:
        full = opened.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):  # the backlog is full and no connection is accepted
            waiting = opened.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        with pytest.raises(ServerError, match=r"No server answers at .*timed out"):
            RemoteEngine(f"http://127.0.0.1:{full.getsockname()[1]}", connect_timeout_s=0.3, max_retries=0)


@pytest.mark.parametrize("answer", [PlainTextResponse("hello"), PlainTextResponse("no", 404), JSONResponse({"a": 1})])
def test_a_foreign_server_is_refused(answer: Response) -> None:
    class Other(FakeServer):
        async def _serve(self, request: Any) -> Response:
            return answer

    with Other() as fake, pytest.raises(ServerError, match="not a `cacheblend serve`"):
        connect(fake)


def test_a_server_of_another_model_is_refused_when_the_engine_connects(fake) -> None:
    with pytest.raises(ServerError, match="serves fake, not 'big'"):
        connect(fake, model="big")
    with pytest.raises(
        ServerError, match=r"another model or dtype \(fake, ffffffff\) than the one wanted \(mine, aaaaaaaa\)"
    ):
        connect(fake, fingerprint=ModelFingerprint("a" * 32, "mine"))
    assert connect(fake, model="fake", fingerprint=ModelFingerprint("f" * 32, "x")).model.name == "fake"


@pytest.mark.slow
def test_a_missing_or_different_tokenizer_is_refused(fake) -> None:
    with pytest.raises(ModelError, match="tokenizer="):
        connect(fake, tokenizer=None)
    with pytest.raises(ModelError, match="splits text otherwise"):
        connect(fake, tokenizer=tokenizer_named("metaspace"))


def test_an_answer_joins_the_streamed_pieces_and_usage_without_the_end_token(fake) -> None:
    fake.handle = lambda _: stream(piece("Hel", 5), piece("lo", 6), piece("", 1, finish="stop"), usage(), "[DONE]")
    events = list(connect(fake).stream(BlendPrompt(("Who?",)), SHORT))
    done = events[-1].generation
    assert [e.text for e in events] == ["Hel", "lo", ""]
    assert (done.text, done.token_ids, done.finish_reason, done.mode) == ("Hello", (5, 6), "stop", "blend")
    assert (done.usage.prompt_tokens, done.usage.reused_tokens, done.usage.completion_tokens) == (9, 6, 2)
    assert done.load_s == 0.25
    fake.handle = lambda _: stream(piece("He", 5, 6, finish="stop", stop="llo"), usage(), "[DONE]")
    assert connect(fake).generate(BlendPrompt(("Who?",)), SHORT).token_ids == (5, 6)


def test_an_answer_has_every_fact_that_the_server_reports(fake) -> None:
    outcome = replace(filled(), fingerprint=fake.model.fingerprint)
    fake.handle = lambda _: stream(piece("Hel", 5), piece("", 1, finish="stop"), usage(**outcome.to_params()), "[DONE]")
    done = connect(fake).generate(BlendPrompt(("Who?",)), SHORT)
    assert differing(done, replace(outcome, usage=replace(outcome.usage, completion_tokens=1))) == set()


def test_an_unreadable_report_raises_a_server_error(fake) -> None:
    fake.handle = lambda _: stream(piece("Hel", 5, finish="length"), usage(mood="good"), "[DONE]")
    with pytest.raises(ServerError, match=rf"malformed: mood.*{fake.url}"):
        connect(fake).generate(BlendPrompt(("Who?",)), SHORT)


def test_prompts_are_sent_as_token_ids_with_the_spans_of_their_chunks(fake) -> None:
    fake.handle = lambda _: stream(piece("x", 5, finish="length"), usage(), "[DONE]")
    engine = connect(fake)
    chunk = make_chunk("A text about the harbour.", engine.tokenizer)
    engine.generate(BlendPrompt(("Notes: ", chunk, " Who?")), SHORT, BlendSettings(ratio=0.3, check_layers=(1, 2)))
    sent = fake.requests[-1][2]
    (span,) = sent["cacheblend"]["spans"]
    assert (span["id"], span["text"]) == (chunk.id, chunk.text)
    assert tuple(sent["prompt"][span["start"] : span["end"]]) == chunk.token_ids
    assert (sent["cacheblend"]["ratio"], sent["cacheblend"]["check_layers"]) == (0.3, [1, 2])
    engine.generate("plain text", SHORT)
    assert fake.requests[-1][2]["prompt"] == "plain text"
    assert "spans" not in fake.requests[-1][2]["cacheblend"]
    engine.generate(f"{engine.tokenizer.bos_token}plain text", SHORT)
    assert fake.requests[-1][2]["prompt"] == "plain text"  # the server's tokenizer adds the BOS token by itself


@pytest.mark.parametrize(
    ("pieces", "match"),
    [
        ([piece("He", 5)], "broke off in the middle"),
        ([piece("He", 5), usage(), "[DONE]"], "ended the answer early"),
        ([piece("He", 5, finish="length"), "[DONE]"], "'length'"),
        ([piece("He", 5, finish="error"), usage(), "[DONE]"], "'error'"),
        ([piece("He", 5), {"error": {"message": "out of luck", "code": 500}}, "[DONE]"], "out of luck"),
        ([piece("He", 5, finish="stop"), usage(fingerprint="0" * 32), "[DONE]"], "now serves another model"),
    ],
)
def test_a_broken_answer_raises_an_error_and_is_never_a_short_answer(fake, pieces, match) -> None:
    fake.handle = lambda _: stream(*pieces, breaks=pieces[-1] != "[DONE]")
    events = connect(fake).stream(BlendPrompt(("Who?",)), SHORT)
    with pytest.raises(ServerError, match=match):
        for event in events:
            assert event.generation is None


async def test_a_broken_async_answer_raises_the_same_error(fake) -> None:
    fake.handle = lambda _: stream(piece("He", 5), breaks=True)
    with pytest.raises(ServerError, match="broke off in the middle"):
        await connect(fake).agenerate(BlendPrompt(("Who?",)), SHORT)


@pytest.mark.parametrize(
    ("status", "message", "kind", "match"),
    [
        (401, "no", ServerError, "CACHEBLEND_API_KEY"),
        (413, "too large for me", ServerError, "413: too large for me"),
        (422, "texts.0: empty", ServerError, "422: texts.0: empty"),
        (503, "overloaded", ServerError, "503: overloaded"),
        (400, "shorter, please", PromptTooLongError, "length: shorter"),
        (404, "No chunk has the id 'x'.", UnknownChunkError, "'x'"),
        (404, "No chunk has the id 'x'.", ServerError, "'x'"),
        (400, "something else", ServerError, "something else"),
    ],
)
def test_refusals_keep_their_status_and_message(fake, status, message, kind, match) -> None:
    param = "input_tokens" if kind is PromptTooLongError else None
    fake.handle = lambda _: refusal(status, message, kind.__name__, param)
    with pytest.raises(kind, match=match) as error:
        connect(fake).generate(BlendPrompt(("Who?",)), SHORT)
    assert getattr(error.value, "status", None) == (status if kind is ServerError else None)
    assert "refuses" in str(error.value) or kind is UnknownChunkError


def test_a_request_is_retried_after_a_server_error_but_not_after_a_refusal(fake) -> None:
    answers = [refusal(503, "busy"), stream(piece("x", 5, finish="length"), usage(), "[DONE]"), refusal(400, "bad")]
    fake.handle = lambda _: answers.pop(0)
    engine = connect(fake, max_retries=2)
    assert engine.generate(BlendPrompt(("Who?",)), SHORT).text == "x"
    with pytest.raises(ServerError, match="bad"):
        engine.generate(BlendPrompt(("Who?",)), SHORT)
    assert answers == []


def test_the_error_of_a_server_timeout_names_the_limit_and_the_option(fake) -> None:
    async def never(_: Any) -> Response:
        await asyncio.sleep(30)
        return Response()

    fake.handle = never
    with pytest.raises(ServerError, match=r"within 0\.2 s.*timeout_s"):
        connect(fake, timeout_s=0.2).generate(BlendPrompt(("Who?",)), SHORT)


def test_the_client_requests_unknown_references_from_the_server(fake) -> None:
    engine = connect(fake)
    chunk = make_chunk("A text about the harbour.", engine.tokenizer)
    known = {"id": "there", "text": chunk.text, "token_ids": list(chunk.token_ids), "metadata": {}}

    def handle(request: Any) -> Response:
        if request.method == "GET":
            name = request.url.path.rpartition("/")[2]
            return JSONResponse(known) if name == "there" else refusal(404, "No such chunk.", "UnknownChunkError")
        return stream(piece("x", 5, finish="length"), usage(), "[DONE]")

    fake.handle = handle
    engine.generate(BlendPrompt(("Notes: ", ChunkRef("there"))), SHORT)
    assert fake.requests[-1][2]["cacheblend"]["spans"][0]["id"] == "there"
    with pytest.raises(UnknownChunkError, match="No such chunk"):
        engine.generate(BlendPrompt((ChunkRef("nowhere"),)), SHORT)


def test_a_client_cannot_set_the_servers_ranking(fake) -> None:
    with connect(fake) as engine, pytest.raises(InputError, match=r"'now'.*server decides"):
        engine.ranking = "now"


def test_chunks_are_precomputed_in_batches_below_the_size_limit_and_reports_add_up(fake) -> None:
    def handle(request: Any) -> Response:
        sent = fake.requests[-1][2]["chunks"]
        failed = {sent[0]["id"]: "no room"}
        report = {
            "computed": len(sent) - 1,
            "present": 0,
            "tokens": 7,
            "seconds": 9.0,
            "failed": failed,
            "ranked": 1,
            "rank_s": 0.0,
        }
        return JSONResponse({"data": [], "report": report})

    fake.handle = handle
    engine = connect(fake)
    chunks = [make_chunk(f"Text number {i} of the harbour.", engine.tokenizer) for i in range(150)]
    seen: list[int] = []
    report = engine.precompute([*chunks, chunks[0]], seen.append)
    posts = [body["chunks"] for method, _, body in fake.requests if method == "POST"]
    assert [len(batch) for batch in posts] == [64, 64, 22]
    assert [c["id"] for batch in posts for c in batch] == [c.id for c in chunks]
    assert (report.computed, report.tokens, len(report.failed)) == (147, 21, 3)
    assert sum(seen) == 151
    assert engine.registry.get(chunks[-1].id) == chunks[-1]


def test_an_answer_has_the_leading_space_of_its_tokens(fake: FakeServer) -> None:
    """vLLM decodes an answer behind the prompt, where a word boundary becomes a space."""
    tokenizer = tokenizer_named("byte_level")
    ids = tokenizer("fine", add_special_tokens=False).input_ids
    spaced = tokenizer(" fine", add_special_tokens=False).input_ids
    with connect(fake) as engine:
        for tokens, want in ((ids, "fine"), (spaced, " fine")):
            answer = [piece(" fi", *tokens), piece("ne", finish="length"), usage(), "[DONE]"]
            fake.handle = lambda request, answer=answer: stream(*answer)
            events = list(engine.stream("Who?", SHORT))
            assert "".join(event.text for event in events) == want
            assert events[-1].generation is not None
            assert events[-1].generation.text == want


def test_the_client_sends_top_k_and_penalties(fake: FakeServer) -> None:
    fake.handle = lambda request: stream(piece("fine", 1, finish="length"), usage(), "[DONE]")
    with connect(fake) as engine:
        engine.generate("Who?", SamplingParams(8, top_k=5, presence_penalty=0.5, frequency_penalty=-1.0))
    body = fake.requests[-1][2]
    assert (body["top_k"], body["presence_penalty"], body["frequency_penalty"]) == (5, 0.5, -1.0)
    assert "repetition_detection" not in body


def test_an_answer_that_the_server_ends_for_repetition_has_the_finish_reason_stop(fake: FakeServer) -> None:
    fake.handle = lambda request: stream(piece("so and so", 1, finish="repetition"), usage(), "[DONE]")
    with connect(fake) as engine:
        done = engine.generate("Who?", SamplingParams(8, stop_repeating=True))
    assert (done.text, done.finish_reason, len(done.token_ids)) == ("so and so", "stop", 1)
    assert fake.requests[-1][2]["repetition_detection"]["min_count"] == 2


def test_a_pickled_engine_opens_a_new_connection_to_the_same_server(fake: FakeServer) -> None:
    with connect(fake, api_key="of mine") as engine, pickle.loads(pickle.dumps(engine)) as other:
        assert other is not engine
        assert other.fingerprint == engine.fingerprint
        assert copy.deepcopy(engine) is engine
        fake.handle = lambda request: stream(piece("fine", 1, finish="length"), usage(), "[DONE]")
        assert other.generate("Who?", SHORT).text == "fine"


def test_the_client_splits_long_ids_to_forget_over_short_requests(fake: FakeServer) -> None:
    def handle(request: Any) -> Response:
        sizes.append(len(request.url.query))
        return JSONResponse({"data": [{"id": name} for name in request.query_params.getlist("id")]})

    sizes: list[int] = []
    fake.handle = handle
    with connect(fake) as engine:
        assert engine.forget([f"{number} {'🙂' * 500}" for number in range(30)]) == 30
    assert max(sizes) < 40_000


def test_the_client_registers_and_forgets_chunks_in_its_holders_name(fake: FakeServer) -> None:
    def handle(request: Any) -> Response:
        report = {"computed": 1, "present": 0, "tokens": 3, "failed": {}, "ranked": 0, "rank_s": 0.0}
        held.append(request.query_params.get("holder"))
        return JSONResponse({"report": report, "data": []})

    held: list[str | None] = []
    fake.handle = handle
    for holder in ("the app", ""):
        with connect(fake, holder=holder) as engine:
            chunk = make_chunk("A text that another application has, too.", engine.tokenizer)
            engine.precompute([chunk])
            assert fake.requests[-1][2].get("holder", "") == holder
            assert engine.forget([chunk]) == 0
            assert held[-1] == holder
            assert pickle.loads(pickle.dumps(engine))._holder == holder


def test_a_client_keeps_no_reference_to_an_ended_event_loop(fake) -> None:
    """Each event loop has separate connections; a program without a loop starts a loop for each call."""
    fake.handle = lambda _: stream(piece("x", 5, finish="length"), usage(), "[DONE]")
    engine = connect(fake)

    async def ask() -> Any:
        await engine.agenerate(BlendPrompt(("Who?",)), SHORT)
        await engine.agenerate(BlendPrompt(("Where?",)), SHORT)
        return weakref.ref(asyncio.get_running_loop())

    ended = [asyncio.run(ask()) for _ in range(2)]
    gc.collect()
    assert [loop() for loop in ended] == [None, None]
