"""Calibration: what it measures is what a blend does, and the profile follows from it by the documented rules."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cacheblend_rag.blending.calibration.measurement import ANSWER_TOKENS, PromptMeasurement, Scored, top
from cacheblend_rag.blending.calibration.rules import (
    MIN_PROMPTS,
    PAPER_RATIO,
    RANKED,
    RATIOS,
    _cheaper,
    _choose_ratio,
    calibrate,
)
from cacheblend_rag.blending.fusor import BlendSchedule, fuse
from cacheblend_rag.blending.policies import policy
from cacheblend_rag.engines.transformers.loading import usable_attention
from cacheblend_rag.engines.transformers.subject import TransformersSubject
from cacheblend_rag.engines.transformers.target import ModelRunner
from cacheblend_rag.errors import InputError
from cacheblend_rag.prompts.chunk import Chunk
from cacheblend_rag.prompts.prompt import ChunkSpan, TokenizedPrompt

pytestmark = pytest.mark.slow

HEADER = (3, 4, 5)
LAYERS = 4


def subject(initializer_range: float = 0.15) -> TransformersSubject:
    """A model whose chunks depend on each other: larger weights than usual, so that attention is not uniform."""
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
    return TransformersSubject(ModelRunner(usable_attention(LlamaForCausalLM(config).eval())))


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
    return PromptMeasurement(model, model.detect_rope(), HEADER, prompt(0), end_token=None)


def test_recomputing_everything_has_no_divergence(measurement):
    assert measurement.kl(policy("full-recompute"), 1.0, BlendSchedule()) == pytest.approx(0, abs=1e-9)
    assert measurement.kl(policy("full-reuse"), 0.0, BlendSchedule()) > 1e-3


def test_deviation_is_that_of_the_tokens_behind_the_exact_prefix(measurement):
    assert measurement.deviation.shape == (LAYERS, 2 * 20)  # the first chunk stands right behind the header
    layer_0, later = measurement.deviation[0], measurement.deviation[1:]
    assert float(layer_0.max()) < 1e-6 * float(later.mean())


@pytest.mark.parametrize("layer", [1, 2, 3])
def test_a_blend_chooses_by_the_deviation_that_calibration_computed(model, measurement, layer):
    target = model.target(prompt(0).token_ids, model.detect_rope())
    result = fuse(measurement._plan, target, policy("hkvd"), 0.2, BlendSchedule((layer,), (1.0,)))
    first = measurement._plan.stale[0].start
    assert result.recomputed.tolist() == [first + i for i in sorted(top(measurement.deviation[layer], 8).tolist())]


def test_given_scores_choose_as_the_check_layer_does(measurement):
    by_layer = measurement.kl(policy("hkvd"), 0.2, BlendSchedule((1,), (1.0,)))
    assert by_layer == pytest.approx(measurement.kl(Scored(measurement.deviation[1]), 0.2, BlendSchedule()), rel=1e-3)


def test_the_answer_ends_at_the_end_token(model):
    rope, first = model.detect_rope(), prompt(0)
    free = PromptMeasurement(model, rope, HEADER, first, end_token=None)
    assert len(free._answer) == len(free._truth) == ANSWER_TOKENS
    assert PromptMeasurement(model, rope, HEADER, first, end_token=free._answer[0])._answer == free._answer[:1]


def test_calibration_reports_every_layer_and_chooses_a_schedule_it_tried(model):
    steps: list[str] = []
    found = calibrate(model, model.detect_rope(), HEADER, [prompt(s) for s in range(4)], progress=steps.append)
    assert [x.layer for x in found.layers] == [1, 2, 3]
    assert all(0 <= x.overlap <= 1 and -1 <= x.spearman <= 1 for x in found.layers)
    assert {x.layer for x in found.layers if x.kl is not None} == {1, 2}  # deeper checks cost more than they save
    assert found.profile.schedule() in [schedule for schedule, _ in found.schedules]
    assert list(found.ratios) == list(RATIOS)
    assert found.profile.ratio in RATIOS
    assert found.profile.ratio >= PAPER_RATIO  # four prompts are no ground for less
    assert found.kl["oracle"] < found.kl["none"]
    assert found.profile.calibrated["prompts"] == found.prompts == 4
    assert steps
    json.dumps(found.as_json())


def test_prompts_on_which_reuse_is_harmless_leave_the_defaults():
    model = subject(initializer_range=0.001)
    found = calibrate(model, model.detect_rope(), HEADER, [prompt(s) for s in range(2)])
    assert (found.profile.ratio, found.profile.check_layers) == (0.15, (1,))
    assert "defaults kept" in found.why


def test_prompts_without_stale_kv_are_refused(model):
    with pytest.raises(InputError, match="two chunks"):
        calibrate(model, model.detect_rope(), HEADER, [prompt(0, chunks=1)])


def kl_per_ratio(removed: dict[float, float], prompts: int, noise: float = 0.0) -> dict[float, np.ndarray]:
    rng = np.random.default_rng(1)
    return {r: (1 - removed[r]) + noise * rng.uniform(0, 1, prompts) for r in RATIOS}


STEADY = {0.02: 0.3, 0.05: 0.95, 0.1: 0.96, 0.15: 0.97, 0.2: 0.98, 0.3: 0.99}


def test_the_smallest_sufficient_ratio_is_chosen():
    assert _choose_ratio(kl_per_ratio(STEADY, MIN_PROMPTS), np.ones(MIN_PROMPTS))[0] == 0.05


def test_few_prompts_never_go_below_the_papers_ratio():
    ratio, why = _choose_ratio(kl_per_ratio(STEADY, MIN_PROMPTS - 1), np.ones(MIN_PROMPTS - 1))
    assert ratio == PAPER_RATIO
    assert "only 7 prompts" in why


def test_a_ratio_that_is_sufficient_only_on_average_is_passed_over():
    measured = kl_per_ratio(STEADY, MIN_PROMPTS)
    measured[0.05] = np.array([0.75] + [0.0] * (MIN_PROMPTS - 1))  # 91% on average, but nearly nothing on one prompt
    assert _choose_ratio(measured, np.ones(MIN_PROMPTS))[0] == 0.1


def test_where_no_ratio_suffices_it_is_the_papers_or_more():
    weak = {0.02: 0.1, 0.05: 0.2, 0.1: 0.5, 0.15: 0.5, 0.2: 0.58, 0.3: 0.6}
    ratio, why = _choose_ratio(kl_per_ratio(weak, MIN_PROMPTS), np.ones(MIN_PROMPTS))
    assert ratio == 0.2  # 0.58 is 90% of 0.6, and 0.5 is not
    assert why.startswith("no ratio")


def test_a_model_that_blending_does_not_help_keeps_the_papers_ratio():
    worse = dict.fromkeys(RATIOS, -0.5)
    assert _choose_ratio(kl_per_ratio(worse, MIN_PROMPTS), np.ones(MIN_PROMPTS))[0] == PAPER_RATIO


PROBE = tuple(range(6, 26))


def test_policies_that_rank_at_indexing_are_measured_where_there_is_a_probe(model):
    prompts = [prompt(s) for s in range(2)]
    found = calibrate(model, model.detect_rope(), HEADER, prompts, probe=PROBE)
    assert list(found.ranked) == list(RANKED)
    assert all(list(kl) == list(RATIOS) for kl in found.ranked.values())
    assert found.profile.policy == "hkvd"  # two prompts are no ground for another
    assert calibrate(model, model.detect_rope(), HEADER, prompts).ranked == {}


def test_a_ranked_blend_in_calibration_is_the_engines_own(model):
    measured = PromptMeasurement(model, model.detect_rope(), HEADER, prompt(0), end_token=None, probe=PROBE)
    target = model.target(prompt(0).token_ids, model.detect_rope())
    result = fuse(measured._plan, target, policy("static"), 0.2, BlendSchedule())
    static = torch.cat([span.static_deviation() for span in measured._plan.stale])
    first = measured._plan.stale[0].start
    assert result.recomputed.tolist() == [first + i for i in sorted(top(static, 8).tolist())]


def test_the_policy_with_the_least_compute_that_suffices_is_chosen():
    none = np.ones(MIN_PROMPTS)
    late = {0.02: 0.3, 0.05: 0.5, 0.1: 0.6, 0.15: 0.95, 0.2: 0.96, 0.3: 0.97}
    ranked = {"static": kl_per_ratio(late, MIN_PROMPTS), "static-query": kl_per_ratio(STEADY, MIN_PROMPTS)}
    assert _cheaper(ranked, none, compute=0.3)[:2] == ("static-query", 0.05)
    assert _cheaper({"static": ranked["static"]}, none, compute=0.3)[:2] == ("static", 0.15)
    assert _cheaper({"static": ranked["static"]}, none, compute=0.15) is None
    few = {name: {r: kl[:-1] for r, kl in by_ratio.items()} for name, by_ratio in ranked.items()}
    assert _cheaper(few, none[:-1], compute=0.3) is None
