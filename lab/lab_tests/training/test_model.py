import json
from random import Random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cacheblend_lab.fiction.questions import QUESTION_KINDS
from cacheblend_lab.fiction.world import sample_context
from training.evaluate import METHODS, QUICK, evaluate, table
from training.export import fingerprint, load_exported
from training.tokenizer import NATIVE
from training.train import MODEL_FOLDER

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL_FOLDER)


@pytest.fixture(scope="module")
def llama():
    return AutoModelForCausalLM.from_pretrained(MODEL_FOLDER, dtype=torch.float32).eval()


@torch.no_grad()
def test_transformers_computes_the_same_logits_as_the_training_model(llama):
    model = load_exported(MODEL_FOLDER)
    ids = torch.randint(3, llama.config.vocab_size, (2, 700), generator=torch.Generator().manual_seed(0))
    ours = model.logits(model(ids, torch.arange(700).expand(2, -1))[0])
    assert torch.allclose(llama(ids).logits, ours, atol=1e-3)


@torch.no_grad()
def test_greedy_generation_answers_held_out_questions(llama, tokenizer):
    def count(text):
        return len(tokenizer(text, add_special_tokens=False).input_ids)

    right = asked = 0
    for seed in range(2):
        context = sample_context(Random(seed), count, chunks=4, chunk_tokens=96, questions=12, alias_share=0)
        for question in context.questions:
            prompt = NATIVE.opening + "\n\n".join(context.chunk_texts) + NATIVE.closing
            ids = tokenizer(prompt + NATIVE.question.format(q=question.text), return_tensors="pt").input_ids
            out = llama.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False)
            answer = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
            right += answer == question.answer
            asked += 1
    assert asked >= 20
    # The card measures about 97% over hundreds of questions; two contexts scatter around it.
    assert right / asked >= 0.9


def test_a_check_at_layer_2_restores_the_answers_lost_by_reuse():
    methods = QUICK[:3]
    results = evaluate(MODEL_FOLDER, seeds=[11], contexts=4, methods=methods, chunk_tokens=128)
    share = {name: sum(right for _, right in kinds["cross"]) / len(kinds["cross"]) for name, kinds in results.items()}
    assert len(results["full recompute"]["cross"]) >= 20
    assert share["full recompute"] >= 0.9
    assert share["full KV reuse"] <= share["full recompute"] - 0.3
    assert share["blend 15%, check layer 2"] >= share["full recompute"] - 0.1


def test_the_table_counts_every_question():
    single, cross = [("0-0", True), ("0-1", False)], [("0-1", True)]
    text = table({name: {**{kind: [] for kind in QUESTION_KINDS}, "single": single, "cross": cross} for name in QUICK})
    assert "| questions | 2 | 1 | 3 |" in text
    # These are Clopper-Pearson intervals for 1 of 2, 1 of 1 and 2 of 3.
    shares = "50.0 (1.3-98.7) | 100.0 (2.5-100.0) | 66.7 (9.4-99.2) |"
    assert f"| full recompute | {shares}" in text
    assert set(QUICK) <= set(METHODS)


def test_the_model_card_describes_these_weights():
    card = (MODEL_FOLDER / "README.md").read_text(encoding="utf-8")
    facts = fingerprint(MODEL_FOLDER)
    assert facts["xxh3_128"] in card
    assert f"{facts['steps']} steps" in card


def test_the_model_files_are_small_and_complete():
    names = {path.name for path in MODEL_FOLDER.iterdir()}
    assert {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    } <= names
    assert sum(path.stat().st_size for path in MODEL_FOLDER.iterdir()) <= 25 * 2**20
    config = json.loads((MODEL_FOLDER / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["max_position_embeddings"] == 8192
