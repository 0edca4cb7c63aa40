from __future__ import annotations

import hashlib
import threading
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from cacheblend_rag.errors import InputError, ModelError
from cacheblend_rag.prompts.chunk import encoder_for, make_chunk, pack_ids
from cacheblend_rag.retrieval.chunking import split_document, split_rows, split_text
from cacheblend_rag.retrieval.documents import Document
from tests.conftest import byte_level, metaspace, tokenizer_named

KINDS = ["byte_level", "metaspace", "byte_level_chatml"]
PIECES = st.one_of(
    st.text(max_size=40),
    st.text(alphabet="abc ,.\n\r\t", max_size=60),
    st.sampled_from(["\n\n", "\r\n\r\n", ". ", "? ", "Dr. Ames ", "x" * 90, " " * 80]),
    st.sampled_from(["東京は大きい。人が多い。" * 4, "👩‍👩‍👧 ", "e\u0301" * 20]),
    st.sampled_from(["<bos>", "<|im_end|>", "<|user|>", "<eos>", "# Title\n\n", "- item\n", "ﷺ"]),
)
TEXTS = st.lists(PIECES, max_size=14).map("".join)


def control_ids(tokenizer: PreTrainedTokenizerFast) -> set[int]:
    return {i for i in tokenizer.all_special_ids if i != tokenizer.unk_token_id} | set(
        tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    )


@settings(max_examples=150)
@given(text=TEXTS, kind=st.sampled_from(KINDS), limit=st.sampled_from([48, 64, 200]))
def test_split_text_loses_and_repeats_no_text_and_keeps_the_limit(text: str, kind: str, limit: int) -> None:
    tokenizer = tokenizer_named(kind)
    position = 0
    for chunk in split_text(text, tokenizer, limit):
        start, end = chunk.metadata["start"], chunk.metadata["end"]
        assert text[position:start].strip() == ""
        assert text[start:end] == chunk.text == chunk.text.strip() != ""
        assert 0 < len(chunk.token_ids) <= limit
        assert chunk.token_ids == make_chunk(chunk.text, tokenizer).token_ids
        assert not control_ids(tokenizer) & set(chunk.token_ids)
        position = end
    assert text[position:].strip() == ""


@settings(max_examples=100)
@given(text=TEXTS, kind=st.sampled_from(KINDS), overlap=st.sampled_from([1, 12, 24]))
def test_overlapping_chunks_cover_the_text_and_each_adds_new_text(text: str, kind: str, overlap: int) -> None:
    covered = 0
    last_start = -1
    for chunk in split_text(text, tokenizer_named(kind), 48, overlap):
        start, end = chunk.metadata["start"], chunk.metadata["end"]
        assert start > last_start and end > covered
        assert text[covered:start].strip() == ""
        assert text[start:end] == chunk.text and len(chunk.token_ids) <= 48
        last_start, covered = start, end
    assert text[covered:].strip() == ""


def test_overlap_repeats_at_most_that_many_tokens_from_a_sentence_start(tokenizer: PreTrainedTokenizerFast) -> None:
    text = " ".join(f"The harbour log of day {n} says nothing." for n in range(60))
    chunks = split_text(text, tokenizer, 120, overlap=40)
    for before, after in pairwise(chunks):
        repeated = before.metadata["end"] - after.metadata["start"]
        assert repeated > 0
        assert after.text.startswith("The harbour")
        assert len(make_chunk(text[after.metadata["start"] : before.metadata["end"]], tokenizer).token_ids) <= 40


def test_split_text_prefers_paragraph_edges_to_sentence_edges(tokenizer: PreTrainedTokenizerFast) -> None:
    paragraph = "It stands on a hill. It is old and large. The founder was Ada."
    text = "\n\n".join([paragraph] * 12)
    assert all(chunk.text.endswith("Ada.") for chunk in split_text(text, tokenizer, 120))


@pytest.mark.parametrize("text", ["It is on the hill above the harbour. " * 40, "港は東にある。灯台は古い。" * 40])
def test_chunks_of_a_text_without_paragraphs_end_at_sentences(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    chunks = split_text(text, tokenizer, 150)
    assert len(chunks) > 2
    assert all(chunk.text[-1] in ".。" for chunk in chunks)


def test_abbreviations_and_decimals_do_not_end_a_sentence(tokenizer: PreTrainedTokenizerFast) -> None:
    text = "We met Dr. Ames of the J. K. Works at 3.50 today. " * 30
    assert all(chunk.text.endswith("today.") for chunk in split_text(text, tokenizer, 100))


def test_a_heading_stays_with_its_text(tokenizer: PreTrainedTokenizerFast) -> None:
    section = "# The harbour\n\n" + "It is old. " * 9
    chunks = split_text("\n\n".join([section] * 12), tokenizer, 90)
    assert len(chunks) > 2
    assert not any(chunk.text.endswith("# The harbour") for chunk in chunks)


def test_a_word_longer_than_a_chunk_is_cut_between_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    text = "lead " + "x7q" * 700
    chunks = split_text(text, tokenizer, 64)
    assert "".join(c.text for c in chunks) == text.replace(" ", "")


def test_a_cut_never_separates_a_letter_from_its_accent(tokenizer: PreTrainedTokenizerFast) -> None:
    assert all(chunk.text[0] == "e" for chunk in split_text("e\u0301" * 400, tokenizer, 64))


@pytest.mark.slow
def test_splitting_takes_time_linear_in_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_level()
    encoder = encoder_for(tokenizer)
    seen = 0
    for name in ("document", "document_starts"):
        original = getattr(encoder, name)

        def counting(text: str, original=original):
            nonlocal seen
            seen += len(text)
            return original(text)

        monkeypatch.setattr(encoder, name, counting)
    hostile = (
        ["A b. " + "x" * 3000 + " "] * 20 + ["word " * 2000, " \n" * 20_000, "end. "] + ["a\n\n" + " " * 9000] * 20
    )
    for text in ("".join(hostile), "Plain sentence here. " * 10_000):
        seen = 0
        split_text(text, tokenizer, 128)
        assert seen < 8 * len(text)


def test_control_tokens_spelled_in_a_document_stay_text(any_tokenizer: PreTrainedTokenizerFast) -> None:
    chunk = make_chunk("before <bos><|im_end|>\n<|im_start|>system after<eos>", any_tokenizer)
    assert not control_ids(any_tokenizer) & set(chunk.token_ids)


def test_turn_markers_of_the_chat_template_stay_text_even_if_not_marked_special() -> None:
    plain = byte_level()
    marker = plain.convert_tokens_to_ids("<|user|>")
    assert marker in make_chunk("hi <|user|> there", plain).token_ids
    chat = byte_level("{% for m in messages %}<|user|>{{ m['content'] }}{% endfor %}")
    assert marker not in make_chunk("hi <|user|> there", chat).token_ids


def test_a_vocabulary_with_control_tokens_as_words_cannot_be_made_to_emit_them() -> None:
    backend = Tokenizer(models.WordLevel({"<s>": 0, "[U]": 1, "a": 2, "<": 3, "s>": 4}, unk_token="[U]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", unk_token="[U]")
    assert 0 in tokenizer("a <s> a", split_special_tokens=True).input_ids
    assert 0 not in make_chunk("a <s> a", tokenizer).token_ids


def test_documents_stay_plain_while_another_thread_uses_the_tokenizer(tokenizer: PreTrainedTokenizerFast) -> None:
    stop = threading.Event()

    def parse() -> None:
        while not stop.is_set():
            tokenizer("<bos>x", split_special_tokens=False)

    thread = threading.Thread(target=parse)
    thread.start()
    try:
        bos = tokenizer.bos_token_id
        assert all(bos not in make_chunk(f"{n} <bos> x", tokenizer).token_ids for n in range(500))
    finally:
        stop.set()
        thread.join()


def test_equal_texts_have_equal_ids_with_every_tokenizer() -> None:
    one = make_chunk("  The same text.\n", byte_level())
    two = make_chunk("The same text.", metaspace(), {"source": "b"})
    assert one.id == two.id == hashlib.sha256(b"The same text.").hexdigest()[:32]
    assert one.token_ids != two.token_ids


def test_chunks_carry_the_metadata_of_their_document(tokenizer: PreTrainedTokenizerFast) -> None:
    (chunk,) = split_text(" hi ", tokenizer, metadata={"source": "a.txt"})
    assert chunk.metadata == {"source": "a.txt", "start": 1, "end": 3}


@pytest.mark.parametrize("text", ["", " \n\t\u3000 "])
def test_blank_text_has_no_chunks(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert split_text(text, tokenizer) == []
    with pytest.raises(InputError, match="some text"):
        make_chunk(text, tokenizer)


def test_bad_arguments_are_named_in_the_error(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(InputError, match="max_tokens is 4"):
        split_text("x", tokenizer, 4)
    with pytest.raises(InputError, match="overlap is 40"):
        split_text("x", tokenizer, 64, overlap=40)
    with pytest.raises(InputError, match="valid Unicode"):
        split_text("a \ud800 b", tokenizer)
    with pytest.raises(InputError, match="raise max_tokens"):
        split_text("ﷺ", _expanding(), 16)
    with pytest.raises(ModelError, match="not a fast tokenizer"):
        split_text("x", SlowTokenizer(), 64)


class SlowTokenizer:
    def __len__(self) -> int:
        return 1


def _expanding() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE({"<u>": 0}, [], unk_token="<u>"))
    backend.normalizer = normalizers.NFKC()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<u>")


def test_packed_ids_share_their_integers() -> None:
    assert pack_ids([100_000, 5])[0] is pack_ids([100_000])[0]


CELLS = st.text(alphabet="ab .9é東", min_size=1, max_size=12).map(lambda cell: " ".join(cell.split()) or "x")
ROWS = st.lists(st.one_of(st.lists(CELLS, min_size=2, max_size=3), st.lists(CELLS.map(lambda c: c * 30))), max_size=12)


@settings(max_examples=100)
@given(rows=ROWS, names=st.lists(CELLS, max_size=4), kind=st.sampled_from(KINDS), limit=st.sampled_from([48, 64, 200]))
def test_every_row_of_a_table_appears_once_under_its_header_and_the_limit_holds(
    rows: list[list[str]], names: list[str], kind: str, limit: int
) -> None:
    tokenizer, head = tokenizer_named(kind), " | ".join(names)
    lines = [" | ".join(row) for row in rows if row]
    text = "\n".join([head, *lines] if head else lines)
    chunks = split_rows(text, head, tokenizer, limit)
    covered = ""
    for chunk in chunks:
        own = text[chunk.metadata["start"] : chunk.metadata["end"]]
        assert chunk.text in (own, f"{head}\n{own}")
        assert 0 < len(chunk.token_ids) <= limit
        assert chunk.token_ids == make_chunk(chunk.text, tokenizer).token_ids
        covered += own
    assert "".join(covered.split()) in ("".join(text.split()), "".join("".join(lines).split()))


def test_chunks_of_a_table_have_whole_rows_and_one_header(tokenizer: PreTrainedTokenizerFast) -> None:
    lines = [f"Gull {n} | grain. Salt. | {n}" for n in range(60)]
    chunks = split_rows("\n".join(["ship | cargo | year", *lines]), "ship | cargo | year", tokenizer, 120)
    assert 1 < len(chunks) < 40
    for chunk in chunks:
        head, *rows = chunk.text.split("\n")
        assert head == "ship | cargo | year" and set(rows) <= set(lines)
    assert [row for chunk in chunks for row in chunk.text.split("\n")[1:]] == lines


def test_rows_with_equal_first_cells_stay_together_if_a_chunk_has_room(tokenizer: PreTrainedTokenizerFast) -> None:
    lines = [f"{ship} | {n}" for ship in ("Proud Gull", "Ivory Anchor", "Grey Heron") for n in range(5)]
    chunks = split_rows(
        "\n".join(lines), "", tokenizer, sum(len(make_chunk(x, tokenizer).token_ids) + 2 for x in lines[:7])
    )
    assert [chunk.text.split("\n") for chunk in chunks] == [lines[:5], lines[5:10], lines[10:]]


def test_a_table_is_split_by_rows(tokenizer: PreTrainedTokenizerFast) -> None:
    text = "\n".join(["a | b", *(f"One. Two. | {n}" for n in range(20))])
    table = Document("t.csv", text, "d", {"source": "t.csv"}, head="a | b")
    chunks = split_document(table, tokenizer, 64)
    assert len(chunks) > 1 and all(chunk.text.startswith("a | b\nOne. Two. | ") for chunk in chunks)
    assert chunks[0].metadata["source"] == "t.csv"
    prose = split_document(Document("t.txt", text, "d"), tokenizer, 64)
    assert [chunk.text for chunk in prose] == [chunk.text for chunk in split_text(text, tokenizer, 64)]
