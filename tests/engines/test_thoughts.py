"""Tests that thoughts are separated from answers, in any pieces, if the model has tokens for thoughts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import transformers as hf
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from cacheblend_rag.engines.results import Generation
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.thoughts import Parts, ThoughtReader, without_thoughts
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.prompts.chunk import make_chunk
from cacheblend_rag.prompts.prompt import BlendPrompt, TokenizedPrompt, chat_prompt, tokenize
from cacheblend_rag.prompts.registry import ChunkRegistry
from tests.blending.families import _BASE, make_model
from tests.conftest import byte_level, thinking
from tests.engines.contract_conversation import NOTES
from tests.fake_engine import FakeEngine

GUIDED = SamplingParams(json_schema={"type": "object"})


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return thinking()


def asking(tokenizer: PreTrainedTokenizerFast, end: str) -> TokenizedPrompt:
    return tokenize(BlendPrompt((f"Who?<think>Hm.</think>{end}",)), tokenizer, ChunkRegistry())


def joined(reader: ThoughtReader, pieces: Sequence[str]) -> Parts:
    parts = [reader.push(piece, last=number == len(pieces)) for number, piece in enumerate(pieces, 1)]
    return Parts("".join(part.answer for part in parts), "".join(part.reasoning for part in parts))


@pytest.mark.parametrize(
    ("end", "said", "parts"),
    [
        ("<think>\n", "\nIs it A?\n\nYes.\n</think>\n\nIt is\n A. ", Parts("It is\n A. ", "Is it A?\n\nYes.")),
        ("<think>", "<think>Hm.</think>A", Parts("A", "Hm.")),  # the prompt has the marker already
        (
            "<think>\n\n",
            "a </thin b </think",
            Parts("", "a </thin b </think"),
        ),  # the answer was cut off at its last token
        ("<think>\n", "</think>A <think>b</think>", Parts("A <think>b</think>")),
        ("", " \n<think> Hm. </think>\nA", Parts("A", "Hm.")),
        ("", "<think></think>\n\nA", Parts("A")),
        ("", "<think>\nHm. \n", Parts("", "Hm.")),
        ("", " A <think>b</think> ", Parts(" A <think>b</think> ")),
        ("", " <thin", Parts(" <thin")),
        ("", "A</think>", Parts("A</think>")),
        ("", " \n", Parts(" \n")),
    ],
)
def test_thoughts_are_separated_from_the_answer_in_pieces_of_any_size(tokenizer, end, said, parts) -> None:
    prompt = asking(tokenizer, end)
    for size in (*range(1, 12), 100):
        pieces = [said[at : at + size] for at in range(0, len(said), size)]
        assert joined(ThoughtReader(tokenizer, prompt), pieces) == parts
        assert joined(ThoughtReader(tokenizer, prompt), [*pieces, ""]) == parts


def test_thoughts_are_streamed_while_the_model_thinks(tokenizer) -> None:
    reader = ThoughtReader(tokenizer, asking(tokenizer, "<think>\n"))
    pieces = ("Is", " it", " A?\n", "</", "think>", "\n\n", "It", " is.")
    told = [reader.push(piece) for piece in pieces]
    assert [each.reasoning for each in told] == ["Is", " it", " A?", "", "", "", "", ""]
    assert [each.answer for each in told] == ["", "", "", "", "", "", "It", " is."]


def test_a_guided_answer_is_not_taken_for_thoughts_that_its_prompt_has_opened(tokenizer) -> None:
    prompt = asking(tokenizer, "<think>\n")
    assert ThoughtReader(tokenizer, prompt, GUIDED).push('{"a": 1}', last=True) == Parts('{"a": 1}')
    behind = ThoughtReader(tokenizer, prompt, GUIDED).push('Hm.</think>{"a": 1}', last=True)
    assert behind == Parts('{"a": 1}', "Hm."), "a server with a parser of its own guides behind the thoughts"


@pytest.mark.parametrize("markers", [(), ("<think>",), (AddedToken("<think>", special=True), "</think>")], ids=str)
def test_a_tokenizer_without_both_visible_markers_yields_answers_only(markers) -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens(list(markers))
    said = "<think>Hm.</think>\n\nA"
    assert ThoughtReader(tokenizer, asking(tokenizer, "<think>\n")).push(said) == Parts(said)
    assert ThoughtReader(None, TokenizedPrompt((1,), ())).push(said) == Parts(said)


def test_removing_thoughts_changes_only_the_text_of_a_generation(tokenizer) -> None:
    for made, text in ((tokenizer, "A"), (byte_level(), "Hm.</think>A")):
        engine = FakeEngine(tokenizer=made)
        prompt = BlendPrompt(("Who?<think>\n",))
        done = engine.generate(prompt)
        said = Generation(**{**vars(done), "text": "Hm.</think>A"})
        assert without_thoughts(engine, prompt, said) == Generation(**{**vars(done), "text": text})


def test_a_conversation_without_earlier_thoughts_reuses_the_common_prefix(tokenizer) -> None:
    config = {**_BASE, "vocab_size": 448, "eos_token_id": None, "max_position_embeddings": 1024}
    sampling = SamplingParams(max_tokens=6, logprobs=0)
    with TransformersEngine(make_model(hf.LlamaConfig(**config)), tokenizer=tokenizer, device="cpu") as engine:
        engine.precompute([make_chunk(NOTES[0], tokenizer)])
        messages = [{"role": "user", "content": f"{NOTES[0]}\n\nWho runs it?"}]
        first = engine.tokenize(chat_prompt(tokenizer, messages, engine.registry))
        engine.generate(first, sampling)
        messages += [{"role": "assistant", "content": "Ada Brenmoor."}, {"role": "user", "content": "Since when?"}]
        second = engine.tokenize(chat_prompt(tokenizer, messages, engine.registry))
        alike = next(
            at for at, pair in enumerate(zip(first.token_ids, second.token_ids, strict=False)) if len({*pair}) > 1
        )
        after = engine.generate(second, sampling)
        assert alike == len(first.token_ids) - 2, "the template has left out what opened the thoughts"
        assert after.usage.kept_tokens == alike
        engine.reset_prefix_cache()
        alone = engine.generate(second, sampling)
    assert (alone.usage.kept_tokens, alone.token_ids) == (0, after.token_ids)
    assert [each.logprob for each in after.logprobs] == pytest.approx(
        [each.logprob for each in alone.logprobs], abs=1e-4
    )
