"""The ablation of what the token choice rests on."""

from __future__ import annotations

import pytest

from cacheblend_rag.evaluation import ablation
from cacheblend_rag.evaluation.prepare import Preparation, Preparer, set_header
from cacheblend_rag.prompts.prompt import tokenize
from tests.evaluation.test_run import SAMPLES

pytestmark = pytest.mark.slow


def test_every_variant_is_between_full_kv_reuse_and_full_recompute(engine, monkeypatch):
    monkeypatch.setattr(ablation, "RATIOS", (0.3, 1.0))
    set_header(engine, SAMPLES)
    preparer = Preparer(engine, Preparation(max_tokens=4))
    prompts = [tokenize(preparer.case(s).prompt, engine.tokenizer, engine.registry) for s in SAMPLES]
    found = ablation.ablate(engine, prompts, 1)
    none = found["none"]["0"]["kl"]
    assert none > 0
    for name, by_ratio in found.items():
        if "none" not in name:
            assert by_ratio["1"]["kl"] == pytest.approx(0, abs=1e-6)
            assert by_ratio["0.3"]["kl"] > 0
    assert found["hkvd, K and V"]["0.3"] != found["hkvd, V alone"]["0.3"]
    assert found["hkvd, chunks without header"]["0.3"] != found["hkvd, K and V"]["0.3"]


def test_the_command_prints_json(capsys, monkeypatch):
    import json

    monkeypatch.setattr(ablation, "RATIOS", (0.5,))
    ablation.main(
        ["--random-weights", "llama:2x256", "--prompts", "2", "--chunks", "2", "--chunk-tokens", "20", "--threads", "1"]
    )
    found = json.loads(capsys.readouterr().out)
    assert found["prompts"] == 2
    assert found["kl"]["oracle"]["0.5"]["low"] is None  # two prompts have no interval
