"""Tests which KV the transformers engine's prefix cache holds, for whom, and that it equals an independent reference."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from hypothesis import given
from hypothesis import strategies as st

from cacheblend_rag.blending.plan import Origin
from cacheblend_rag.blending.settings import BlendSettings
from cacheblend_rag.engines.entries import _key_of
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.engines.transformers.cache import PositionedCache
from cacheblend_rag.engines.transformers.prefixes import PrefixCache, PromptKey
from cacheblend_rag.errors import InputError
from cacheblend_rag.prompts.chunk import make_chunk
from cacheblend_rag.prompts.prompt import DEFAULT_INSTRUCTION, TokenizedPrompt, chat_prompt
from cacheblend_rag.store.kv import LayerKV
from tests.blending.families import _BASE, make_model
from tests.blending.reference import Part, blend
from tests.blending.writers import write_writer
from tests.conftest import tokenizer_named
from tests.engines.contract_conversation import NOTES

pytestmark = pytest.mark.usefixtures("gate_once")
RATIO = 0.3
SINK = BlendSettings(ratio=RATIO, policy="sink")
_CONFIG = {**_BASE, "vocab_size": 448, "eos_token_id": None, "max_position_embeddings": 1024}


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model(hf.LlamaConfig(**_CONFIG))


def engine_of(model: Any, **options: Any) -> TransformersEngine:
    engine = TransformersEngine(model, tokenizer=tokenizer_named("byte_level"), device="cpu", **options)
    engine.precompute([make_chunk(note, engine.tokenizer) for note in NOTES])
    return engine


@pytest.fixture
def engine(model: Any) -> TransformersEngine:
    return engine_of(model)


def asked(engine: TransformersEngine, turns: int, subject: str = "it") -> TokenizedPrompt:
    """Return the prompt of the last of ``turns`` questions over two notes each; every answer is the same."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": DEFAULT_INSTRUCTION}]
    for turn in range(turns):
        notes = "\n\n".join(NOTES[2 * turn : 2 * turn + 2])
        messages.append({"role": "user", "content": f"{notes}\n\nQuestion: who runs {subject}?"})
        messages.append({"role": "assistant", "content": "Ada Brenmoor."})
    return engine.tokenize(chat_prompt(engine.tokenizer, messages[:-1], engine.registry))


def kept(engine: Any, turns: int, settings: BlendSettings = SINK, subject: str = "it") -> int:
    prompt = asked(engine, turns, subject)
    return engine.generate(prompt, SamplingParams(max_tokens=1), settings).usage.kept_tokens


def test_blended_kv_of_a_conversation_is_not_stored_as_the_models_own_kv(model: Any, tmp_path: Path) -> None:
    """The first chunk is blended because the header's KV is missing; the conversation continues from that blend."""
    write_writer(tmp_path, hf.LlamaConfig(**_CONFIG))
    engine = engine_of(model, writer=tmp_path)
    first, own = make_chunk(NOTES[0], engine.tokenizer), engine.entries.by(None)
    engine.store.delete(own.own_key(()))
    assert kept(engine, 1) == 0
    engine.precompute([make_chunk("Something else.", engine.tokenizer)])  # stores the header, too
    assert kept(engine, 2) > 0
    assert not own.contains(first.token_ids)
    engine.reset_prefix_cache()
    assert kept(engine, 2) == 0
    assert own.contains(first.token_ids)


def parts(engine: TransformersEngine, prompt: TokenizedPrompt) -> list[Part]:
    """Return the prompt for the reference; the first chunk is exact, because it was computed behind the same header."""
    found, at = [], 0
    for number, span in enumerate(prompt.spans):
        found.append(Part(list(prompt.token_ids[at : span.start]), "text"))
        found.append(Part(list(prompt.token_ids[span.start : span.end]), "stale" if number else "exact"))
        at = span.end
    assert prompt.spans[0].start == len(engine.header_ids)
    return [*found, Part(list(prompt.token_ids[at:]), "text")]


def first_tokens(spans: Sequence[Any]) -> list[int]:
    """Return the positions that the policy `sink` recomputes in the chunks of one turn."""
    each = round(round(RATIO * sum(span.end - span.start for span in spans)) / len(spans))
    return [at for span in spans for at in range(span.start, min(span.start + each, span.end))]


def test_each_turns_answer_equals_the_reference_that_blends_turn_after_turn(engine: TransformersEngine) -> None:
    seen: list[torch.Tensor] = []
    engine.on_first_logits = seen.append
    chosen: list[int] = []
    for turn in range(1, 4):
        prompt = asked(engine, turn)
        usage = engine.generate(prompt, SamplingParams(max_tokens=3), SINK).usage
        assert (usage.kept_tokens > 0) == (turn > 1)
        chosen += first_tokens(prompt.spans[1:2] if turn == 1 else prompt.spans[2 * turn - 2 :])
        want = blend(engine.runner.model, list(engine.header_ids), parts(engine, prompt), RATIO, chosen=chosen)
        assert torch.allclose(seen[-1], want.logits, atol=1e-4)


def test_a_repeated_prompt_computes_its_last_token_only(engine: TransformersEngine) -> None:
    assert [kept(engine, 1), kept(engine, 1)] == [0, len(asked(engine, 1).token_ids) - 1]


def test_a_second_question_about_the_same_chunks_continues_from_their_blend(engine: TransformersEngine) -> None:
    seen: list[torch.Tensor] = []
    engine.on_first_logits = seen.append
    kept(engine, 1)
    prompt = asked(engine, 1, subject="all of it")
    assert kept(engine, 1, subject="all of it") >= prompt.spans[-1].end
    want = blend(
        engine.runner.model,
        list(engine.header_ids),
        parts(engine, prompt),
        RATIO,
        chosen=first_tokens(prompt.spans[1:2]),
    )
    assert torch.allclose(seen[-1], want.logits, atol=1e-4)


def test_text_in_front_of_the_first_chunk_is_computed_once_for_all_prompts(engine: TransformersEngine) -> None:
    system = "You are the archivist of the northern coast and answer in one short sentence."

    def of(note: str, settings: BlendSettings) -> Any:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": f"{note}\n\nWho runs it?"}]
        prompt = engine.tokenize(chat_prompt(engine.tokenizer, messages, engine.registry))
        return prompt, engine.generate(prompt, SamplingParams(max_tokens=1), settings).usage.kept_tokens

    prompt, first = of(NOTES[0], BlendSettings(ratio=RATIO, policy="query"))
    front = prompt.spans[0].start
    assert front > 16
    assert first == 0
    for note, settings in (
        (NOTES[1], BlendSettings(ratio=RATIO, policy="static")),
        (NOTES[2], BlendSettings(quality="exact")),
    ):
        _, again = of(note, settings)
        assert front <= again <= front + 2, "and what chunks have in common at their beginning, where it is exact"


def test_exact_quality_reuses_chunks_behind_any_text_and_has_the_answer_of_a_full_prefill(
    engine: TransformersEngine,
) -> None:
    def of(question: str, quality: Any) -> Any:
        text = f"Read all of this before you answer.\n\n{NOTES[0]}\n\n{NOTES[1]}\n\n{question}"
        return engine.generate(text, SamplingParams(max_tokens=6, logprobs=4), BlendSettings(quality=quality))

    of("Who runs the first?", "exact")
    full, exact = of("When was the second founded?", "full"), of("When was the second founded?", "exact")
    assert exact.usage.kept_tokens > 40
    assert exact.mode == "prefill"
    assert exact.token_ids == full.token_ids
    for mine, theirs in zip(exact.logprobs, full.logprobs, strict=True):
        assert dict(mine.top) == pytest.approx(dict(theirs.top), abs=1e-3)


@pytest.mark.parametrize("policy", ["query", "static-query", "hybrid"])
def test_a_policy_that_selects_by_the_question_reuses_no_turn_for_another_question(model: Any, policy: str) -> None:
    engine = engine_of(model, ranking="now")
    settings = BlendSettings(ratio=RATIO, policy=policy, check_layers=(1,))
    assert kept(engine, 1, settings) == 0
    assert kept(engine, 2, settings, subject="all of it") == 0
    assert kept(engine, 2, settings) > 0


def test_plain_texts_share_the_kv_of_their_common_beginning(engine: Any) -> None:
    def of(text: str) -> int:
        return engine.generate(text, SamplingParams(max_tokens=2), SINK).usage.kept_tokens

    first = "Human: Who has the keys of the observatory on the hill above the harbour?\nAI:"
    longer = f"{first} Ada.\nHuman: Who else?\nAI:"
    assert of(first) == 0
    assert of(longer) >= len(engine.tokenize(first).token_ids) - 1
    assert of("Human: Who has the keys of the observatory on the hill above the town?\nAI:") >= 16
    assert of("Humans: who?") == 0


def test_a_full_prefill_neither_reuses_nor_caches_a_conversation(engine: TransformersEngine) -> None:
    off = BlendSettings(quality="full")
    assert [kept(engine, 1, off), kept(engine, 2, off), kept(engine, 2)] == [0, 0, 0]
    assert kept(engine, 3) > 0
    assert kept(engine, 3, off) == 0


def test_the_prefix_cache_keeps_its_budget_and_evicts_the_least_recent_prompt(model: Any) -> None:
    texts = [f"{name * 3} is a word, and nobody has ever said more about it than that." for name in "abc"]

    def of(engine: TransformersEngine, text: str) -> int:
        return engine.generate(text, SamplingParams(max_tokens=1), SINK).usage.kept_tokens

    with engine_of(model) as engine:
        of(engine, texts[0])
        nbytes = engine.prefixes.nbytes
    with engine_of(model, prefix_cache=int(2.5 * nbytes)) as engine:
        assert [of(engine, text) for text in (*texts, texts[0])] == [0] * 4
        assert of(engine, texts[2]) > 0, "used since"
        assert of(engine, texts[1]) == 0
        assert of(engine, texts[2]) > 0, "and so it stays"
    with engine_of(model, prefix_cache=0) as engine:
        assert [of(engine, texts[0]), of(engine, texts[0])] == [0, 0]
    with pytest.raises(InputError, match="'much' is not a size"):
        engine_of(model, prefix_cache="much")


def test_prompts_share_the_memory_of_their_common_prefix(engine: TransformersEngine) -> None:
    each = []
    for turn in range(1, 4):
        kept(engine, turn)
        each.append(engine.prefixes.nbytes)
    tokens = len(asked(engine, 3).token_ids)
    assert each[0] < each[1] < each[2] <= (tokens + 8) * each[0] / len(asked(engine, 1).token_ids)


def test_forgetting_a_chunk_and_a_reset_empty_the_prefix_cache(engine: TransformersEngine) -> None:
    kept(engine, 1)
    engine.forget([make_chunk(NOTES[0], engine.tokenizer)])
    assert kept(engine, 2) == 0
    engine.reset_prefix_cache()
    assert kept(engine, 3) == 0
    assert kept(engine, 4) > 0


def filled(said: PromptKey) -> PositionedCache:
    """Return a cache whose KV at each slot is a hash of all labels up to it."""
    cache, seen = PositionedCache(1, len(said.token_ids) or 1), hash(())
    values = []
    for label in said.labels:
        seen = hash((seen, label)) % (1 << 52)
        values.append(float(seen))
    told = torch.tensor(values, dtype=torch.float64)[None, :, None]
    cache.extend([LayerKV(told, -told)], len(values))
    return cache


# Most lists share a long beginning, so that they differ late.
_ALIKE = st.builds(lambda same, own: [0] * same + own, st.integers(0, 40), st.lists(st.integers(0, 1), max_size=24))
_ORIGINS = st.lists(st.tuples(st.integers(0, 50), st.sampled_from("ab")), max_size=2, unique_by=lambda each: each[0])
_SAID = st.builds(
    lambda tokens, found: PromptKey(
        tuple(tokens), tuple(Origin(at, key) for at, key in sorted(found) if at < len(tokens)), ""
    ),
    _ALIKE.filter(bool),
    _ORIGINS,
)


@given(st.lists(_SAID, max_size=6), _SAID, st.sampled_from([1 << 20, 40 * 16, 90 * 16]))
def test_a_prompt_begins_with_the_longest_cached_prefix(told: list[PromptKey], prompt: PromptKey, budget: int) -> None:
    prefixes = PrefixCache(budget)
    for said in told:
        prefixes.keep(said, filled(said))
        assert prefixes.nbytes <= budget
    cache = PositionedCache(1, len(prompt.token_ids))
    found = prefixes.begin(prompt, cache)
    most = len(prompt.token_ids) - 1
    exact = max((min(most, common(said.labels, prompt.token_ids)) for said in told), default=0)
    blended = max((min(most, common(said.labels, prompt.labels)) for said in told), default=0)
    if budget == 1 << 20:
        longest = max(exact, blended)
        assert found.tokens == (longest if longest >= 16 else 0)
        assert found.exact == (longest < 16 or exact >= blended)
    assert cache.length == found.tokens <= most
    if found.tokens:
        labels = prompt.token_ids if found.exact else prompt.labels
        want = filled(PromptKey(prompt.token_ids, () if found.exact else prompt.origins, ""))
        assert labels[: found.tokens] and torch.equal(
            cache.view(0, 0, 0, found.tokens).k, want.view(0, 0, 0, found.tokens).k
        )


def common(one: Sequence[Any], other: Sequence[Any]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def test_forgetting_a_chunk_clears_the_cache_of_entry_keys(
    engine: TransformersEngine,
) -> None:
    note = make_chunk(NOTES[0], engine.tokenizer)
    kept(engine, 1)
    assert _key_of.cache_info().currsize
    assert engine.forget([note]) > 0
    assert not _key_of.cache_info().currsize


def test_tenants_share_no_conversation(engine: TransformersEngine) -> None:
    acme = engine.within("acme")
    acme.precompute(list(engine.registry))
    assert kept(acme, 1) == 0
    assert kept(engine, 2) == 0
    assert kept(acme, 2) > 0
    acme.forget(list(acme.registry)[:1])
    assert kept(engine, 3) > 0


def test_a_closed_stream_leaves_its_tokens_in_the_prefix_cache(engine: TransformersEngine) -> None:
    stream = engine.stream(asked(engine, 1), SamplingParams(max_tokens=9), SINK)
    next(stream)
    stream.close()
    prompt = asked(engine, 2)
    want = len(asked(engine, 1).token_ids)
    assert want <= engine.generate(prompt, SamplingParams(max_tokens=1), SINK).usage.kept_tokens <= want + 9


@pytest.mark.parametrize(
    "policy", [None, "full-reuse", "full-recompute", "static", "hkvd", "static-query", "query", "sink"]
)
@pytest.mark.parametrize("tokens", [1, 4])
def test_the_memory_of_a_prompt_is_freed_at_its_end_without_garbage_collection(
    model: Any, policy: str | None, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(model, prefix_cache=0)
    settings = BlendSettings(quality="full") if policy is None else BlendSettings(ratio=RATIO, policy=policy)
    prompt = asked(engine, 1)
    engine.generate(prompt, SamplingParams(max_tokens=1), settings)
    made: list[weakref.ref[Any]] = []
    new_cache = engine.runner.new_cache

    def remembered(*args: Any) -> Any:
        made.append(weakref.ref(cache := new_cache(*args)))
        return cache

    monkeypatch.setattr(engine.runner, "new_cache", remembered)
    gc.collect()
    gc.disable()
    try:
        engine.generate(prompt, SamplingParams(max_tokens=4), settings)
        events = engine.stream(prompt, SamplingParams(max_tokens=8), settings)
        for _ in range(tokens):
            next(events)
        events.close()  # type: ignore[attr-defined]
        del events
        assert made
        assert [cache() for cache in made] == [None] * len(made)
    finally:
        gc.enable()
