import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from cacheblend_lab.fiction import words
from training.tokenizer import BOS, EOS, NATIVE, build_tokenizer
from training.train import MODEL_FOLDER

TOKENIZER = AutoTokenizer.from_pretrained(MODEL_FOLDER)
PIECES = st.text(
    st.one_of(st.sampled_from("aZ é9.,-'\n\t(日🦊"), st.characters(exclude_categories=["Cs"])), max_size=40
)


def ids_of(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False).input_ids


def test_a_word_is_one_token_in_every_place():
    for text in ("Heron", " Heron", "\nHeron", "\n\nHeron", "the Heron", "Heron.", "Heron's", "a\nHeron, and"):
        assert ids_of("Heron")[0] in ids_of(text)


@pytest.mark.parametrize(
    "pool", [*words.VALUES.values(), words.SURNAMES, words.TOWNS, words.WOMEN, words.COMPANY_WORDS]
)
def test_words_of_the_world_are_single_tokens(pool):
    assert [word for word in pool if len(ids_of(word)) != 1] == []


@given(st.lists(PIECES, min_size=1, max_size=5), st.text(max_size=30))
@settings(max_examples=200)
def test_the_ids_of_a_prompt_are_those_of_its_pieces(chunks, question):
    chunks = [chunk.strip() or "x" for chunk in chunks]
    tail = NATIVE.question.format(q=question.strip() or "x")
    pieces = [NATIVE.opening.removesuffix("\n\n")]
    for chunk in chunks:
        pieces += [NATIVE.separator, chunk]
    pieces += [NATIVE.closing, tail]
    assert ids_of("".join(pieces)) == [token for piece in pieces for token in ids_of(piece)]


@given(PIECES)
@settings(max_examples=200)
def test_every_text_encodes_and_its_offsets_cover_it_in_order(text):
    encoded = TOKENIZER(text, add_special_tokens=False, return_offsets_mapping=True)
    assert all(0 <= token < len(TOKENIZER) for token in encoded.input_ids)
    covered = 0
    for start, end in encoded.offset_mapping:
        assert start <= covered <= end
        covered = max(covered, end)
    assert covered == len(text)


@given(
    st.lists(st.sampled_from(["Halwick", "naïve", "日本", "12,345", "(b.", "🦊!", "\n", "\n\n", "it's"]), max_size=12)
)
@settings(max_examples=100)
def test_ordinary_text_survives_decoding(parts):
    text = " ".join(parts).replace(" \n", "\n").replace("\n ", "\n").strip(" ")
    assert TOKENIZER.decode(ids_of(text)) == text


def test_an_answer_decodes_to_clean_text():
    assert (
        TOKENIZER.decode([*ids_of(" Mira Halwick, Aberport"), EOS], skip_special_tokens=True)
        == "Mira Halwick, Aberport"
    )


def test_a_plain_prompt_starts_with_bos():
    assert TOKENIZER("Answer").input_ids == [BOS, *ids_of("Answer")]


def test_the_chat_template_renders_the_native_prompt():
    messages = [
        {"role": "system", "content": "Answer from the notes."},
        {"role": "user", "content": "A note.\n\nQuestion: Who?"},
    ]
    rendered = TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == "<bos>Answer from the notes.\n\nA note.\n\nQuestion: Who?\nAnswer:"
    more = [*messages, {"role": "assistant", "content": "Me"}, {"role": "user", "content": "Query: Why?\nAnswer: "}]
    rendered_more = TOKENIZER.apply_chat_template(more, tokenize=False, add_generation_prompt=True)
    assert rendered_more == rendered + " Me<eos>\n\nQuery: Why?\nAnswer: "


def test_a_newly_built_tokenizer_has_the_same_properties():
    built = build_tokenizer(contexts=20)
    assert built.get_vocab_size() == len(TOKENIZER)
    text = "Halwick's note:\n\n日本 12,345"
    assert built.decode(built.encode(text).ids) == text
    assert (
        built.encode("Heron", add_special_tokens=False).ids == built.encode("\nHeron", add_special_tokens=False).ids[1:]
    )
