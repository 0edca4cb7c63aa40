"""Calibration measures actual blends, and the profile follows from the measurements by the documented rules."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import asdict, replace
from statistics import fmean

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from cacheblend_rag.blending.fusor import fuse
from cacheblend_rag.blending.policies import highest, policy
from cacheblend_rag.blending.settings import FuseOptions
from cacheblend_rag.calibrate import calibration
from cacheblend_rag.calibrate.calibration import CalibrationPrompt, calibrate
from cacheblend_rag.calibrate.candidates import Candidate, estimate_compute, examine_layers, layer_values
from cacheblend_rag.calibrate.compared import ANSWER_TOKENS, PromptMeasurement, decoded
from cacheblend_rag.calibrate.ledger import Ledger, key_of
from cacheblend_rag.calibrate.metrics import Judge
from cacheblend_rag.calibrate.rounding import rounded, rounded_logits, rounded_modules, rounded_weights
from cacheblend_rag.calibrate.search import LOOK
from cacheblend_rag.calibrate.standard import Standard
from cacheblend_rag.engines.transformers.owner import usable_attention
from cacheblend_rag.engines.transformers.target import ModelRunner, TransformersSubject
from cacheblend_rag.errors import InputError
from cacheblend_rag.prompts.chunk import Chunk
from cacheblend_rag.prompts.prompt import ChunkSpan, TokenizedPrompt
from tests.blending.prompts import Scored
from tests.calibrate.planning import ChunksAlone

pytestmark = pytest.mark.slow

HEADER = (3, 4, 5)
LAYERS = 4


def subject(initializer_range: float = 0.15) -> TransformersSubject:
    return TransformersSubject(ModelRunner(llama(initializer_range)))


def llama(initializer_range: float = 0.15) -> LlamaForCausalLM:
    """Make a model whose chunks depend on each other: larger weights than usual, so that attention is not uniform."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=initializer_range,
    )
    return usable_attention(LlamaForCausalLM(config).eval())


def prompt(seed: int, chunks: int = 3, tokens: int = 20) -> TokenizedPrompt:
    generator = torch.Generator().manual_seed(seed)
    ids, spans = list(HEADER), []
    for index in range(chunks):
        chunk = torch.randint(6, 64, (tokens,), generator=generator).tolist()
        spans.append(ChunkSpan(Chunk(f"{seed}-{index}", "", tuple(chunk)), len(ids), len(ids) + tokens))
        ids += chunk
    return TokenizedPrompt((*ids, *torch.randint(6, 64, (5,), generator=generator).tolist()), tuple(spans))


@pytest.fixture(scope="module")
def model():
    return subject()


@pytest.fixture(scope="module")
def measurement(model):
    return measured_by(model, prompt(0))


def measured_by(model, given: TokenizedPrompt, probe=(), **options) -> PromptMeasurement:
    rope = model.detect_rope()
    return PromptMeasurement(model, rope, given, ChunksAlone(model, rope, HEADER, probe), **options)


def kl(measured: PromptMeasurement, options: FuseOptions) -> float:
    return fmean(measured.compare(options).kl)


def test_recomputing_everything_has_no_divergence(measurement):
    assert kl(measurement, FuseOptions(policy("full-recompute"), 1.0)) == pytest.approx(0, abs=1e-9)
    assert kl(measurement, FuseOptions(policy("full-reuse"), 0.0)) > 1e-3


def test_calibration_needs_no_third_party_policy(model, monkeypatch):
    monkeypatch.setattr("cacheblend_rag.blending.policies._installed", list)
    measured = measured_by(model, prompt(0))
    monkeypatch.undo()
    assert kl(measured, FuseOptions(policy("full-recompute"), 1.0)) == pytest.approx(0, abs=1e-9)


def test_deviation_covers_the_tokens_behind_the_exact_prefix(measurement):
    deviation, _ = measurement.deviation()
    assert deviation.shape == (LAYERS, 2 * 20)  # the first chunk stands right behind the header
    layer_0, later = deviation[0], deviation[1:]
    assert float(layer_0.max()) < 1e-6 * float(later.mean())


@pytest.mark.parametrize("layer", [1, 2, 3])
def test_a_blend_selects_by_the_deviation_that_calibration_computed(model, measurement, layer):
    target = model.target(prompt(0).token_ids, model.detect_rope())
    result = fuse(measurement._plan, target, FuseOptions(policy("hkvd"), 0.2, (layer,)))
    first = measurement._plan.stale[0].start
    deviation, _ = measurement.deviation()
    assert result.recomputed.tolist() == (first + highest(deviation[layer], 8).nonzero().squeeze(1)).tolist()


def test_given_scores_select_as_the_check_layer_does(measurement):
    by_layer = kl(measurement, FuseOptions(policy("hkvd"), 0.2, (1,)))
    given = FuseOptions(Scored(measurement.deviation()[0][1]), 0.2)
    assert by_layer == pytest.approx(kl(measurement, given), rel=1e-3)


def test_the_answer_ends_at_the_end_token(model):
    free = measured_by(model, prompt(0))
    assert len(free._answer) == len(free._truth) == ANSWER_TOKENS
    assert measured_by(model, prompt(0), end_token=free._answer[0])._answer == free._answer[:1]


def test_all_tokens_of_the_answer_are_compared_as_in_decoding_one_by_one(model):
    rope, first = model.detect_rope(), prompt(0)
    measured = measured_by(model, first, PROBE)
    found = measured.compare(FuseOptions(policy("static"), 0.2))
    target = model.target(first.token_ids, rope)
    fuse(measured._plan, target, FuseOptions(policy("static"), 0.2))
    blended = [model.logits(target)]
    blended += [decoded(model, target, [token])[0] for token in measured._answer[:-1]]
    want = [int(a.argmax()) == int(b.argmax()) for a, b in zip(measured._truth, blended, strict=True)]
    assert list(found.agrees) == want
    assert 0 < sum(want) < ANSWER_TOKENS
    assert [int(logits.argmax()) for logits in measured._truth] == measured._answer


def test_a_continuation_takes_the_place_of_the_answer(model):
    follows = (7, 8, 9, 10)
    measured = measured_by(model, prompt(0), continuation=follows)
    assert measured.compare(FuseOptions(policy("full-recompute"), 1.0)).agrees == (True,) * 4
    logits, _ = model.full_prefill([*prompt(0).token_ids, *follows[:-1]])
    torch.testing.assert_close(measured._truth[-1], logits, rtol=1e-4, atol=1e-4)


def words(ids) -> str:
    return " ".join(map(str, ids))


def test_calibration_with_a_judge_lets_a_blend_generate_its_answer(model):
    rope, first, nobody = model.detect_rope(), prompt(0), Judge("em", ("nothing",), 6, words)
    answer = measured_by(model, first, judge=nobody)._answer
    assert len(answer) == 6
    judge = replace(nobody, answers=(words(answer),))
    measured = measured_by(model, first, judge=judge)
    assert measured.score() == 1
    assert measured.compare(FuseOptions(policy("full-recompute"), 1.0)).loss == 0
    target, blended = model.target(first.token_ids, rope), []
    fuse(measured._plan, target, FuseOptions(policy("full-reuse"), 0.0))
    logits = model.logits(target)
    while len(blended) < 6:
        blended.append(int(logits.argmax()))
        logits = decoded(model, target, blended[-1:])[0]
    found = measured.compare(FuseOptions(policy("full-reuse"), 0.0))
    assert found.loss == float(blended != answer) == 1  # otherwise the test would show nothing
    parts = next(i for i in range(6) if blended[i] != answer[i])
    assert found.agrees == (True,) * parts + (False,)
    assert len(found.kl) == parts + 1
    keys = {key_of(first, (), each) for each in (None, nobody, judge, replace(judge, metric="f1"))}
    assert len(keys) == 4


def test_a_judge_takes_the_first_line_of_an_answer_as_evaluation_does():
    judge = Judge("em", ("Paris",), 8, lambda ids: "".join(("\n", " Paris", "!\n", "Rome")[i] for i in ids))
    assert not (judge.ends([0, 0]) or judge.ends([0, 0, 1]))
    assert judge.ends([0, 0, 1, 2])
    assert judge.score([0, 0, 1, 2]) == judge.score([1, 2, 3]) == 1


def test_an_interrupted_calibration_by_answers_continues_where_it_stopped():
    model, ledger = subject(initializer_range=0.001), Ledger()
    judge = Judge("f1", ("nothing",), 3, words)
    rope = model.detect_rope()
    given = []
    for each in map(prompt, range(LOOK + 2)):
        answer = measured_by(model, each, judge=judge)._answer
        given.append(CalibrationPrompt(each, judge=replace(judge, answers=(words(answer),))))

    def go(progress=None):
        standard = Standard.as_good_by("f1", 0.7, 0.9)
        planner = ChunksAlone(model, rope, HEADER, PROBE)
        return calibrate(model, rope, given, planner, standard, ledger=ledger, progress=progress)

    def stop(done: float, total: int, text: str) -> None:
        if text.startswith("prompt") and not text.endswith("full recompute"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        go(stop)
    whole = go()
    assert (whole.verdict, whole.standard.full) == ("shown", 1.0)
    assert whole.chosen is not None
    assert "F1 no more than 30.0% below full recompute's 100.0%" in whole.why


PROBE = tuple(range(6, 26))


def test_compute_counts_every_pass_of_a_blend(model):
    first = prompt(0)
    measured = measured_by(model, first, PROBE)
    total = len(first.token_ids)
    assert (measured.stale_tokens, measured.forced_tokens) == (40, 5)
    want = {"static": 8 + 5, "static-query": 8 + 5 + 5, "hkvd": 8 + 5 + 40 * 2 / LAYERS}
    for name, tokens in want.items():
        each = Candidate(name, 0.2, *(((2,), (1.0,)) if name == "hkvd" else ()))
        found = measured.compare(each.options)
        assert found.compute == pytest.approx(tokens / total)
        assert estimate_compute(each, LAYERS, 40 / total, 5 / total) == pytest.approx(found.compute)


def test_a_ranked_blend_in_calibration_equals_the_engines(model):
    measured = measured_by(model, prompt(0), PROBE)
    target = model.target(prompt(0).token_ids, model.detect_rope())
    result = fuse(measured._plan, target, FuseOptions(policy("static"), 0.2))
    static = torch.cat([span.static_deviation() for span in measured._plan.stale])
    assert torch.equal(static, measured.static)
    first = measured._plan.stale[0].start
    assert result.recomputed.tolist() == (first + highest(static, 8).nonzero().squeeze(1)).tolist()


def run(model, prompts: int, standard: Standard | None = None, **options):
    given, rope = [CalibrationPrompt(prompt(seed)) for seed in range(prompts)], model.detect_rope()
    return calibrate(model, rope, given, ChunksAlone(model, rope, HEADER, PROBE), standard, **options)


def test_a_model_of_noise_is_not_blended_and_the_profile_records_the_reason(model):
    steps: list[str] = []
    found = run(model, 2, progress=lambda done, total, text: steps.append(text))
    assert (found.verdict, found.chosen, found.profile.reuse) == ("do not blend", None, "prefix")
    assert found.profile.text is None
    assert "do not blend" in found.why or "not blended" in found.why
    assert "299" in found.why
    assert {each.policy for each in found.measured} == {"full-reuse", "static", "query", "static-query", "hkvd"}
    assert all(each.agreement.low <= each.agreement.value <= each.agreement.high for each in found.measured)
    assert steps
    json.dumps(asdict(found))


def test_few_prompts_choose_the_smallest_passing_ratio_and_mark_it_not_shown():
    model = subject(initializer_range=0.001)  # its chunks hardly depend on each other
    found = run(model, 2)
    assert (found.verdict, found.profile.reuse) == ("not shown", "chunks")
    assert (found.profile.policy, found.profile.ratio) == ("static", 0.01)
    assert found.profile.calibrated["verdict"] == "not shown"
    assert found.profile.text is not None
    assert found.profile.text.left_out == 1.0  # 1% of 40 tokens rounds to none


def test_a_margin_raises_the_profiles_ratio_and_the_reason_names_the_smallest_passing_one():
    found = run(subject(initializer_range=0.001), 2, margin=2)
    assert (found.profile.policy, found.profile.ratio) == ("static", 0.03)
    assert found.profile.calibrated["why"].endswith("the least that does is static 1%")
    assert found.chosen is not None
    assert found.chosen.prompts == found.prompts


def test_enough_prompts_can_show_full_reuse():
    model = subject(initializer_range=0.001)
    standard = Standard(0.7, 0.9)
    found = run(model, standard.needed, standard)
    assert (found.verdict, found.profile.ratio) == ("shown", 0.0)
    assert found.chosen is not None
    assert found.chosen.agreement.low >= 0.7


def test_prompts_without_stale_kv_are_refused(model):
    with pytest.raises(InputError, match="two chunks"):
        calibrate(
            model, model.detect_rope(), [CalibrationPrompt(prompt(0, chunks=1))], lambda _: pytest.fail("planned")
        )


def test_a_layer_behind_a_window_that_hides_the_context_is_blind():
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.15,
        sliding_window=2,
    )
    model = TransformersSubject(ModelRunner(usable_attention(MistralForCausalLM(config).eval())))
    measured = [measured_by(model, prompt(seed), PROBE) for seed in range(2)]
    layers = examine_layers([layer_values(each) for each in measured], LAYERS)
    # A token sees one token before it: layer by layer one more token of each chunk of 20 can deviate.
    assert [each.visible for each in layers] == pytest.approx([1 / 20, 2 / 20, 3 / 20])
    found = run(model, 2)
    tried = [each for each in found.measured if each.policy == "hkvd"]
    assert all(each.ratio <= 0.1 for each in tried)
    whole = examine_layers([layer_values(measured_by(subject(), prompt(0)))], LAYERS)
    assert all(each.visible == 1 for each in whole)
    assert [each.layer for each in whole] == [1, 2, 3]
    assert not whole[2].offered  # a deeper check costs more than it saves


def test_unpromising_candidates_are_measured_on_the_first_prompts_alone(model):
    found = run(model, LOOK + 2)
    assert all(each.prompts >= LOOK for each in found.measured)
    assert all(each.prompts < LOOK + 2 for each in found.measured)


def test_recorded_measurements_are_not_repeated_and_lead_to_the_same_result(model, tmp_path, monkeypatch):
    file = tmp_path / "kept" / "ledger.jsonl"
    first = run(model, 3, ledger=Ledger(file))
    monkeypatch.setattr(calibration, "PromptMeasurement", None)  # nothing further can be measured
    assert run(model, 3, ledger=Ledger(file)) == first
    monkeypatch.undo()
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines[:-4], lines[-4][:20], *lines[-3:]]))
    assert run(model, 3, ledger=Ledger(file)) == first
    with pytest.raises(InputError, match="cannot be used"):
        Ledger(file / "below-a-file")


def test_an_interrupted_calibration_continues_later():
    model, ledger, said = subject(initializer_range=0.001), Ledger(), []

    def stop(done: float, total: int, text: str) -> None:
        said.append((done, total))
        if text.startswith("prompt"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(model, LOOK + 2, Standard(0.7, 0.9), progress=stop, ledger=ledger)
    assert all(done < total for done, total in said)
    whole = run(model, LOOK + 2, Standard(0.7, 0.9), ledger=ledger)
    assert whole == run(model, LOOK + 2, Standard(0.7, 0.9))


def test_weights_of_few_bits_have_few_values_close_to_the_original_ones():
    weight = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    assert (rounded(weight, 8) - weight).abs().max() <= weight.abs().max() / 127 / 2 + 1e-6
    assert len(rounded(weight, 4)[0, :32].unique()) <= 15


@pytest.mark.parametrize("bits", [4, 6, 8])
def test_weights_are_rounded_within_the_context_and_restored_afterwards(bits):
    model = llama()
    ids = torch.tensor([prompt(0).token_ids])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    rounded_copy = deepcopy(model)
    with torch.no_grad():
        for module in rounded_modules(rounded_copy):
            module.weight.copy_(rounded(module.weight, bits))
    with torch.no_grad(), rounded_weights(model, bits):
        got = model(input_ids=ids).logits
    torch.testing.assert_close(got, rounded_copy(input_ids=ids).logits)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    broken = next(each for each in model.modules() if isinstance(each, torch.nn.Linear))
    with pytest.raises(RuntimeError), rounded_weights(model, bits):
        broken(torch.zeros(1, 3))  # wrong width
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_standard_is_the_loss_of_coarser_weights_on_the_same_prompts():
    own = llama(initializer_range=0.06)
    model = TransformersSubject(ModelRunner(own))

    logits = rounded_logits(own, 3)
    found = run(model, 4, Standard.as_near_as(3), coarser=logits)
    measured = [measured_by(model, prompt(seed), PROBE) for seed in range(4)]
    kl = [value for each in measured for value in each.by_weights(logits).kl]
    assert found.standard.most_kl == pytest.approx(sum(kl) / len(kl), rel=1e-6)
    assert found.chosen is not None
    assert found.chosen.kl <= found.standard.most_kl
    assert found.profile.calibrated["standard"]["bits"] == 3
    assert "weights of 3 bits" in found.why
    cheaper = [each for each in found.measured if 0 < each.compute < found.chosen.compute and each.ratio]
    assert all(each.kl > found.standard.most_kl for each in cheaper)
