"""Small versions of published files."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest
import xxhash

from cacheblend_lab.datasets import demo_samples, find_file, hash_files, load_data_set, read_data_set
from cacheblend_lab.fiction.world import DEFAULT_KINDS, KINDS
from cacheblend_rag.errors import InputError
from tests.conftest import tokenizer_named

MUSIQUE = {
    "id": "3hop1__1_2",
    "paragraphs": [{"idx": 0, "title": "Gull", "paragraph_text": "A ship.", "is_supporting": True}],
    "question": "What is the Gull?",
    "answer": "ship",
    "answer_aliases": ["a vessel"],
    "answerable": True,
}
TITLED = {
    "_id": "x1",
    "type": "comparison",
    "question": "Which is older?",
    "answer": "Gull",
    "context": [["Gull", ["Built in 1889. ", "Sails."]], ["Anchor", ["Built in 1901."]]],
}
LONGBENCH = {
    "input": "Who?",
    "context": "Passage 1:\nAda\nAda was here.\nPassage 2:\nBo\nBo was not.",
    "answers": ["Ada"],
    "dataset": "2wikimqa",
    "_id": "l1",
}


CTXS = {
    "ctxs": [{"title": "Gull", "text": "A ship built in 1889."}, {"title": "", "text": "It sails."}],
    "question": "When was the Gull built?",
    "answers": ["1889"],
}

ARTICLE = {
    "title": "Ships",
    "paragraphs": [
        {
            "context": "The Gull was built in 1889.",
            "qas": [
                {"id": "q1", "question": "When was the Gull built?", "answers": [{"text": "1889"}, {"text": "1889"}]},
                {"id": "q2", "question": "By whom?", "answers": [], "is_impossible": True},
            ],
        },
        {
            "context": "She has her sails.",
            "qas": [{"id": "q3", "question": "What?", "answers": [{"text": "sails"}, {"text": "its sails"}]}],
        },
    ],
}
RGB = {
    "id": 0,
    "query": "When?",
    "answer": "1889",
    "fakeanswer": "1890",
    "positive_wrong": ["Built in 1890."],
    "positive": ["Built in 1889."],
    "negative": ["An anchor."],
}


def read_samples(file, seed=0):
    return read_data_set(file, seed).samples


def write(path, rows, kind="jsonl"):
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(rows) if kind == "json" else "\n".join(map(json.dumps, rows)) + "\n"
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize(("name", "kind"), [("a.json", "json"), ("a.jsonl", "jsonl"), ("a.jsonl.gz", "jsonl")])
def test_musique_is_read_from_every_container(tmp_path, name, kind):
    skipped = {**MUSIQUE, "id": "2hop__9", "answerable": False}
    (sample,) = read_samples(write(tmp_path / name, [MUSIQUE, skipped], kind))
    assert sample.answers == ("ship", "a vessel")
    assert sample.texts == ("Gull\nA ship.",)
    assert sample.kind == "3hop"


def test_hotpot_as_published_and_from_the_hub_are_read_equally(tmp_path):
    hub = {**TITLED, "context": {"title": ["Gull", "Anchor"], "sentences": [c[1] for c in TITLED["context"]]}}
    (first,) = read_samples(write(tmp_path / "a.json", [TITLED], "json"))
    (second,) = read_samples(write(tmp_path / "b.jsonl", [hub]))
    assert first == second
    assert first.texts[0] == "Gull\nBuilt in 1889. Sails."
    assert first.kind == "comparison"


def test_squad_questions_are_answered_from_all_paragraphs_of_their_article(tmp_path):
    (first, second) = read_samples(write(tmp_path / "squad.json", {"version": "2.0", "data": [ARTICLE]}, "json"))
    assert (first.id, first.question, first.answers) == ("q1", "When was the Gull built?", ("1889",))
    assert (second.id, second.answers) == ("q3", ("sails", "its sails"))
    assert first.texts == second.texts == ("Ships\nThe Gull was built in 1889.", "Ships\nShe has her sails.")
    assert (first.packing, first.group, second.group) == ("split", "Ships", "Ships")


def test_rgbs_right_and_irrelevant_passages_form_the_corpus(tmp_path):
    (one, two) = read_samples(
        write(tmp_path / "en.json", [RGB, {**RGB, "id": 1, "answer": [["May 5", "5 May"], ["1889"]]}])
    )
    assert (one.question, one.answers, one.texts) == ("When?", ("1889",), ("Built in 1889.", "An anchor."))
    assert two.answers == ("May 5 1889",)
    (dates,) = read_samples(write(tmp_path / "dates.json", [{**RGB, "answer": [["May 5", "5 May"]]}]))
    assert dates.answers == ("May 5", "5 May")


def test_longbench_rows_are_cut_at_their_passages(tmp_path):
    (sample,) = read_samples(write(tmp_path / "a.jsonl", [LONGBENCH]))
    assert sample.texts == ("Ada\nAda was here.", "Bo\nBo was not.")
    news = {**LONGBENCH, "input": "", "dataset": "multi_news", "context": "Passage 1:\nOne. NEWLINE_CHAR Two."}
    (summary,) = read_samples(write(tmp_path / "b.jsonl", [news]))
    assert summary.task == "summary"
    assert summary.question
    assert "NEWLINE" not in summary.texts[0]


def test_longbench_prompts_are_taken_apart(tmp_path):
    qa = "Do this.\n\nThe following are given passages.\nPassage 1:\nAda was here.\n\nDo this.\n\nQuestion: Who?\nAnswer:"
    shots = "Summarize.\n\nDialogue: A: hi\nSummary: A greets.\nDialogue: B: bye\nSummary: B leaves."
    shots += "\n\n\nDialogue: C: no\nSummary: "
    rows = {str(i): {"origin_prompt": p, "gold": ["x"], "prediction": "y"} for i, p in enumerate((qa, shots))}
    first, second = read_samples(write(tmp_path / "a.json", rows, "json"))
    assert (first.question, first.texts) == ("Who?", ("Ada was here.",))
    assert second.texts == ("Dialogue: A: hi\nSummary: A greets.", "Dialogue: B: bye\nSummary: B leaves.")
    assert second.question.endswith("Dialogue: C: no")
    unknown = {"0": {"origin_prompt": "Count.\n\nMany paragraphs.\n\nHow many?", "gold": ["3"]}}
    with pytest.raises(InputError, match="unknown kind"):
        read_samples(write(tmp_path / "b.json", unknown, "json"))


def test_dialogues_get_examples_only_from_different_rows(tmp_path):
    rows = [{"context": f"A: hello {i}", "response": f"Greeting {i}."} for i in range(5)]
    samples = read_samples(write(tmp_path / "a.jsonl", rows), seed=1)
    for i, sample in enumerate(samples):
        assert sample.answers == (f"Greeting {i}.",)
        assert len(sample.texts) == 4
        assert not any(f"Greeting {i}." in text for text in sample.texts)
    assert samples == read_samples(tmp_path / "a.jsonl", seed=1)
    assert samples != read_samples(tmp_path / "a.jsonl", seed=2)


def test_plain_rows_have_chunks_or_documents(tmp_path):
    rows = [
        {"question": "Q", "answer": "A", "chunks": ["one", "two"], "kind": "easy"},
        {"question": "Q", "answers": ["A", "B"], "context": "a document"},
    ]
    first, second = read_samples(write(tmp_path / "a.jsonl", rows))
    assert (first.packing, first.texts, first.kind) == ("ready", ("one", "two"), "easy")
    assert (second.packing, second.texts, second.answers) == ("split", ("a document",), ("A", "B"))
    assert first.id != second.id


def test_plain_rows_about_equal_texts_form_a_group_unless_they_name_another(tmp_path):
    rows = [{"question": f"Q{number}", "answer": "A", "chunks": ["one", "two"]} for number in range(4)]
    rows[1]["chunks"] = ["two", "one"]
    rows[3]["group"] = "mine"
    first, turned, third, named = (sample.group for sample in read_samples(write(tmp_path / "a.jsonl", rows)))
    assert first == third
    assert len({first, turned, named}) == 3 and named == "mine"


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ('{"question": "Q"}', "line 1"),
        ('{"question": "Q", "answers": [], "chunks": ["x"]}', "no answer"),
        ('{"question": "Q", "answer": "A", "chunks": [3]}', "a text must be a string, found int"),
        ("nonsense\nmore", "line 2: this is no JSON"),
        ("[1, 2]", "row 1"),
        ("[]", "no rows"),
        (json.dumps([{**MUSIQUE, "paragraphs": [{"title": "x"}]}]), "paragraph_text"),
    ],
)
def test_an_unreadable_file_is_named_with_its_line(tmp_path, content, named):
    file = tmp_path / "a.jsonl"
    file.write_text(content)
    with pytest.raises(InputError, match=named):
        read_samples(file)


GOOD = {"question": "Q", "answer": "A", "chunks": ["x"]}


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"question": "Q", "answer": "A"}, "unknown format"),
        ({"answer": "A", "chunks": ["x"]}, "unknown format"),
        ({**GOOD, "chunks": []}, "no text"),
        ({**GOOD, "chunks": [" ", ""]}, "no text"),
        ({"question": "Q", "answer": "A", "context": ""}, "no text"),
        ({"question": "Q", "answer": "A", "documents": None}, "NoneType"),
        ({**GOOD, "question": " "}, "question is empty"),
        ({**GOOD, "question": 7}, "question is no string"),
        ({**GOOD, "answer": 1889}, "an answer must be a string, found int"),
        ({**GOOD, "chunks": {"a": "b"}}, "a text must be a string, found dict"),
        ({**GOOD, "task": "poem"}, "poem"),
        ({**MUSIQUE, "question": None}, "question is no string"),
        ({**MUSIQUE, "paragraphs": []}, "no text"),
        ({**MUSIQUE, "paragraphs": [{"title": "Gull", "paragraph_text": None}]}, "NoneType"),
        ({**TITLED, "context": [["Gull", 3]]}, "a text must be a string, found int"),
        ({**TITLED, "context": [["Gull"]]}, "unpack"),
        ({**LONGBENCH, "context": ""}, "no text"),
        ({**LONGBENCH, "answers": None}, "NoneType"),
        ({**CTXS, "ctxs": []}, "no text"),
        ({**CTXS, "ctxs": [{"title": "Gull", "text": ""}]}, "no text"),
        ({**CTXS, "ctxs": [{"title": "Gull"}]}, "the field 'text' is missing"),
        ({**CTXS, "ctxs": "Gull"}, "indices"),
        ({**ARTICLE, "paragraphs": [{"context": "Alone."}]}, "the field 'qas' is missing"),
        ({**RGB, "negative": [3]}, "a text must be a string, found int"),
        (["Q", "A"], "expected a JSON object, found list"),
    ],
)
def test_a_bad_row_is_skipped_and_named(tmp_path, row, why):
    found = read_data_set(write(tmp_path / "a.jsonl", [GOOD, row, GOOD]))
    assert len(found.samples) == 2
    (skipped,) = found.skipped
    assert (skipped.file, skipped.where) == ("a.jsonl", "line 2")
    assert why in skipped.why
    with pytest.raises(InputError, match="line 1"):
        read_data_set(write(tmp_path / "b.jsonl", [row, row]))


def test_a_line_without_json_is_skipped_and_named(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text(f"{json.dumps(GOOD)}\nnonsense\n")
    found = read_data_set(file)
    assert len(found.samples) == 1
    assert [str(row) for row in found.skipped] == [
        "a.jsonl, line 2: this is no JSON (Expecting value: line 1 column 1 (char 0))"
    ]


def test_many_bad_rows_are_counted_in_the_error(tmp_path):
    with pytest.raises(InputError, match=r"line 3: .*and 4 more rows"):
        read_data_set(write(tmp_path / "a.jsonl", [{"x": 1}] * 7))


def test_a_single_sentence_is_not_read_as_a_list_of_letters(tmp_path):
    row = {**TITLED, "context": [["Gull", "Built in 1889."]]}
    assert read_samples(write(tmp_path / "a.jsonl", [row]))[0].texts == ("Gull\nBuilt in 1889.",)
    row = {**LONGBENCH, "answers": "Ada"}
    assert read_samples(write(tmp_path / "b.jsonl", [row]))[0].answers == ("Ada",)


def test_the_files_of_cacheblends_authors_are_read_with_one_chunk_per_passage(tmp_path):
    nested = {**CTXS, "answers": [["1889", "in 1889"]]}
    first, second = read_samples(write(tmp_path / "musique_s.json", [CTXS, nested], "json"))
    assert first.texts == ("Gull\nA ship built in 1889.", "It sails.")
    assert (first.packing, first.task, first.answers) == ("ready", "qa", ("1889",))
    assert second.answers == ("1889", "in 1889")
    row = {
        "ctxs": [{"title": "", "text": f"Dialogue: A: {word}\nSummary: A says {word}."} for word in ("hi", "bye")],
        "question": "Dialogue: C: no\nSummary: ",
        "answers": ["C refuses."],
    }
    (dialogue,) = read_samples(write(tmp_path / "samsum.json", [row], "json"))
    assert dialogue.texts == ("Dialogue: A: hi\nSummary: A says hi.", "Dialogue: A: bye\nSummary: A says bye.")
    assert dialogue.question.endswith("Dialogue: C: no")
    assert dialogue.task == "dialogue"
    row = {**CTXS, "question": "Write a one-page summary of all the news.", "answers": ["A ship sails."]}
    (summary,) = read_samples(write(tmp_path / "multi_news.json", [row], "json"))
    assert summary.task == "summary"


def test_a_published_file_of_this_layout_is_read():
    directory = os.environ.get("CACHEBLEND_DATA")
    file = Path(directory or "nowhere") / "nq" / "nq-open-oracle.jsonl.gz"
    if not file.is_file():
        pytest.skip("CACHEBLEND_DATA holds no nq/nq-open-oracle.jsonl.gz")
    found = read_data_set(file)
    assert len(found.samples) == 2655
    assert not found.skipped
    assert found.samples[0].texts[0].startswith("List of Nobel laureates in Physics\n")


def test_a_file_is_recorded_with_the_hash_of_its_content(tmp_path):
    file = write(tmp_path / "a.jsonl", [GOOD])
    digest = read_data_set(file).files["a.jsonl"]
    assert digest == f"xxh3_128:{xxhash.xxh3_128_hexdigest(file.read_bytes())}"
    assert hash_files(str(file), None) == read_data_set(file).files
    write(file, [{**GOOD, "answer": "B"}])
    assert read_data_set(file).files["a.jsonl"] != digest


def test_named_data_sets_are_found_in_the_users_directory(tmp_path, monkeypatch):
    monkeypatch.delenv("CACHEBLEND_DATA", raising=False)
    file = write(tmp_path / "musique" / "musique_ans_v1.0_dev.jsonl", [MUSIQUE])
    assert (
        find_file("musique", tmp_path)
        == find_file("musique", tmp_path / "musique")
        == find_file("musique", file)
        == file
    )
    with pytest.raises(InputError, match="No file of samsum"):
        find_file("samsum", tmp_path)
    with pytest.raises(InputError, match="CACHEBLEND_DATA"):
        find_file("musique", None)
    monkeypatch.setenv("CACHEBLEND_DATA", str(tmp_path))
    assert find_file("musique", None) == file


def test_limit_draws_by_seed_in_the_order_of_the_file(tmp_path):
    rows = [{"id": f"q{i:02}", "question": "Q", "answer": "A", "chunks": ["x"]} for i in range(30)]
    file = write(tmp_path / "a.jsonl", rows)
    ids = [s.id for s in load_data_set(str(file), None, 10, 3, None).samples]
    assert ids == sorted(ids)
    assert len(ids) == 10
    assert ids == [s.id for s in load_data_set(str(file), None, 10, 3, None).samples]
    assert ids != [s.id for s in load_data_set(str(file), None, 10, 4, None).samples]


def test_unknown_data_sets_are_refused():
    with pytest.raises(InputError, match="no data set 'squad'"):
        load_data_set("squad", None, 1, 0, None)


def test_demo_questions_follow_the_seed_and_cover_every_kind():
    tokenizer = tokenizer_named("byte_level")
    samples = demo_samples(tokenizer, 63, 5, kinds=KINDS, chunk_tokens=1500)
    assert samples == demo_samples(tokenizer, 63, 5, kinds=KINDS, chunk_tokens=1500)
    assert samples[:10] == demo_samples(tokenizer, 10, 5, kinds=KINDS, chunk_tokens=1500)
    assert {s.question for s in samples} != {
        s.question for s in demo_samples(tokenizer, 63, 6, kinds=KINDS, chunk_tokens=1500)
    }
    assert {s.kind for s in demo_samples(tokenizer, 63, 5, chunk_tokens=1500)} == set(DEFAULT_KINDS)
    assert {sample.kind for sample in samples} == set(KINDS)
    assert len({sample.id for sample in samples}) == 63
    for sample in samples:
        assert len(sample.texts) == 6
        last = sample.answers[0].replace(": ", ", ").split(", ")[-1]
        last = last.removeprefix("the ")  # headings leave the article out
        said = last.split(" ")[0] if sample.kind == "unit" else last
        assert any(said.casefold() in text.casefold() for text in sample.texts)
        if sample.kind == "comparison":
            assert last in sample.question


def test_demo_refuses_unknown_kinds_and_too_small_chunks():
    tokenizer = tokenizer_named("byte_level")
    with pytest.raises(InputError, match="riddle"):
        demo_samples(tokenizer, 1, 0, kinds=["riddle"])
    with pytest.raises(InputError, match="larger"):
        demo_samples(tokenizer, 5, 0, kinds=["two_hop_cross"], chunks=1, chunk_tokens=64)
