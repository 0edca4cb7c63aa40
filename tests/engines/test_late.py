"""Tests that KV whose load takes longer than its computation is computed in place (on vLLM: vllm/test_loading.py)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cacheblend_rag.blending.costs import ComputeCost, Costs, TierCost
from cacheblend_rag.blending.settings import BlendSettings
from cacheblend_rag.engines.sampling import SamplingParams
from tests.blending import reference
from tests.blending.prompts import Scene, engine_for
from tests.blending.test_parity import model_of
from tests.store.held_up import HeldUpStore

SCENE = Scene()
AUTO = BlendSettings("auto", "hkvd", (1,))
ONE = SamplingParams(max_tokens=1)


@pytest.fixture
def store() -> Iterator[HeldUpStore]:
    with HeldUpStore() as store:
        yield store
        store.go_on.set()


def engine(store: HeldUpStore, *late: int, per_token_s: float = 1e-6) -> Any:
    """Make an engine whose costs assume a fast tier; the tier holds up the chunks of the numbers ``late``."""
    made = engine_for(model_of("llama"), SCENE, store=store)
    made.precompute(SCENE.chunks)
    store.far = {made.entries.own_key(SCENE.chunks[number].token_ids) for number in late}
    made.costs = Costs(made.num_layers, ComputeCost(0.0, per_token_s, 0.0), {"far": TierCost(0.0, 1e15)})
    made.logits = []
    made.on_first_logits = made.logits.append
    return made


@pytest.mark.parametrize("late", [(2,), (1, 3), (0,)])
def test_late_chunks_are_computed_in_place_and_the_blend_equals_the_reference(
    store: HeldUpStore, late: tuple[int, ...]
) -> None:
    blending = engine(store, *late)
    answer = blending.generate(SCENE.prompt, ONE, AUTO)
    assert answer.in_place == tuple(SCENE.chunks[number].id for number in late)
    assert answer.missing == ()  # late chunks stay stored
    assert f"stored KV for 4 of 4 chunks, {len(late)} of them too late and computed in place" in answer.reason
    assert all(load.tier == "ram" for load in answer.loads)
    want = reference.blend(model_of("llama"), SCENE.header, SCENE.parts(late), answer.ratio)
    assert (blending.logits[0] - want.logits).abs().max() < 1e-4


def test_a_prompt_whose_chunks_are_all_late_is_prefilled(store: HeldUpStore) -> None:
    blending = engine(store, 0, 1, 2, 3)
    answer = blending.generate(SCENE.prompt, ONE, AUTO)
    assert (answer.mode, answer.usage.reused_tokens, len(answer.in_place)) == ("prefill", 0, 4)
    with torch.no_grad():
        want = model_of("llama")(torch.tensor([SCENE.prompt.token_ids])).logits[0, -1]
    assert (blending.logits[0] - want).abs().max() < 1e-4


def test_a_late_tier_is_estimated_slower_afterwards(store: HeldUpStore) -> None:
    blending = engine(store, 2)
    rates = [blending.costs.tiers["far"].bytes_per_s]
    while rates[-1] > rates[0] / 4 and len(rates) < 30:  # a read that has not begun leaves the rate unchanged
        blending.generate(SCENE.prompt, ONE, AUTO)
        rates.append(blending.costs.tiers["far"].bytes_per_s)
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < rates[0] / 4


def test_a_prompt_waits_for_chunks_that_load_sooner_than_they_compute(store: HeldUpStore) -> None:
    blending = engine(store, 2, per_token_s=1.0)  # computing the prompt would take minutes
    store.go_on.set()
    assert blending.generate(SCENE.prompt, ONE, AUTO).in_place == ()


def test_a_fixed_ratio_waits_for_every_chunk(store: HeldUpStore) -> None:
    blending = engine(store, 2)
    store.go_on.set()
    assert blending.generate(SCENE.prompt, ONE, BlendSettings(0.3)).in_place == ()
