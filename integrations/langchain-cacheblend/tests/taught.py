"""A small model that has learnt the scripted engine's answers by heart: a real model that calls tools and fills schemas.

The standard tests need a model that calls a tool with the number in the prompt, and no model of this size does so. The
fixture records the scripted engine's answers to the suite's prompts, and trains random weights until they give these answers.
"""

from __future__ import annotations

import json
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from plain import BUNDLED
from scripted import TEMPLATE

_SUITE = Path(__file__).with_name("test_standard_chat.py")
_MOST_STEPS = 400
_BATCH = 8
_SURE = 0.1  # nats at the worst token, so that no engine's rounding changes an answer


class Said(NamedTuple):
    """An answer of the scripted engine."""

    prompt: tuple[int, ...]
    answer: str


def transcript(file: Path) -> list[Said]:
    """Run the suite on the scripted engine, in a separate session within this one, and return all its answers."""
    alone = ["--capture=no", "-p", "no:xdist", "-p", "no:cacheprovider", "-o", "addopts=", "-q", "--no-header"]
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as said:
        patch.setenv("CACHEBLEND_TRANSCRIPT", str(file))
        assert pytest.main([*alone, str(_SUITE), "-k", "TestIntegrationScripted"]) == 0, said.getvalue()
    rows = map(json.loads, file.read_text().splitlines())
    return sorted({Said(tuple(row["prompt"]), row["answer"]) for row in rows})


def teach(said: list[Said], directory: Path) -> None:
    """Write a model to ``directory`` that gives these answers to these prompts."""
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=4096, **shape))
    end = tokenizer.eos_token_id
    # No answer begins with a separate space behind the prompt's end, which guided decoding would forbid.
    before = tokenizer(">", add_special_tokens=False).input_ids
    answers = [tokenizer(f">{each.answer}", add_special_tokens=False).input_ids[len(before) :] for each in said]
    rows = [([*each.prompt, *answer, end], len(each.prompt)) for each, answer in zip(said, answers, strict=True)]
    rows.sort(key=lambda row: len(row[0]))
    batches = [_batch(rows[at : at + _BATCH], end) for at in range(0, len(rows), _BATCH)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)  # 98 to 112 steps over six seeds; 215 to 427 at 1e-2
    for _ in range(_MOST_STEPS):
        optimizer.zero_grad()
        worst = 0.0
        for tokens, answered in batches:
            logits = model.lm_head(model.model(tokens[:, :-1]).last_hidden_state[answered])
            losses = cross_entropy(logits, tokens[:, 1:][answered], reduction="none")
            worst = max(worst, losses.max().item())
            losses.sum().backward()
        if worst < _SURE:
            return model.save_pretrained(directory)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    raise AssertionError(f"After {_MOST_STEPS} steps the model does not say what the scripted engine does.")


def _batch(rows: list[tuple[list[int], int]], end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return padded tokens, and a mask of the tokens, except the first, that the model is to predict."""
    width = max(len(row) for row, _ in rows)
    tokens = torch.tensor([row + [end] * (width - len(row)) for row, _ in rows])
    answered = torch.zeros(tokens.shape, dtype=torch.bool)
    for which, (row, begin) in zip(answered, rows, strict=True):
        which[begin : len(row)] = True
    return tokens, answered[:, 1:]
