"""Tests the way from samples to prompts, answers and numbers, on a small random model."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import cycle

import pytest

from cacheblend_lab.datasets import hash_files
from cacheblend_lab.evaluation.answers import AnswersFile, answer_all
from cacheblend_lab.evaluation.chunkwise import MapReduce, MapRerank
from cacheblend_lab.evaluation.evaluate import EvalSettings, evaluate, identify_run
from cacheblend_lab.evaluation.method import generate_reply
from cacheblend_lab.evaluation.methods import make_methods
from cacheblend_lab.evaluation.prepare import Preparation, Preparer, set_header
from cacheblend_lab.evaluation.report import write_report
from cacheblend_lab.evaluation.summary import find_worst, summarize
from cacheblend_lab.samples import Sample
from cacheblend_rag.blending.profile import ModelProfile
from cacheblend_rag.blending.settings import BlendSettings, TextRange
from cacheblend_rag.demo.methods import answer_by_each_method
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.errors import InputError, PromptTooLongError
from cacheblend_rag.prompts.prompt import rag_prompt
from cacheblend_rag.store.kv import WrittenBy
from tests.conftest import thinking
from tests.fake_engine import FakeEngine

pytestmark = pytest.mark.slow

TEXTS = (
    "The Proud Gull was launched in 1889. Her cargo is grain.",
    "She was refitted in 1901 and sails at dawn.",
    "The Ivory Anchor keeps a canary. Nobody on board plays the cello.",
)
SAMPLES = [
    Sample(f"s{i}", question, ("1901",), TEXTS, "ready", kind="cross" if i else "single", group="g")
    for i, question in enumerate(("When was the Proud Gull refitted?", "What is on board?"))
]
FEW = Preparation(k=6, max_tokens=4)


def run(engine, names="full,prefix,reuse,blend", samples=SAMPLES, path=None, blend=None):
    methods = make_methods(names.split(","), blend or BlendSettings(0.3), ModelProfile(), 8)
    set_header(engine, samples)
    with AnswersFile(path, {"x": 1}) as answers:
        return answer_all(engine, Preparer(engine, FEW), samples, methods, answers).rows


def test_methods_answer_the_same_prompt_with_different_amounts_of_computation(engine):
    rows = {row["method"]: row for row in run(engine)[:4]}
    tokens = {row["prompt_tokens"] for row in rows.values()}
    assert len(tokens) == 1
    full, prefix, reuse, blend = (rows[name] for name in ("full", "prefix", "reuse", "blend"))
    assert full["computed_tokens"] == full["prompt_tokens"]
    assert full["computed_tokens"] > prefix["computed_tokens"] > blend["computed_tokens"] > reuse["computed_tokens"]
    assert full["first_token_kl"] == 0
    assert prefix["first_token_kl"] == pytest.approx(0, abs=1e-6)
    assert prefix["answer"] == full["answer"]
    assert reuse["first_token_kl"] > 1e-4
    assert full["mode"] == "prefill"
    assert blend["mode"] == "blend"


def test_a_blend_at_ratio_1_agrees_with_full_recompute(engine):
    for row in run(engine, "full,hkvd@1,random@1,sink@1"):
        assert row["agrees_with_full"]
        assert row["first_token_kl"] == pytest.approx(0, abs=1e-6)


def test_an_interrupted_run_continues_where_it_stopped(engine, tmp_path):
    path = tmp_path / "answers.jsonl"
    first = run(engine, samples=SAMPLES[:1], path=path)
    path.write_text(path.read_text() + '{"id": "s1", "half')
    rows = run(engine, "full,reuse,blend,sink@0.5", path=path)
    assert [(r["id"], r["method"]) for r in rows] == [
        (s, m) for s in ("s0", "s1") for m in ("full", "reuse", "blend", "sink@0.5")
    ]
    kept = {r["method"]: r["ttft_s"] for r in first}
    assert all(r["ttft_s"] == kept[r["method"]] for r in rows if r["id"] == "s0" and r["method"] in kept)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0] == {"settings": {"x": 1}}
    assert len(lines) == 1 + 4 + 1 + 4  # no row appears twice


def test_answers_with_line_separators_are_read_back(engine, tmp_path):
    path = tmp_path / "answers.jsonl"
    asked = [replace(SAMPLES[0], question="When\u2028was the Proud Gull\x85refitted?")]
    assert run(engine, "full", asked, path) == run(engine, "full", asked, path)


def test_earlier_answers_are_compared_with_full_recompute_once_it_is_added(engine, tmp_path):
    path = tmp_path / "answers.jsonl"
    run(engine, "hkvd@1", SAMPLES[:1], path)
    for names in ("full,hkvd@1", "full,hkvd@1", "hkvd@1"):  # the comparison stays
        rows = run(engine, names, path=path)
        assert len(rows) == 2 * len(names.split(","))
        assert all(row["agrees_with_full"] for row in rows)
        assert find_worst(rows, ["hkvd@1"]) == (None, [])


def test_a_blend_at_another_ratio_is_not_taken_from_the_file(engine, tmp_path):
    path = tmp_path / "answers.jsonl"
    run(engine, "full,blend", SAMPLES[:1], path)
    rows = run(engine, "full,blend", SAMPLES[:1], path, BlendSettings(0.9))
    assert rows[1]["computed_tokens"] > 0.8 * rows[0]["computed_tokens"] - 40
    assert len(path.read_text().splitlines()) == 1 + 3


def test_answers_of_different_settings_or_foreign_files_are_refused(engine, tmp_path):
    path = tmp_path / "answers.jsonl"
    run(engine, "full", SAMPLES[:1], path)
    with pytest.raises(InputError, match=r"other settings \(x\)"):
        AnswersFile(path, {"x": 2})
    path.write_text("a diary\n")
    with pytest.raises(InputError, match="choose another file"):
        AnswersFile(path, {"x": 1})


def test_the_summary_counts_kinds_separately_and_follows_from_the_rows(engine):
    rows = run(engine)
    found = summarize(rows)
    assert set(found["kinds"]) == {"single", "cross"}
    for name, numbers in found["methods"].items():
        mine = [row for row in rows if row["method"] == name]
        assert numbers["n"] == 2
        assert numbers["computed_tokens"] == sum(row["computed_tokens"] for row in mine) / 2
        extra = sum(row["selection_tokens"] / row["prompt_tokens"] for row in mine) / 2
        assert numbers["compute_share"] == pytest.approx(numbers["computed_share"] + extra)
        assert (extra > 0) == (name == "blend")
        assert numbers["agreement_with_full"] == sum(row["agrees_with_full"] for row in mine) / 2
        if name == "full":
            assert numbers["intervals_95"]["agreement_with_full"] is None  # by definition
        else:
            low, high = numbers["intervals_95"]["agreement_with_full"]
            assert low <= numbers["agreement_with_full"] <= high
            assert high - low > 0.8
        # Two questions give no estimate of scatter.
        assert numbers["intervals_95"]["computed_share"] is numbers["intervals_95"]["ttft_s"]["median"] is None
    assert found["methods"]["full"]["computed_share"] == 1


def test_a_method_given_under_two_names_is_refused():
    blend = BlendSettings(0.3, "hkvd"), ModelProfile(), 8
    for names, twin in (("blend,hkvd@0.3@1", "blend"), ("sink@0.1,sink@0.10", "sink@0.1")):
        with pytest.raises(InputError, match=f"given twice: {twin} is the same"):
            make_methods(names.split(","), *blend)
    with pytest.raises(InputError, match=r"full is given twice\."):
        make_methods(("full", "full"), *blend)


def test_agreement_is_undefined_without_full_recompute(engine):
    found = summarize(run(engine, "reuse,blend"))["methods"]["blend"]
    assert found["agreement_with_full"] is None
    assert found["first_token_kl"] is None


def row(number, method, answer, em=1.0, kl=0.0, agrees=None, text=None):
    scores = {"em": em, "f1": em, "rouge_l": em, "first_token_kl": kl}
    return {
        "id": str(number),
        "method": method,
        "answer": answer,
        "text": text or answer,
        "agrees_with_full": answer == "a" if agrees is None else agrees,
        "task": "qa",
        "kind": "",
        "question": "Q",
        "answers": ["a"],
        **scores,
    }


def test_worst_disagreements_come_first_and_agreements_are_left_out():
    answers = [("a", 1, 0.1), ("b", 0, 5.0), ("c", 0, 0.2), ("a", 1, 9.0)]
    rows = []
    for number, (answer, em, kl) in enumerate(answers):
        rows += [row(number, "full", "a", 1, 0.0), row(number, "blend", answer, em, kl)]
    rows += [row(4, "full", "x", 0, 0.0), row(4, "blend", "y", 0, 8.0)]
    method, worst = find_worst(rows, ["blend"])
    assert method == "blend"
    assert [case["id"] for case in worst] == ["1", "2", "4"]
    assert worst[0]["replies"] == {"full": "a", "blend": "b"}


def test_answers_that_differ_after_their_first_line_are_disagreements():
    rows = [row(0, "full", "a"), row(0, "blend", "a", agrees=False, text="a\nand more")]
    method, worst = find_worst(rows, ["blend"])
    assert method == "blend"
    assert worst[0]["replies"]["blend"] == "a\nand more"


def test_the_next_method_is_shown_if_the_blend_always_agrees():
    rows = [row(0, "full", "a"), row(0, "blend", "a"), row(0, "reuse", "b", 0.0)]
    assert find_worst(rows, ["blend", "reuse"])[0] == "reuse"
    assert find_worst(rows[:2], ["blend"]) == (None, [])


def test_long_documents_are_cut_and_the_nearest_chunks_stay_in_reading_order(engine):
    class Letters:
        """Has distance 0 to the texts that contain the question."""

        def question(self, text):
            self.asked = text
            return 0

        def texts(self, texts):
            import numpy as np

            return [np.full((1, 1), 0.0 if self.asked in text else 1.0) for text in texts]

    words = [f"Sentence number {i} talks about topic{i} and nothing else." for i in range(60)]
    sample = Sample("s", "topic57", ("x",), (" ".join(words),))
    preparer = Preparer(engine, Preparation(k=3, chunk_tokens=64, max_tokens=4))
    preparer._embedder = Letters()  # tests of the index cover the retrieval model itself
    case = preparer.case(sample)
    assert len(case.chunks) == 3
    assert all(len(chunk.token_ids) <= 64 for chunk in case.chunks)
    assert "topic57 " in case.chunks[-1].text
    assert [c.text for c in case.chunks[:2]] == sorted((c.text for c in case.chunks[:2]), key=" ".join(words).index)


def test_few_shot_examples_are_never_cut(engine):
    examples = tuple(f"Dialogue: A: hello {i} there\nSummary: A greets {i}." for i in range(30))
    sample = Sample("s", "Summarize.", ("x",), examples, "pack", "dialogue")
    case = Preparer(engine, Preparation(k=3, chunk_tokens=80, max_tokens=4)).case(sample)
    assert len(case.chunks) == 3
    for chunk in case.chunks:
        assert len(chunk.token_ids) <= 80
        assert set(chunk.text.split("\n\n")) <= set(examples)


def test_chunks_beyond_the_window_are_left_out_and_counted(engine):
    texts = tuple(f"{i} " + "harbour lighthouse dawn " * 160 for i in range(12))
    case = Preparer(engine, Preparation(k=12, max_tokens=8)).case(Sample("s", "Q?", ("x",), texts, "ready"))
    assert case.left_out > 0
    assert len(case.chunks) + case.left_out == 12
    with pytest.raises(PromptTooLongError, match="Sample s"):
        Preparer(engine, FEW).case(Sample("s", "Q?", ("x",), ("harbour " * 9000,), "ready"))


def test_a_data_set_with_two_instructions_is_refused(engine):
    with pytest.raises(InputError, match="one instruction"):
        set_header(engine, [SAMPLES[0], Sample("t", "Q", ("x",), TEXTS, instruction="Do something else.")])


@pytest.mark.parametrize(
    ("names", "named"),
    [("fulll", "fulll"), ("full,full", "twice"), ("hkvd@2", "ratio"), ("nosuch@0.1", "nosuch"), ("", "at least one")],
)
def test_unknown_methods_are_named(names, named):
    with pytest.raises(InputError, match=named):
        make_methods([n for n in names.split(",") if n], BlendSettings(), ModelProfile(), 8)


def asked_by_chunk(engine, monkeypatch, max_tokens):
    """Make a case, and a list that collects the answers to its requests."""
    case, answers = Preparer(engine, replace(FEW, max_tokens=max_tokens)).case(SAMPLES[0]), []
    generate = engine.generate
    monkeypatch.setattr(engine, "generate", lambda *given: answers.append(generate(*given)) or answers[-1])
    return case, answers


def test_map_reduce_queries_every_chunk_and_then_combines_the_answers(engine, monkeypatch):
    case, answers = asked_by_chunk(engine, monkeypatch, 4)
    done = MapReduce("map_reduce", "MapReduce").reply(engine, case)
    assert len(answers) == 3 + 1
    assert done.text == answers[-1].text.strip()
    assert done.reused_tokens == 0
    assert done.computed_tokens == done.prompt_tokens > sum(len(chunk.token_ids) for chunk in case.chunks)
    assert done.ttft_s < done.total_s


def test_map_rerank_chooses_the_answer_with_the_highest_probability(engine, monkeypatch):
    case, answers = asked_by_chunk(engine, monkeypatch, 3)
    method = MapRerank("map_rerank", "MapRerank")
    done = method.reply(engine, case)
    parts = [each.text.strip() for each in answers]
    _, scored = method.ask(engine, case)
    scores = [score for _, score in scored]
    assert [text for text, _ in scored] == parts
    assert done.text == parts[scores.index(max(scores))]
    assert len(set(scores)) == 3
    assert all(0 < score <= 100 for score in scores)
    assert engine.on_first_logits is None


def test_map_rerank_requests_scores_from_an_engine_without_probabilities(engine, monkeypatch):
    answered = engine.generate("harbour", SamplingParams(2))
    case, method = Preparer(engine, FEW).case(SAMPLES[0]), MapRerank("map_rerank", "MapRerank")
    monkeypatch.delattr(engine, "on_first_logits")
    replies = cycle(["one Score: 20", "two\nscore: 90", "three"])
    monkeypatch.setattr(engine, "generate", lambda *given: replace(answered, text=next(replies)))
    done = method.reply(engine, case)
    assert done.text == "two"
    assert [score for _, score in method.ask(engine, case)[1]] == [20, 90, 0]
    assert done.ttft_s == done.total_s  # no answer can be shown before the last score


@pytest.mark.parametrize("name", ["langchain_map_reduce", "langchain_map_rerank", "map_reduce", "map_rerank"])
def test_chunkwise_methods_run_beside_full_recompute(engine, name):
    rows = run(engine, f"full,{name}", SAMPLES[:1])
    assert rows[1]["method"] == name
    assert rows[1]["computed_tokens"] == rows[1]["prompt_tokens"]
    assert rows[1]["first_token_kl"] is None


def test_evaluate_writes_a_file_that_grows_with_the_limit(engine, tmp_path):
    settings = EvalSettings("demo", limit=3, methods=("full", "reuse"), preparation=Preparation(2, 300, max_tokens=3))
    first = evaluate(engine, settings, tmp_path)
    more = evaluate(engine, EvalSettings(**{**vars(settings), "limit": 5}), tmp_path)
    assert first.answers_file == more.answers_file
    assert len(first.rows) == 6
    assert more.rows[:6] == first.rows
    assert more.summary["methods"]["full"]["n"] == 5


def test_a_changed_data_file_is_answered_again_and_recorded_with_its_hash(engine, tmp_path):
    file = tmp_path / "questions.jsonl"
    settings = EvalSettings(str(file), methods=("full", "reuse"), preparation=FEW)

    def once(answer):
        file.write_text(json.dumps({"id": "q", "question": "Q?", "answers": [answer], "chunks": list(TEXTS)}))
        return evaluate(engine, settings, tmp_path / "out")

    first, second = once("Ada"), once("Bo")
    assert second.rows[0]["answers"] == ["Bo"]
    assert first.answers_file != second.answers_file
    again = once("Ada")
    assert again.answers_file == first.answers_file
    assert again.rows == first.rows
    assert first.as_json()["settings"]["files"] == hash_files(str(file), None) != second.settings["files"]


def test_another_tokenizer_or_template_makes_another_run(engine):
    settings = EvalSettings("demo", preparation=FEW)
    kept, template = identify_run(engine, settings, {}, None), engine.tokenizer.chat_template
    assert kept == identify_run(engine, settings, {}, None)
    try:
        engine.tokenizer.chat_template = "{{ messages[0].content }}"
        assert identify_run(engine, settings, {}, None) != kept
    finally:
        engine.tokenizer.chat_template = template


def test_another_kv_writer_or_retriever_makes_another_run(engine, tmp_path, monkeypatch):
    def identity(preparation=FEW):
        return identify_run(engine, EvalSettings("demo", preparation=preparation), {}, None)

    plain = identity()
    monkeypatch.setattr(engine, "writer", WrittenBy("one", "writer"))
    first = identity()
    monkeypatch.setattr(engine, "writer", WrittenBy("two", "writer"))
    assert len({json.dumps(each, sort_keys=True) for each in (plain, first, identity())}) == 3

    asked_by = replace(FEW, query_encoder=str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"tuned")
    tuned = identity(asked_by)
    assert tuned == identity(asked_by)
    (tmp_path / "model.safetensors").write_bytes(b"tuned again")
    assert identity(asked_by) != tuned


def test_a_row_that_makes_no_prompt_is_skipped_and_named(engine, tmp_path):
    good = {"question": "Q?", "answers": ["x"], "chunks": list(TEXTS)}
    rows = [good, {**good, "chunks": ["harbour " * 9000]}, {**good, "chunks": []}, good]
    file = tmp_path / "questions.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    result = evaluate(engine, EvalSettings(str(file), methods=("full", "blend"), preparation=FEW))
    assert result.settings["questions"] == result.summary["methods"]["full"]["n"] == 2
    skipped = {row["where"]: row["why"] for row in result.as_json()["skipped"]}
    assert set(skipped) == {"line 2", "line 3"}
    assert "context window" in skipped["line 2"]
    page = write_report(tmp_path / "page.html", result).read_text()
    assert "2 rows of the data set could not be used" in page
    assert "line 2" in page
    file.write_text(json.dumps(rows[1]))
    with pytest.raises(InputError, match="None of the 1 questions"):
        evaluate(engine, EvalSettings(str(file), preparation=FEW))


def test_the_report_states_full_agreement_only_if_every_method_agrees(engine, tmp_path):
    def page(methods):
        result = evaluate(engine, EvalSettings(str(file), methods=methods, preparation=FEW))
        return write_report(tmp_path / "page.html", result).read_text(), result

    file = tmp_path / "questions.jsonl"
    file.write_text(json.dumps({"question": "Q?", "answers": ["x"], "chunks": list(TEXTS)}))
    text, result = page(("full", "hkvd@1"))
    assert result.summary["methods"]["hkvd@1"]["agreement_with_full"] == 1
    assert "every answer is the one full recompute gives" in text
    text, result = page(("full", "hkvd@1", "reuse"))
    assert result.summary["methods"]["reuse"]["agreement_with_full"] == 0
    assert "every answer is the one" not in text
    assert "Worst disagreements of full KV reuse" in text
    text, _ = page(("reuse", "blend"))
    assert "every answer is the one" not in text
    assert "Not known" in text


def test_answers_at_an_automatic_ratio_belong_to_the_profile(engine, monkeypatch):
    def identity(ratio):
        return identify_run(engine, EvalSettings("demo", blend=BlendSettings(ratio), preparation=FEW), {}, None)

    found = []
    for least in (0.1, 0.3):
        monkeypatch.setattr(engine, "profile", ModelProfile(least, text=TextRange(0.2, 0.1)))
        found.append((identity("auto"), identity(0.5)))
    assert found[0][0] != found[1][0]
    assert found[0][1] == found[1][1]


def test_chunks_of_a_blockwise_model_are_computed_without_a_header(engine, monkeypatch):
    monkeypatch.setattr(engine, "header_ids", ())
    monkeypatch.setattr(engine, "profile", ModelProfile(ratio=0.0, blockwise=True, origin="declared"))
    set_header(engine, SAMPLES)
    assert engine.header_ids == ()


def test_thoughts_of_a_model_are_not_scored_or_compared() -> None:
    engine = FakeEngine(tokenizer=thinking())
    engine.says = ("Hm.</think>", "\n\n1901.")
    prompt = rag_prompt(engine.tokenizer, [], "When?")
    assert generate_reply(engine, prompt, 8, BlendSettings()).text == "1901."
    assert {done.text for _, done in answer_by_each_method(engine, prompt, SamplingParams())} == {"1901."}
