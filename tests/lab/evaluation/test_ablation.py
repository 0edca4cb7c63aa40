"""The ablations of what the token choice rests on."""

from __future__ import annotations

import json

import pytest
import torch

from cacheblend_rag.blending.policies import Candidates, policy
from cacheblend_rag.blending.settings import FuseOptions
from cacheblend_rag.lab.evaluation.ablation.__main__ import main
from cacheblend_rag.lab.evaluation.ablation.deviation import ablate_deviation
from cacheblend_rag.lab.evaluation.ablation.prompts import data_prompts
from cacheblend_rag.lab.evaluation.ablation.static import BASE, _Blocks, _PerChunk, ablate_static
from cacheblend_rag.lab.evaluation.ablation.tally import AblationTally
from cacheblend_rag.lab.evaluation.attention import AttentionInspector
from cacheblend_rag.lab.evaluation.prepare import Preparation, Preparer, set_header
from cacheblend_rag.prompts.prompt import tokenize
from tests.lab.evaluation.test_run import SAMPLES


@pytest.fixture
def prompts(engine):
    set_header(engine, SAMPLES)
    preparer = Preparer(engine, Preparation(max_tokens=4))
    return [tokenize(preparer.case(s).prompt, engine.tokenizer, engine.registry) for s in SAMPLES]


@pytest.mark.slow
@pytest.mark.parametrize("ablate", [ablate_deviation, ablate_static])
def test_every_variant_is_between_full_kv_reuse_and_full_recompute(engine, prompts, ablate):
    found = ablate(engine, prompts, 1, (0.3, 1.0))
    assert found["kl"]["none"]["0"]["kl"] > 0
    for name, by_ratio in found["kl"].items():
        if "none" not in name:
            if "blocks" not in name and "per chunk" not in name:
                assert by_ratio["1"]["kl"] == pytest.approx(0, abs=1e-6)
                assert found["agreement"][name]["1"]["agreement"] == 1
            assert by_ratio["0.3"]["kl"] > 0


@pytest.mark.slow
def test_variants_differ(engine, prompts):
    kl = ablate_deviation(engine, prompts, 1, (0.3,))["kl"]
    assert kl["hkvd, K and V"]["0.3"]["kl"] != kl["hkvd, V alone"]["0.3"]["kl"]
    assert kl["hkvd, chunks without header"]["0.3"]["kl"] != kl["hkvd, K and V"]["0.3"]["kl"]
    found = ablate_static(engine, prompts, 1, (0.3,))["kl"]
    apart = [
        "static",
        "static, K alone",
        "static, V alone",
        "static, probe: its tokens, shuffled",
        "query",
        "static-query",
    ]
    assert len({found[name]["0.3"]["kl"] for name in apart}) == len(apart)


@pytest.mark.slow
def test_the_variant_in_use_is_the_policy(engine, prompts, monkeypatch):
    engine.ranking = "now"
    engine.precompute([span.chunk for prompt in prompts for span in prompt.spans])
    found = ablate_static(engine, prompts[:1], 1, (0.3,))["kl"]
    from cacheblend_rag.blending.static import probe_ids
    from cacheblend_rag.lab.doctor.compared import PromptMeasurement

    probe = probe_ids(engine.tokenizer, engine.subject().vocab_size, engine.context_window)
    subject, end = engine.subject(), engine.tokenizer.eos_token_id
    measured = PromptMeasurement(subject, engine.rope, engine.header_ids, prompts[0], end, probe)
    for name in (BASE, "static-query", "query"):
        want = measured.kl(FuseOptions(policy(name), 0.3))
        assert found[name]["0.3"]["kl"] == pytest.approx(want, abs=1e-6), name


@pytest.mark.slow
def test_a_question_that_sees_everything_attends_as_over_stored_kv(engine, prompts):
    inspector = AttentionInspector(engine, prompts[0])
    want = inspector.measure_attention(FuseOptions(policy("full-reuse"), 0.0))
    none = inspector.measure_attention_without(torch.zeros(0, dtype=torch.int64))
    assert torch.allclose(none, want, atol=1e-5)
    hidden = torch.arange(prompts[0].spans[1].start, prompts[0].spans[1].end)
    less = inspector.measure_attention_without(hidden)
    assert less[..., hidden].abs().max() == 0
    assert torch.allclose(less.sum(-1), torch.ones(less.shape[:3]), atol=1e-5)


def candidates(sizes):
    positions = torch.arange(7, 7 + sum(sizes))
    chunk = torch.cat([torch.full((size,), number) for number, size in enumerate(sizes)])
    return Candidates(positions, chunk, torch.cat([torch.arange(size) for size in sizes]))


def test_a_budget_per_chunk_takes_the_same_share_of_each():
    scores = torch.cat([torch.arange(20.0), torch.arange(100.0, 140.0)])
    mask = _PerChunk(scores).select(candidates([20, 40]), 12)
    assert mask[:20].sum() == 4
    assert mask[20:].sum() == 8
    assert mask[16:20].all()
    assert mask[52:].all()


def test_blocks_are_whole_and_within_the_budget():
    scores = torch.zeros(60)
    scores[30] = 1.0  # position 37: the block from 32 to 47
    known = candidates([60])
    mask = _Blocks(scores).select(known, 20)
    assert known.positions[mask].tolist() == list(range(32, 48))


def test_variants_are_told_apart_prompt_by_prompt():
    tally = AblationTally()
    for prompt in range(10):
        tally.note("in use", 0.1, 10.0 * prompt)
        tally.note("other", 0.1, 10.0 * prompt - 1 - prompt / 100)
    row = tally.means("kl", "in use")["other"]["0.1"]
    assert row["low"] < 30 < 60 < row["high"]
    assert 1 < row["less_low"] < row["less"] < row["less_high"] < 1.1


@pytest.mark.slow
@pytest.mark.parametrize("of", ["static", "hkvd"])
def test_the_command_prints_json_and_tables(capsys, of):
    size = ["--prompts", "2", "--chunks", "2", "--chunk-tokens", "20", "--threads", "1"]
    main([of, "--random-weights", "llama:2x256", "--ratios", "0.5", "--check-layer", "1", *size])
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found["prompts"] == 2
    assert found["kl"]["random"]["0.5"]["low"] is None  # two prompts have no interval
    assert "| KL, nats | 0% | 50% |" in printed.err


@pytest.mark.slow
def test_prompts_can_be_of_a_data_set(engine, tmp_path):
    rows = [
        {"question": "Who?", "answers": ["Mia"], "context": [f"{name} sat down. " * 20, "It was late. " * 20]}
        for name in "AB"
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    found = data_prompts(engine, str(tmp_path / "rows.jsonl"), None, 5, 0, 6)
    assert [len(prompt.spans) > 0 for prompt in found] == [True, True]
