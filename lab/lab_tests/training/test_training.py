import re
from dataclasses import replace
from functools import partial
from itertools import pairwise
from random import Random

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from cacheblend_lab.fiction.questions import QUESTION_KINDS
from training import train
from training.batches import ANSWER, BIND_LAYER, FIND_LAYER, LINK_LAYER, VERDICT, Batch, Encoder, collate, make_example
from training.blending import Prompt, answers_match, blend, place_chunks, prefill
from training.export import fingerprint, load_exported
from training.model import DemoModel, ModelShape, grow, initialise, rope_table, rotate
from training.tokenizer import BOS, EOS, PAD
from training.train import MODEL_FOLDER, Progress, Stage

pytestmark = pytest.mark.slow

TOKENIZER = Tokenizer.from_file(str(MODEL_FOLDER / "tokenizer.json"))
ENCODER = Encoder(TOKENIZER)
TINY = (Stage(((1, 36, 4),), 2, tokens=300), Stage(((1, 36, 4),), 1, tokens=300), Stage(((1, 36, 4),), 2, tokens=300))


@pytest.fixture(scope="module")
def small_model():
    torch.manual_seed(0)
    model = DemoModel(ModelShape(ENCODER.size, hidden=64, layers=4, heads=2, kv_heads=1, head_dim=32, mlp=64))
    initialise(model)
    return model.eval()


@pytest.fixture(scope="module")
def prompt():
    chunks = tuple(
        ENCODER.encode(text) for text in ("The Silver Heron is old.", "It was launched in 1911.", "Bread rose.")
    )
    return Prompt((BOS, *ENCODER.encode("Answer from the notes.\n\n")), chunks, ENCODER.encode("\n\n"))


def test_every_answer_is_trained_and_followed_by_eos():
    example = make_example(Random(3), ENCODER, chunks=2, chunk_tokens=64, questions=8, gap=0)
    assert len(example.ids) == len(example.loss) == len(example.positions)
    ends = [index for index, token in enumerate(example.ids) if token == EOS]
    assert ends
    for end in ends:
        assert example.loss[end] >= ANSWER
        text = TOKENIZER.decode(example.ids[max(0, end - 60) : end])
        assert "Answer:" in text or "Answer" in text


def test_binding_targets_name_the_entity_of_a_value():
    example = make_example(Random(3), ENCODER, chunks=2, chunk_tokens=64, questions=8, gap=0, native_share=1)
    rows = [row for row in example.bind if row[1] == BIND_LAYER]
    assert rows
    for position, _, first, second, *_ in rows:
        before = example.ids[: position + 1]
        assert first in before
        assert second in before


def test_linking_targets_are_words_of_an_earlier_sentence():
    linked = set()
    for seed in range(30):
        example = make_example(Random(seed), ENCODER, chunks=4, chunk_tokens=64, questions=16, gap=0)
        for position, layer, first, second, *_ in example.bind:
            if layer == LINK_LAYER:
                assert {first, second} <= set(example.ids[: position + 1])
                linked.add(TOKENIZER.decode([first]))
    # These are units, topics of lists, and names behind nicknames.
    assert linked & {"hundred", "thousand", "million", "score"}
    assert linked & {"launched", "founded", "born"}
    assert len(linked) > 20


def test_only_the_verdict_of_a_comparison_is_marked():
    marked = 0
    for seed in range(6):
        example = make_example(Random(seed), ENCODER, chunks=4, chunk_tokens=64, questions=16, gap=0)
        for start in (
            at for at, mark in enumerate(example.loss) if mark == VERDICT and example.loss[at - 1] != VERDICT
        ):
            end = next(at for at in range(start, len(example.loss)) if example.loss[at] != VERDICT)
            assert TOKENIZER.decode(example.ids[start - 1 : start]) == ":"
            assert example.ids[end] == EOS
            marked += 1
    assert marked


def test_an_exercise_trains_only_its_verdict_which_is_the_earlier_year():
    for seed in range(6):
        example = make_example(Random(seed), ENCODER, chunks=1, chunk_tokens=36, questions=12, gap=0, native_share=1)
        *_, one, other = [end for end, token in enumerate(example.ids) if token == EOS]
        answer = TOKENIZER.decode(example.ids[one + 1 : other]).rpartition("Answer:")[2]
        first, second, verdict = re.fullmatch(r" (.+, \d+); (.+, \d+): (.+)", answer).groups()
        assert verdict == min(first, second, key=lambda said: int(said[-4:]))[:-6]
        trained = [at for at in range(one + 1, other) if example.loss[at]]
        assert TOKENIZER.decode([example.ids[at] for at in trained]).strip() == verdict
        assert {example.loss[at] for at in trained} == {VERDICT}


def test_a_run_from_scratch_has_no_exercises_and_no_look_ups():
    shape = {"chunks": 4, "chunk_tokens": 64, "questions": 16, "gap": 0}
    taught, plain = (make_example(Random(4), ENCODER, **shape, lessons=lessons) for lessons in (True, False))
    assert taught.ids[: len(plain.ids)] == plain.ids and len(taught.ids) > len(plain.ids)
    assert taught.find and not plain.find
    assert not any(stage.lessons for stage in train.CURRICULUM)
    assert all(stage.lessons for stage in train.CONTINUED)


def test_a_nickname_is_looked_up_in_the_earlier_sentence_that_explains_it():
    at_questions = 0
    for seed in range(20):
        example = make_example(Random(seed), ENCODER, chunks=4, chunk_tokens=64, questions=16, gap=0)
        owners = {row[:2]: row[2:4] for row in example.bind if row[5] == PAD or row[1] == LINK_LAYER}
        for position, start, end in example.find:
            assert end <= position
            # The lead of a nickname stands at the place itself, and in the question or the sentence at `position`.
            lead = ENCODER.lead(TOKENIZER.decode(example.ids[start:end]).strip())
            assert set(lead) <= set(example.ids[max(end, position - 40) : position + 1])
            assert (position, LINK_LAYER) in owners
            at_questions += example.loss[position + 1] == ANSWER + QUESTION_KINDS.index("alias")
    assert at_questions


@torch.no_grad()
def test_the_look_up_loss_is_the_log_of_the_attention_to_the_place():
    torch.manual_seed(2)
    model = DemoModel(ModelShape(300, hidden=64, layers=5, heads=4, kv_heads=2, head_dim=32, mlp=64))
    initialise(model)
    ids, positions = torch.randint(3, 300, (2, 31)), torch.arange(31).expand(2, -1)
    find = torch.tensor([[0, 12, 3, 5], [1, 20, 7, 8], [1, 29, 0, 30]])
    batch = Batch(ids, torch.zeros_like(ids), positions, torch.empty(0, 7), find)
    _, kept = model(ids[:, :-1], positions[:, :-1], (FIND_LAYER,))
    queries, keys, _ = model.blocks[FIND_LAYER].qkv(kept[FIND_LAYER])
    cos, sin = rope_table(positions[:, :-1], model.shape)
    queries, keys = rotate(queries[:, 3], cos, sin), rotate(keys[:, 1], cos, sin)
    scores = queries @ keys.transpose(1, 2) / 32**0.5 + torch.full((30, 30), -torch.inf).triu(1)
    share = scores.softmax(-1)
    wanted = -(share[0, 12, 3:5].sum().log() + share[1, 20, 7:8].sum().log()) / 3
    assert torch.allclose(train.look_up_loss(model, kept[FIND_LAYER], batch), wanted, atol=1e-5)
    assert train.look_up_loss(model, kept[FIND_LAYER], replace(batch, find=find[:0])) is None


def test_position_gaps_only_move_tokens_apart():
    example = make_example(Random(4), ENCODER, chunks=3, chunk_tokens=64, questions=4, gap=2000)
    steps = [b - a for a, b in zip(example.positions, example.positions[1:], strict=False)]
    assert min(steps) >= 1
    assert max(steps) > 1


def test_a_batch_is_padded_without_loss():
    examples = [make_example(Random(s), ENCODER, chunks=1, chunk_tokens=48, questions=4, gap=0) for s in range(3)]
    batch = collate(examples)
    for row, example in enumerate(examples):
        assert batch.loss[row, len(example.ids) :].sum() == 0
    assert set(batch.bind[:, 0].tolist()) <= {0, 1, 2}


def run_training(folder, monkeypatch, *extra, fail_at=None):
    monkeypatch.setattr(train, "CURRICULUM", TINY)
    monkeypatch.setattr(train, "CONTINUED", TINY[:1])
    monkeypatch.setattr(train, "ModelShape", partial(ModelShape, hidden=64, heads=2, kv_heads=1, head_dim=32, mlp=64))
    losses, calls = train.losses, []

    def counted(model, batch, verdict_weight):
        calls.append(1)
        if fail_at is not None and len(calls) == fail_at:
            raise RuntimeError("pulled the plug")
        return losses(model, batch, verdict_weight)

    with monkeypatch.context() as patch:
        patch.setattr(train, "losses", counted)
        train.main(
            [
                "--out",
                str(folder),
                "--model",
                str(folder / "model"),
                "--processes",
                "1",
                "--layers",
                "6",
                "--save-every",
                "1",
                *extra,
            ]
        )


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as monkeypatch:
        run_training(folder, monkeypatch)
    return folder / "model"


def test_an_interrupted_training_ends_with_the_same_weights(finished, tmp_path, monkeypatch):
    with pytest.raises(RuntimeError, match="pulled the plug"):
        run_training(tmp_path / "broken", monkeypatch, fail_at=4)
    run_training(tmp_path / "broken", monkeypatch)
    whole, resumed = (load_file(model / "model.safetensors") for model in (finished, tmp_path / "broken" / "model"))
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_a_finished_model_is_refined_with_the_last_stages_batches(finished, tmp_path, monkeypatch):
    run_training(tmp_path / "more", monkeypatch, "--start-from", str(finished), "--steps", "1")
    before, after = (load_file(folder / "model.safetensors") for folder in (finished, tmp_path / "more" / "model"))
    matrices = [name for name, weight in before.items() if weight.ndim == 2]
    assert not any(torch.equal(before[name], after[name]) for name in matrices)
    assert all(torch.allclose(before[name], after[name], atol=0.2) for name in before)
    assert int(fingerprint(tmp_path / "more" / "model")["steps"]) == int(fingerprint(finished)["steps"]) + 1


@torch.no_grad()
@pytest.mark.parametrize("layers", [6, 7, 9])
def test_a_grown_model_computes_the_same_logits_as_before(layers):
    torch.manual_seed(1)
    finished = DemoModel(ModelShape(300, hidden=64, layers=6, heads=2, kv_heads=1, head_dim=32, mlp=64))
    initialise(finished)
    finished.norm.weight.uniform_(0.05, 0.2)
    grown = grow(finished, layers)
    ids, positions = torch.randint(3, 300, (2, 40)), torch.arange(40).expand(2, -1)
    (before, kept), (after, kept_after) = (model(ids, positions, (BIND_LAYER,)) for model in (finished, grown))
    assert len(grown.blocks) == layers
    assert torch.equal(finished.logits(before), grown.logits(after))
    assert torch.equal(kept[BIND_LAYER], kept_after[BIND_LAYER])


@pytest.mark.parametrize("layers", [5, 10])
def test_a_model_does_not_shrink_and_grows_only_behind_the_binding_layers(layers):
    finished = DemoModel(ModelShape(300, hidden=64, layers=6, heads=2, kv_heads=1, head_dim=32, mlp=64))
    with pytest.raises(ValueError, match=f"at most 9 and not to {layers}"):
        grow(finished, layers)


@torch.no_grad()
def test_the_heads_of_a_new_model_differ():
    torch.manual_seed(1)
    model = DemoModel(ModelShape(300, hidden=64, layers=4, heads=4, kv_heads=2, head_dim=32, mlp=64))
    initialise(model)
    for layer in model.blocks[1:]:
        first, second, third, fourth = layer.self_attn.q_proj.weight.view(4, 32, 64)
        assert not torch.equal(first, second)
        assert not torch.equal(third, fourth)


def test_a_finished_model_is_trained_further_with_more_layers(finished, tmp_path, monkeypatch):
    run_training(tmp_path / "more", monkeypatch, "--start-from", str(finished), "--steps", "2", "--layers", "7")
    facts = fingerprint(tmp_path / "more" / "model")
    assert load_exported(tmp_path / "more" / "model").shape.layers == 7
    assert int(facts["steps"]) == int(fingerprint(finished)["steps"]) + 2
    assert fingerprint(finished)["xxh3_128"] in facts["origin"]
    assert "--layers 7" in facts["training"]


def test_stages_are_shortened_in_proportion():
    stages = (Stage(((1, 36, 4),), 300), Stage(((1, 36, 4),), 100))
    assert [stage.steps for stage in train.shortened(stages, 40)] == [30, 10]
    assert [stage.steps for stage in train.shortened(stages, 1)] == [1, 1]


def test_the_learning_rate_warms_up_and_ends_near_zero():
    stages = (Stage(((1, 36, 4),), 100),)
    rates = [train.learning_rate(Progress(step=step, stage_step=step), stages) for step in range(100)]
    assert rates[0] < 0.1 * max(rates)
    assert rates[-1] < 0.1 * max(rates)
    assert all(b <= a for a, b in pairwise(rates[50:]))


@torch.no_grad()
def test_a_blend_that_recomputes_all_tokens_equals_the_prefill(small_model, prompt):
    full, placed = prefill(small_model, prompt.ids), place_chunks(small_model, prompt)
    blended = blend(small_model, prompt, placed, check=2, ratio=1.0)
    for (k, v), (k2, v2) in zip(full, blended, strict=True):
        assert torch.allclose(k, k2, atol=1e-4)
        assert torch.allclose(v, v2, atol=1e-4)


@torch.no_grad()
def test_placed_chunks_are_exact_in_the_first_layer_and_in_the_first_chunk(small_model, prompt):
    full, placed = prefill(small_model, prompt.ids), place_chunks(small_model, prompt)
    start, end = prompt.spans[0]
    for (k, v), (k2, v2) in zip(full, placed, strict=True):
        assert torch.allclose(k[:, :, start:end], k2[:, :, start:end], atol=1e-4)
        assert torch.allclose(v[:, :, start:end], v2[:, :, start:end], atol=1e-4)
    for start, end in prompt.spans:
        assert torch.allclose(full[0][0][:, :, start:end], placed[0][0][:, :, start:end], atol=1e-4)
    start, end = prompt.spans[-1]
    assert not torch.allclose(full[-1][1][:, :, start:end], placed[-1][1][:, :, start:end], atol=1e-3)


@torch.no_grad()
def test_matching_an_answer_agrees_with_greedy_decoding(small_model, prompt):
    question = ENCODER.encode("\n\nQuestion: When?\nAnswer:")
    ids = [*prompt.ids, *question]
    for _ in range(4):
        hidden, _ = small_model(torch.tensor([ids]), torch.arange(len(ids))[None])
        ids.append(int(small_model.logits(hidden)[0, -1].argmax()))
    answer = ids[-4:]
    wrong = [*answer[:-1], (answer[-1] + 1) % ENCODER.size]
    cache = prefill(small_model, prompt.ids)
    assert answers_match(small_model, cache, [(question, answer), (question, wrong), (question, answer)]) == [
        True,
        False,
        True,
    ]
