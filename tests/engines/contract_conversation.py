"""The contract of engines for conversations. Subclass it beside `EngineContract`, whose fixtures it uses."""

from __future__ import annotations

from itertools import pairwise, takewhile
from typing import Any

import pytest

from cacheblend_rag.blending.settings import BlendSettings
from cacheblend_rag.engines.base import BlendEngine
from cacheblend_rag.engines.results import Generation
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.prompts.chunk import make_chunk
from cacheblend_rag.prompts.prompt import TokenizedPrompt, chat_prompt

NOTES = [
    f"The {name} observatory was founded in {1900 + number}. It stands on a hill above the harbour."
    for number, name in enumerate(("Marlow", "Ada", "Bren", "Log", "Calm", "Dawn", "North", "West", "Sea", "Wind"))
]
FEW = SamplingParams(max_tokens=6, logprobs=4)
FULL = BlendSettings(quality="full")


def talk(
    engine: BlendEngine, settings: BlendSettings, turns: int, keep_notes: bool = True
) -> list[tuple[TokenizedPrompt, Generation]]:
    """Ask ``turns`` questions over two notes each; with ``keep_notes`` the history has the notes, too."""
    history: list[dict[str, Any]] = []
    done = []
    for turn in range(turns):
        notes, question = "\n\n".join(NOTES[2 * turn : 2 * turn + 2]), f"Question: who runs number {turn}?"
        asked = {"role": "user", "content": f"{notes}\n\n{question}"}
        prompt = engine.tokenize(chat_prompt(engine.tokenizer, [*history, asked], engine.registry))
        answer = engine.generate(prompt, FEW, settings)
        done.append((prompt, answer))
        kept = asked if keep_notes else {"role": "user", "content": question}
        history += [kept, {"role": "assistant", "content": answer.text}]
    return done


class ConversationContract:
    """``block`` is the number of tokens that the engine caches the KV of at a time."""

    block = 1

    @pytest.fixture
    def noted(self, engine: Any) -> Any:
        """Store the notes and return the engine."""
        engine.precompute([make_chunk(text, engine.tokenizer) for text in NOTES])
        return engine

    @pytest.mark.parametrize("settings", [BlendSettings(ratio=0.25, policy="hkvd"), BlendSettings(quality="exact")])
    def test_earlier_turns_are_not_computed_again(self, noted, settings) -> None:
        turns = talk(noted, settings, 4)
        assert turns[0][1].usage.kept_tokens == 0
        for (before, _), (prompt, answer) in pairwise(turns):
            usage, said = answer.usage, len(before.token_ids) - 2  # the template's last token may merge with the answer
            assert said - self.block < usage.kept_tokens <= usage.reused_tokens
            chunks = sum(max(0, span.end - max(span.start, usage.kept_tokens)) for span in prompt.spans)
            text = len(prompt.token_ids) - usage.kept_tokens - chunks
            blended = chunks if settings.reuse == "prefix" else usage.recomputed_tokens
            assert usage.computed_tokens == text + blended
            if settings.reuse != "prefix":
                assert usage.recomputed_tokens == pytest.approx(0.25 * chunks, abs=1)

    def test_a_history_without_chunks_is_an_exact_prefix_of_every_later_prompt(self, noted) -> None:
        turns = talk(noted, BlendSettings(ratio=0.25, policy="hkvd"), 4, keep_notes=False)
        for (before, _), (prompt, answer) in pairwise(turns[1:]):
            pairs = zip(before.token_ids, prompt.token_ids, strict=False)
            said = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            assert said - self.block < answer.usage.kept_tokens <= said
            want = noted.generate(prompt, FEW, FULL)
            got = noted.generate(prompt, FEW, BlendSettings(ratio=1.0))
            assert (got.usage.kept_tokens > 0) == (said >= self.block)
            assert got.token_ids == want.token_ids

    def test_a_conversation_at_ratio_1_has_the_answers_of_full_prefills(self, noted) -> None:
        for prompt, got in talk(noted, BlendSettings(ratio=1.0), 4):
            want = noted.generate(prompt, FEW, FULL)
            assert want.usage.reused_tokens == 0
            assert got.token_ids == want.token_ids
            for mine, theirs in zip(got.logprobs, want.logprobs, strict=True):
                assert dict(mine.top) == pytest.approx(dict(theirs.top), abs=1e-3)

    def test_kv_blended_at_one_ratio_is_not_cached_for_another_ratio(self, noted) -> None:
        """Full reuse differs from the full prefill more than any other blend: no other answer may contain its KV."""
        turns = talk(noted, BlendSettings(ratio=0.0), 3)
        prompt, reused = turns[-1]
        assert reused.usage.kept_tokens > 0
        full = noted.generate(prompt, FEW, FULL)
        whole = noted.generate(prompt, FEW, BlendSettings(ratio=1.0))
        assert whole.usage.kept_tokens == 0
        assert whole.token_ids == full.token_ids
        assert [p.logprob for p in whole.logprobs] == pytest.approx([p.logprob for p in full.logprobs], abs=1e-3)
        assert reused.logprobs[0].logprob != pytest.approx(full.logprobs[0].logprob, abs=1e-3)
