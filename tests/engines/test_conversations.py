"""Conversations on the transformers engine: what is kept of them, against an independent reference, and for whom."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from hypothesis import example, given
from hypothesis import strategies as st

from cacheblend_rag.blending.settings import BlendSettings
from cacheblend_rag.engines.entries import _key_of
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.engines.transformers.cache import Conversations, PositionedCache, Said
from cacheblend_rag.errors import InputError
from cacheblend_rag.prompts.chunk import make_chunk
from cacheblend_rag.prompts.prompt import DEFAULT_INSTRUCTION, TokenizedPrompt, chat_prompt
from tests.blending.families import _BASE, make_model
from tests.blending.reference import Part, blend
from tests.blending.writers import write_writer
from tests.conftest import tokenizer_named
from tests.engines.contract_conversation import NOTES

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
    """The prompt of the last of ``turns`` questions over two notes each, all answered alike."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": DEFAULT_INSTRUCTION}]
    for turn in range(turns):
        notes = "\n\n".join(NOTES[2 * turn : 2 * turn + 2])
        messages.append({"role": "user", "content": f"{notes}\n\nQuestion: who runs {subject}?"})
        messages.append({"role": "assistant", "content": "Ada Brenmoor."})
    return engine.tokenize(chat_prompt(engine.tokenizer, messages[:-1], engine.registry))


def kept(engine: Any, turns: int, settings: BlendSettings = SINK, subject: str = "it") -> int:
    prompt = asked(engine, turns, subject)
    return engine.generate(prompt, SamplingParams(max_tokens=1), settings).usage.kept_tokens


def test_what_a_conversation_has_left_of_a_chunk_is_not_stored_as_the_models_own(model: Any, tmp_path: Path) -> None:
    """Without the header's KV the first chunk was blended; all that follows in the conversation goes on from that."""
    write_writer(tmp_path, hf.LlamaConfig(**_CONFIG))
    engine = engine_of(model, writer=tmp_path)
    first, own = make_chunk(NOTES[0], engine.tokenizer), engine.entries.by(None)
    engine.store.delete(own.own_key(()))
    assert kept(engine, 1) == 0
    engine.precompute([make_chunk("Something else.", engine.tokenizer)])  # and with it the header
    assert kept(engine, 2) > 0
    assert not own.contains(first.token_ids)
    engine.reset_prefix_cache()
    assert kept(engine, 2) == 0
    assert own.contains(first.token_ids)


def parts(engine: TransformersEngine, prompt: TokenizedPrompt) -> list[Part]:
    """The prompt for the reference; the first chunk stands behind the header that it was computed behind."""
    found, at = [], 0
    for number, span in enumerate(prompt.spans):
        found.append(Part(list(prompt.token_ids[at : span.start]), "text"))
        found.append(Part(list(prompt.token_ids[span.start : span.end]), "stale" if number else "exact"))
        at = span.end
    assert prompt.spans[0].start == len(engine.header_ids)
    return [*found, Part(list(prompt.token_ids[at:]), "text")]


def first_tokens(spans: Sequence[Any]) -> list[int]:
    """What the policy `sink` recomputes of the chunks of one turn."""
    each = round(round(RATIO * sum(span.end - span.start for span in spans)) / len(spans))
    return [at for span in spans for at in range(span.start, min(span.start + each, span.end))]


def test_each_answer_is_that_of_the_turns_blended_one_after_the_other(engine: TransformersEngine) -> None:
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


def test_a_question_that_only_begins_like_another_is_blended_for_itself(engine: TransformersEngine) -> None:
    assert [kept(engine, 1), kept(engine, 1), kept(engine, 1, subject="all of it")] == [0, 0, 0]


@pytest.mark.parametrize("policy", ["query", "static-query", "hybrid"])
def test_where_the_question_selects_another_question_keeps_nothing_of_its_turn(model: Any, policy: str) -> None:
    engine = engine_of(model, ranking="now")
    settings = BlendSettings(ratio=RATIO, policy=policy, check_layers=(1,))
    assert kept(engine, 1, settings) == 0
    assert kept(engine, 2, settings, subject="all of it") == 0
    assert kept(engine, 2, settings) > 0


def test_a_text_that_goes_on_needs_no_template_and_one_that_only_begins_alike_shares_nothing(engine: Any) -> None:
    def of(text: str) -> int:
        return engine.generate(text, SamplingParams(max_tokens=2), SINK).usage.kept_tokens

    first = "Human: Who runs the observatory?\nAI:"
    assert [of(first), of(first), of("Human: Who runs the company?\nAI:")] == [0, 0, 0]
    longer = f"{first} Ada.\nHuman: Who else?\nAI:"
    assert of(longer) >= len(engine.tokenize(first).token_ids) - 1
    assert of("Human: Who runs the company now, and who did before?\nAI:") == 0


def test_a_prompt_of_two_tokens_is_no_conversation_that_any_other_goes_on_with(engine: TransformersEngine) -> None:
    first = TokenizedPrompt((0, 5), ())
    engine.generate(first, SamplingParams(max_tokens=1))
    other = TokenizedPrompt((0, *range(7, 40)), ())
    assert engine.generate(other, SamplingParams(max_tokens=1)).usage.kept_tokens == 0
    assert engine.generate(TokenizedPrompt((0, 5, 6), ()), SamplingParams(max_tokens=1)).usage.kept_tokens == 2


def test_a_full_prefill_neither_finds_a_conversation_nor_leaves_one(engine: TransformersEngine) -> None:
    off = BlendSettings(quality="full")
    assert [kept(engine, 1, off), kept(engine, 2, off), kept(engine, 2)] == [0, 0, 0]
    assert kept(engine, 3) > 0
    assert kept(engine, 3, off) == 0


def test_only_so_much_is_kept_and_the_conversation_that_rested_longest_goes(model: Any) -> None:
    with engine_of(model) as engine:
        engine.generate(asked(engine, 1), SamplingParams(max_tokens=1), SINK)
        nbytes = engine.conversations._kept[0][1].nbytes
    with engine_of(model, conversations=int(2.5 * nbytes)) as engine:
        for subject in ("a", "b", "c"):
            kept(engine, 1, subject=subject)
        assert [kept(engine, 2, subject=subject) > 0 for subject in ("a", "c")] == [False, True]
    with engine_of(model, conversations=0) as engine:
        assert [kept(engine, 1), kept(engine, 2)] == [0, 0]
    with pytest.raises(InputError, match="'much' is not a size"):
        engine_of(model, conversations="much")


def test_a_prompt_that_goes_on_takes_the_place_of_the_one_before(engine: TransformersEngine) -> None:
    for turn in range(1, 4):
        kept(engine, turn)
        assert len(engine.conversations._kept) == 1


def test_forgetting_a_chunk_forgets_the_conversations_and_so_does_a_reset(engine: TransformersEngine) -> None:
    kept(engine, 1)
    engine.forget([make_chunk(NOTES[0], engine.tokenizer)])
    assert kept(engine, 2) == 0
    engine.reset_prefix_cache()
    assert kept(engine, 3) == 0
    assert kept(engine, 4) > 0


class Remembering(PositionedCache):
    """A cache without memory that remembers how much it began with."""

    begun = 0

    def __init__(self) -> None:
        super().__init__(0, 0)

    def begin_as(self, other: PositionedCache, length: int) -> None:
        self.begun = length


def common(one: Sequence[int], other: Sequence[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


# Most begin as the others do, so that they differ late, in what is compared first and in front of it.
_ALIKE = st.builds(lambda same, own: [0] * same + own, st.integers(0, 40), st.lists(st.integers(0, 1), max_size=24))
_TOLD = st.lists(st.tuples(_ALIKE, st.integers(1, 5)), max_size=5)


@example([([0] * 30 + [1] * 10, 1)], [0] * 50, 8, True, 0)
@given(_TOLD, _ALIKE, st.integers(1, 70), st.booleans(), st.integers(0, 4))
def test_the_conversation_with_most_in_common_is_gone_on_with(
    told: list[tuple[list[int], int]], prompt: list[int], turn: int, later: bool, lead: int
) -> None:
    conversations, left = Conversations(1), list[tuple[list[int], int]]()
    for tokens, answered in told:
        asked = max(1, len(tokens) - answered)
        conversations.keep(Said(tuple(tokens), (), "", asked), Remembering())
        left = [each for each in left if each[0] != tokens[: len(each[0])]] + [(tokens, asked)]
    first_turn = turn if later else len(prompt)
    want = [0]
    for tokens, asked in left:
        length = min(common(tokens, prompt), len(prompt) - 1)
        goes_on = asked < len(prompt) and length >= asked - lead - 2 and 2 * length > asked
        want.append(length if goes_on or length >= first_turn else 0)
    cache = Remembering()
    turn_ends = [turn, turn + 1] if later else [len(prompt)]
    assert conversations.begin(Said(tuple(prompt), (), "", len(prompt)), turn_ends, lead, cache) == max(want)
    assert cache.begun == max(want)


def test_forgetting_a_chunk_leaves_no_tokens_of_it_among_the_keys_that_are_remembered(
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


def test_an_answer_that_was_left_in_the_middle_is_kept_as_far_as_it_came(engine: TransformersEngine) -> None:
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
def test_the_memory_of_a_prompt_is_free_when_it_ends_and_not_when_garbage_is_collected(
    model: Any, policy: str | None, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(model, conversations=0)
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
