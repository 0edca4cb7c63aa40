"""Says what every engine must do. An engine's test module subclasses `EngineContract` and says how to make one."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cacheblend_lab.scoring import can_score, score

from cacheblend_rag.blending.profile import ModelProfile
from cacheblend_rag.blending.settings import BlendSettings
from cacheblend_rag.engines.base import BlendEngine
from cacheblend_rag.engines.sampling import SamplingParams, repeats
from cacheblend_rag.errors import InputError, PromptTooLongError, UnknownChunkError
from cacheblend_rag.prompts.chunk import Chunk, make_chunk
from cacheblend_rag.prompts.prompt import BlendPrompt, ChunkRef, rag_prompt
from cacheblend_rag.store import open_store

TEXTS = [
    "The Marlow observatory was founded in 1911. It stands on a hill above the harbour.",
    "Its director is Ada Brenmoor, who came from the company.\n\nNothing else to report.",
    "Ships' logs: wind north-west, sea calm; we passed the lighthouse at dawn.",
    "Who runs the company now? The founder's daughter.",
]
SHORT = SamplingParams(max_tokens=12)
FULL = BlendSettings(quality="full")


def _skip_without_scoring(engine: BlendEngine) -> None:
    if not can_score(engine):
        pytest.skip("this engine refuses to score")


def _tenant(engine: BlendEngine, name: str) -> BlendEngine:
    try:
        return engine.within(name)
    except InputError as refusal:
        assert "api_key" in str(refusal)
        pytest.skip("on a server the key says which tenant: tests/server/test_tenant_server.py")


class EngineContract:
    """Subclass and override :meth:`make`; every engine gets the same model and tokenizer."""

    def make(self, store: Any, **options: Any) -> BlendEngine:
        raise NotImplementedError

    def make_with_budget(self, nbytes: int) -> BlendEngine:
        """An engine whose store holds no more than ``nbytes``."""
        return self.make(open_store(None, ram_budget=nbytes))

    @pytest.fixture
    def reopened(self, engine: BlendEngine, tmp_path: Path) -> Callable[[], BlendEngine]:
        """Make the engine read from disk what it may hold in RAM."""

        def reopen() -> BlendEngine:
            engine.close()
            return self.make(tmp_path / "store")

        return reopen

    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        """The directory of the engine's store."""
        return tmp_path / "store"

    @pytest.fixture
    def engine(self, tmp_path: Path) -> Iterator[BlendEngine]:
        with self.make(tmp_path / "store") as engine:
            yield engine

    @pytest.fixture
    def chunks(self, engine: BlendEngine) -> list[Chunk]:
        return [make_chunk(text, engine.tokenizer) for text in TEXTS]

    @pytest.fixture
    def prompt(self, engine: BlendEngine, chunks: list[Chunk]) -> BlendPrompt:
        return rag_prompt(engine.tokenizer, chunks, "Who runs the observatory?")

    def test_ratio_1_gives_the_answer_of_the_full_prefill(self, engine, chunks, prompt) -> None:
        want = engine.generate(prompt, SHORT)
        assert (want.mode, want.usage.reused_tokens, want.calibrated) == ("prefill", 0, False)
        engine.precompute(chunks)
        got = engine.generate(prompt, SHORT, BlendSettings(ratio=1.0))
        assert got.mode == "blend"
        assert (got.token_ids, got.text) == (want.token_ids, want.text)

    def test_usage_adds_up_and_says_what_was_reused(self, engine, chunks, prompt) -> None:
        engine.precompute(chunks)
        stale = sum(len(c.token_ids) for c in chunks[1:])
        for ratio in (0.0, 0.25, 1.0):
            usage = engine.generate(prompt, SHORT, BlendSettings(ratio=ratio)).usage
            assert usage.recomputed_tokens == round(ratio * stale)
            assert usage.prompt_tokens == usage.reused_tokens + usage.computed_tokens
            question = usage.prompt_tokens - stale - len(chunks[0].token_ids) - len(engine.header_ids)
            assert usage.computed_tokens == question + usage.recomputed_tokens

    def test_usage_says_what_the_selection_cost(self, engine, chunks, prompt) -> None:
        engine.precompute(chunks)
        spans = engine.tokenize(prompt).spans
        dense = spans[-1].end - spans[1].start  # the first is exact, and text in front of the second runs once
        for ratio, policy, tokens in (
            (0.25, "hkvd", dense / engine.num_layers),
            (0.25, "random", 0.0),
            (0.0, "hkvd", 0.0),
            (1.0, "hkvd", 0.0),
        ):
            settings = BlendSettings(ratio=ratio, policy=policy, check_layers=(1,))
            usage = engine.generate(prompt, SHORT, settings).usage
            assert usage.selection_tokens == pytest.approx(tokens)

    def test_reuse_can_be_limited_to_the_prefix_or_switched_off(self, engine, chunks, prompt) -> None:
        engine.precompute(chunks)
        full, prefix = (
            engine.generate(prompt, SHORT, FULL),
            engine.generate(prompt, SHORT, BlendSettings(quality="exact")),
        )
        assert (full.mode, full.usage.reused_tokens) == ("prefill", 0)
        assert prefix.usage.reused_tokens == len(engine.header_ids) + len(chunks[0].token_ids)
        assert prefix.token_ids == full.token_ids

    def test_tenants_share_the_model_and_neither_chunks_nor_kv(self, engine, chunks, prompt) -> None:
        acme, globex = (_tenant(engine, name) for name in ("acme", "globex"))
        assert engine.within("acme") is acme is globex.within("acme")
        assert acme.within("default") is engine
        want = acme.precompute(chunks)
        assert (want.computed, want.present) == (len(chunks), 0)
        full, blended = acme.generate(prompt, SHORT, FULL), acme.generate(prompt, SHORT, BlendSettings(ratio=1.0))
        assert (blended.mode, blended.token_ids) == ("blend", full.token_ids)
        text = "\n\n".join(chunk.text for chunk in chunks)
        for other in (engine, globex):
            assert len(other.registry) == 0
            assert other.generate(text, SHORT).reason == "no known chunk in the prompt"
            with pytest.raises(UnknownChunkError):
                other.generate(BlendPrompt((ChunkRef(chunks[0].id), "Who?")), SHORT)
            assert not any(other.entries.contains(chunk.token_ids) for chunk in chunks)
        assert globex.precompute(chunks).computed == len(chunks)
        globex.forget(chunks)
        globex.close()
        again = acme.generate(prompt, SHORT, BlendSettings(ratio=0.0))
        assert (again.mode, again.missing) == ("blend", ())
        assert acme.forget(chunks) == len(chunks)

    def test_chunks_that_a_tenants_prompt_brings_are_written_back_for_it_alone(self, engine, prompt) -> None:
        acme, globex = (_tenant(engine, name) for name in ("acme", "globex"))
        for tenant in (acme, globex):
            assert tenant.generate(prompt, SHORT).mode == "prefill"
            tenant.flush()
            assert tenant.generate(prompt, SHORT, BlendSettings(ratio=0.5)).missing == ()
            tenant.forget(list(tenant.registry))

    @pytest.mark.parametrize("name", ["", "Acme", "a:b", "../a"])
    def test_an_invalid_tenant_name_is_refused(self, engine, name: str) -> None:
        with pytest.raises(InputError, match="cannot name a tenant"):
            engine.within(name)

    @pytest.mark.parametrize("layers", [(99,), (1, 99), (10**30,)])
    def test_a_check_layer_beyond_the_model_is_refused_by_name(self, engine, prompt, layers) -> None:
        with pytest.raises(InputError, match=str(layers[-1])):
            engine.generate(prompt, SHORT, BlendSettings(check_layers=layers))

    def test_a_tokenised_prompt_is_taken_as_it_is(self, engine, chunks, prompt) -> None:
        engine.precompute(chunks)
        tokens = engine.tokenize(prompt)
        assert [span.chunk.id for span in tokens.spans] == [chunk.id for chunk in chunks]
        assert engine.tokenize(tokens) is tokens
        assert engine.generate(tokens, SHORT).token_ids == engine.generate(prompt, SHORT).token_ids

    def test_a_request_is_taken_as_it_is_and_leaves_no_room_for_other_options(self, engine, chunks, prompt) -> None:
        engine.precompute(chunks)
        blend = BlendSettings(ratio=0.3)
        request = engine.request(prompt, SHORT, blend)
        assert engine.request(request) is request
        want = engine.generate(prompt, SHORT, blend)
        assert engine.generate(request).token_ids == want.token_ids
        assert asyncio.run(engine.agenerate(request)).token_ids == want.token_ids
        for more in ({"sampling": SHORT}, {"settings": blend}):
            with pytest.raises(InputError, match="Request alone"):
                engine.generate(request, **more)
        long = replace(request, sampling=SamplingParams(max_tokens=10**6))
        with pytest.raises(PromptTooLongError):
            engine.generate(long)

    def test_it_says_how_its_model_is_blended(self, engine) -> None:
        assert engine.gate.passed, engine.gate.reason
        assert engine.num_layers > max(engine.profile.check_layers)
        assert 0 <= engine.profile.ratio <= 1

    def test_precompute_skips_what_is_stored_and_reports_progress(self, engine, chunks) -> None:
        seen: list[int] = []
        first = engine.precompute([*chunks, chunks[0]], seen.append)
        assert (first.computed, first.present, first.failed) == (len(chunks), 0, {})
        assert sum(seen) == len(chunks) + 1
        again = engine.precompute(chunks)
        assert (again.computed, again.present) == (0, len(chunks))

    def test_missing_chunks_are_written_back_after_the_answer(self, engine, chunks, prompt) -> None:
        engine.precompute(chunks[:1])
        first = engine.generate(prompt, SHORT)
        assert set(first.missing) == {c.id for c in chunks[1:]}
        engine.flush()
        second = engine.generate(prompt, SHORT)
        assert second.missing == ()
        assert engine.precompute(chunks).computed == 0

    def test_a_model_trained_for_chunks_by_themselves_stores_what_a_prompt_misses_before_it_computes_it(
        self, engine, prompt, monkeypatch
    ) -> None:
        monkeypatch.setattr(engine, "profile", ModelProfile(ratio=0.0, blockwise=True, origin="declared"))
        answers = [engine.generate(prompt, SHORT) for _ in range(2)]
        assert {(each.mode, each.missing, each.usage.recomputed_tokens) for each in answers} == {("blend", (), 0)}
        assert answers[0].token_ids == answers[1].token_ids
        engine.reset_prefix_cache()
        assert engine.generate(prompt, SHORT).token_ids == answers[0].token_ids

    def test_once_its_chunks_are_ready_a_prompt_has_one_answer_and_before_that_answers_say_so(
        self, engine, chunks, prompt, monkeypatch
    ) -> None:
        if lazy := engine.ranking != "off":  # a server decides that itself
            monkeypatch.setattr(engine, "ranking", "lazy")
        for settings in (BlendSettings(ratio=0.3, policy="hkvd"), BlendSettings(ratio=0.3, policy="static")):
            answers = []
            for _ in range(4):
                answers.append(engine.generate(prompt, SHORT, settings))
                engine.flush()
            first, *rest = answers
            assert first.missing or first.lacking("static") or not (lazy or settings.policy == "hkvd")
            assert {(each.missing, each.lacking("static"), each.in_place) for each in rest} == {((), (), ())}
            assert len({each.token_ids for each in rest}) == 1
            engine.reset_prefix_cache()
            assert engine.generate(prompt, SHORT, settings).token_ids == rest[0].token_ids

    def test_stream_gives_the_same_text_piece_by_piece(self, engine, chunks, prompt) -> None:
        engine.precompute(chunks)
        whole = engine.generate(prompt, SHORT)
        events = list(engine.stream(prompt, SHORT))
        assert "".join(e.text for e in events) == whole.text == events[-1].generation.text
        assert [e.generation is not None for e in events] == [False] * (len(events) - 1) + [True]
        assert 0 < events[-1].generation.timings.ttft_s <= events[-1].generation.timings.total_s

    def test_a_closed_stream_leaves_the_engine_usable(self, engine, chunks, prompt) -> None:
        engine.precompute(chunks)
        want = engine.generate(prompt, SHORT)
        stream = engine.stream(prompt, SHORT)
        next(stream)
        stream.close()
        assert engine.generate(prompt, SHORT).token_ids == want.token_ids

    async def test_async_twins_agree_and_leave_the_event_loop_free(self, engine, chunks, prompt) -> None:
        report = engine.precompute(chunks)
        assert report.computed == len(chunks)
        want = engine.generate(prompt, SHORT)
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        ticker = asyncio.create_task(tick())
        got = await engine.agenerate(prompt, SHORT)
        events = [event async for event in engine.astream(prompt, SHORT)]
        ticker.cancel()
        assert ticks > 1
        assert got.token_ids == want.token_ids == events[-1].generation.token_ids
        assert "".join(e.text for e in events) == want.text

    async def test_errors_reach_the_async_consumer(self, engine) -> None:
        with pytest.raises(UnknownChunkError):
            async for _ in engine.astream(BlendPrompt((ChunkRef("nowhere"),)), SHORT):
                pass

    def test_stop_strings_end_the_answer_and_are_not_part_of_it(self, engine, chunks, prompt) -> None:
        engine.precompute(chunks)
        text = engine.generate(prompt, SHORT).text
        assert len(text) > 4
        for stop in (text[2:4], text[1]):
            got = engine.generate(prompt, SamplingParams(max_tokens=12, stop=("never appears", stop)))
            assert got.finish_reason == "stop"
            assert got.text == text[: text.index(stop)]
            events = list(engine.stream(prompt, SamplingParams(max_tokens=12, stop=(stop,))))
            assert "".join(e.text for e in events) == got.text

    def test_an_answer_that_repeats_itself_can_be_ended(self, engine, chunks, prompt) -> None:
        engine.precompute(chunks)
        long = SamplingParams(max_tokens=100, frequency_penalty=-2.0)  # what it has said it says again
        whole = engine.generate(prompt, long).token_ids
        end = next(count for count in range(len(whole)) if repeats(whole[:count]))
        got = engine.generate(prompt, replace(long, stop_repeating=True))
        assert (got.token_ids, got.finish_reason) == (whole[:end], "stop")

    def test_answers_end_at_the_tokenizers_end_token_though_no_config_names_one(self, engine, prompt) -> None:
        end = engine.tokenizer.eos_token_id
        assert end is not None
        for seed in range(16):  # so hot that any token comes up soon
            got = engine.generate(prompt, SamplingParams(max_tokens=200, temperature=2.0, seed=seed))
            assert end not in got.token_ids
            if got.finish_reason == "stop":
                return
        raise AssertionError("No answer has ended before its 200 tokens.")

    def test_sampling_is_repeatable_by_seed_and_differs_without_it(self, engine, chunks, prompt) -> None:
        engine.precompute(chunks)
        hot = [SamplingParams(max_tokens=12, temperature=2.0, seed=seed) for seed in (1, 1, 2)]
        one, same, other = (engine.generate(prompt, p).token_ids for p in hot)
        assert one == same != other
        nucleus = SamplingParams(max_tokens=12, temperature=2.0, top_p=1e-6, seed=3)
        assert engine.generate(prompt, nucleus).token_ids == engine.generate(prompt, SHORT).token_ids

    def test_logprobs_are_the_models_own_whatever_the_sampling(self, engine, chunks, prompt) -> None:
        full = engine.generate(prompt, SamplingParams(max_tokens=12, logprobs=3), FULL)
        engine.precompute(chunks)
        got = engine.generate(prompt, SamplingParams(max_tokens=12, logprobs=3), BlendSettings(ratio=1.0))
        assert [p.token_id for p in got.logprobs] == list(got.token_ids) == [p.top[0][0] for p in got.logprobs]
        for mine, theirs in zip(got.logprobs, full.logprobs, strict=True):
            assert mine.logprob == mine.top[0][1] > mine.top[1][1] >= mine.top[2][1]
            assert dict(mine.top) == pytest.approx(dict(theirs.top), abs=1e-4)
        hot = SamplingParams(max_tokens=12, temperature=2.0, seed=1, logprobs=0)
        drawn = engine.generate(prompt, hot, FULL)
        assert [p.token_id for p in drawn.logprobs] == list(drawn.token_ids)
        assert all(p.top == () for p in drawn.logprobs)
        assert drawn.logprobs[0].logprob <= full.logprobs[0].logprob
        assert engine.generate(prompt, SHORT).logprobs == ()
        with pytest.raises(InputError, match="logprobs is 21"):
            SamplingParams(logprobs=21)

    def test_guided_decoding_follows_a_json_schema(self, engine) -> None:
        if not engine.supports_json_schema:
            pytest.skip("llguidance is not installed")
        schema = {
            "type": "object",
            "properties": {"kind": {"enum": ["ship", "company"]}, "known": {"type": "boolean"}},
            "required": ["kind", "known"],
            "additionalProperties": False,
        }
        for wanted in (schema, json.dumps(schema)):
            hot = SamplingParams(max_tokens=200, temperature=1.0, seed=1, json_schema=wanted)
            answer = engine.generate("Is it so?", hot)
            said = json.loads(answer.text)
            assert answer.finish_reason == "stop"
            assert (said["kind"] in ("ship", "company"), type(said["known"]), len(said)) == (True, bool, 2)
            assert engine.generate("Is it so?", hot).text == answer.text
        with pytest.raises(InputError, match="JSON"):
            engine.generate("Is it so?", SamplingParams(max_tokens=4, json_schema="{no json"))

    def test_an_engine_that_cannot_score_says_which_can(self, engine, prompt) -> None:
        if can_score(engine):
            assert len(score(engine, prompt, [[5], [6]])) == 2
        else:
            with pytest.raises(InputError, match="TransformersEngine"):
                score(engine, prompt, [[5]])

    def test_scores_of_completions_are_those_the_model_gives_its_own_answer(self, engine, chunks, prompt) -> None:
        """Whatever is reused: the answer's tokens are as likely when they are given as when they are generated."""
        _skip_without_scoring(engine)
        for settings in (FULL, BlendSettings(ratio=1.0), BlendSettings(ratio=0.3), BlendSettings(ratio=0.0)):
            made = engine.generate(prompt, SamplingParams(max_tokens=6, logprobs=0), settings)
            other = [*reversed(made.token_ids)]
            got = score(engine, prompt, [made.token_ids, other, made.token_ids[:1]], settings)
            assert got[0].token_logprobs == pytest.approx([each.logprob for each in made.logprobs], abs=1e-4)
            assert got[0].logprob == pytest.approx(sum(got[0].token_logprobs))
            assert len(got[1].token_logprobs) == len(other)
            assert got[2].token_logprobs == pytest.approx(got[0].token_logprobs[:1], abs=1e-4)
            engine.precompute(chunks)

    def test_scores_over_header_and_one_stored_chunk_are_exact(self, engine, chunks) -> None:
        _skip_without_scoring(engine)
        engine.precompute(chunks)
        answers = [[5, 6, 7, 8], [9], [7, 7]]
        for chunk in chunks:
            alone = rag_prompt(engine.tokenizer, [chunk], "Who runs the observatory?")
            assert engine.generate(alone, SHORT).usage.reused_tokens == len(engine.header_ids) + len(chunk.token_ids)
            want = [each.token_logprobs for each in score(engine, alone, answers, FULL)]
            for got, expected in zip(score(engine, alone, answers), want, strict=True):
                assert got.token_logprobs == pytest.approx(expected, abs=1e-4)

    @pytest.mark.parametrize("policy,ratio", [("hkvd", 0.0), ("hkvd", 0.3), ("query", 0.3), ("hkvd", 1.0)])
    def test_a_prompt_that_ends_with_a_chunk_is_scored_as_it_is_answered(self, engine, chunks, policy, ratio) -> None:
        _skip_without_scoring(engine)
        engine.precompute(chunks)
        whole, settings = engine.tokenize(BlendPrompt(("Notes.\n\n", *chunks[:2]))), BlendSettings(ratio, policy)
        prompt = replace(whole, token_ids=whole.token_ids[: whole.spans[-1].end])
        made = engine.generate(prompt, SamplingParams(max_tokens=4, logprobs=0), settings)
        assert made.mode == "blend"
        got = score(engine, prompt, [made.token_ids, made.token_ids[:1]], settings)
        assert got[0].token_logprobs == pytest.approx([each.logprob for each in made.logprobs], abs=1e-4)
        assert got[1].token_logprobs == pytest.approx(got[0].token_logprobs[:1], abs=1e-4)

    def test_what_cannot_be_scored_is_refused(self, engine, prompt) -> None:
        _skip_without_scoring(engine)
        with pytest.raises(InputError, match="Completion 1 has no tokens"):
            score(engine, prompt, [[5], []])
        with pytest.raises(InputError, match="no completions"):
            score(engine, prompt, [])
        with pytest.raises(PromptTooLongError):
            score(engine, prompt, [[5] * engine.context_window])

    def test_references_are_resolved_and_unknown_ones_refused(self, engine, chunks, prompt) -> None:
        engine.precompute(chunks)
        by_id = BlendPrompt(tuple(ChunkRef(s.id) if isinstance(s, Chunk) else s for s in prompt.segments))
        assert engine.generate(by_id, SHORT).token_ids == engine.generate(prompt, SHORT).token_ids
        with pytest.raises(UnknownChunkError, match="nowhere"):
            engine.generate(BlendPrompt(("text", ChunkRef("nowhere"))), SHORT)

    def test_registered_chunks_are_found_in_plain_text(self, engine, chunks) -> None:
        engine.precompute(chunks)
        text = "Some notes.\n\n" + "\n\n".join(TEXTS[1:3]) + "\n\nAnswer:"
        answer = engine.generate(text, SHORT, BlendSettings(ratio=0.0))
        assert answer.mode == "blend"
        assert answer.usage.reused_tokens == sum(len(c.token_ids) for c in chunks[1:3])
        plain = engine.generate("No chunk in here at all.", SHORT)
        assert plain.mode == "prefill"
        assert "no known chunk" in plain.reason

    def test_a_prompt_beyond_the_context_window_is_refused_with_its_length(self, engine, prompt) -> None:
        with pytest.raises(PromptTooLongError, match=str(engine.context_window)):
            engine.generate(prompt, SamplingParams(max_tokens=engine.context_window))
        with pytest.raises(InputError):
            engine.generate(BlendPrompt(()), SHORT)
        with pytest.raises(InputError, match="policy"):
            engine.generate(prompt, SHORT, BlendSettings(policy="no such"))

    def test_a_damaged_entry_is_a_miss_and_is_replaced(self, engine, chunks, prompt, reopened, root) -> None:
        engine.precompute(chunks)
        want = engine.generate(prompt, SHORT, FULL).token_ids
        files = sorted((root / "kv").rglob("*.safetensors"))
        assert len(files) == len(chunks) + 1
        for file in files[::2]:
            data = bytearray(file.read_bytes())
            data[-5] ^= 1  # the last layer: found out in the middle of a blend
            file.write_bytes(data)
        with reopened() as engine:
            answer = engine.generate(prompt, SHORT, BlendSettings(ratio=1.0))
            assert answer.token_ids == want
            engine.generate(prompt, SHORT, BlendSettings(ratio=0.3))
            engine.flush()
            engine.precompute(chunks)
        with open_store(root) as store:
            assert store.verify().damaged == ()
            assert store.stats().entries == len(chunks) + 1

    def test_requests_from_several_threads_do_not_mix(self, engine, chunks) -> None:
        engine.precompute(chunks)
        prompts = [rag_prompt(engine.tokenizer, chunks[i:] + chunks[:i], f"Question {i}?") for i in range(4)]
        want = [engine.generate(p, SHORT, BlendSettings(ratio=0.3)).token_ids for p in prompts]
        got: dict[int, Any] = {}

        def run(index: int) -> None:
            got[index] = engine.generate(prompts[index % 4], SHORT, BlendSettings(ratio=0.3)).token_ids

        threads = [threading.Thread(target=run, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [got[i] for i in range(8)] == want * 2

    def test_chunks_that_do_not_fit_the_budget_are_reported_and_still_answered(self, tmp_path: Path) -> None:
        with self.make_with_budget(1000) as engine:
            chunks = [make_chunk(text, engine.tokenizer) for text in TEXTS]
            report = engine.precompute(chunks)
            assert set(report.failed) == {c.id for c in chunks}
            assert report.computed == 0
            prompt = rag_prompt(engine.tokenizer, chunks, "Who?")
            assert engine.generate(prompt, SHORT).token_ids == engine.generate(prompt, SHORT, FULL).token_ids
