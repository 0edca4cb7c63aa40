"""The output of random weights depends on the KV of every chunk; otherwise no parity gate could detect wrong KV."""

from __future__ import annotations

import pytest
import torch

from cacheblend_lab.bench.random_models import random_model
from cacheblend_lab.bench.workbench import BenchModel, open_workbench
from cacheblend_rag.blending.gate import TOLERANCE
from cacheblend_rag.blending.settings import FULL_RECOMPUTE
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.prompts.prompt import TokenizedPrompt
from tests.forking import TRACED

SPEC, CHUNKS, CHUNK = "llama:8x256", 6, 32


def prompts() -> tuple[list[int], list[list[int]]]:
    """Make a prompt of chunks and a question, and for each chunk a copy of the prompt with the chunk replaced."""
    ids = torch.randint(0, 512, ((CHUNKS + 1) * CHUNK,), generator=torch.Generator().manual_seed(0)).tolist()
    other, whole = ids[:CHUNK], [*ids[CHUNK:], 5, 6, 7]
    return whole, [whole[: i * CHUNK] + other + whole[(i + 1) * CHUNK :] for i in range(CHUNKS)]


def moved(want: torch.Tensor, got: torch.Tensor) -> float:
    """Return the largest difference of logits in standard deviations, as the gate measures it, without constant shifts."""
    difference = got - want
    return float((difference - difference.mean()).abs().max() / want.std())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_every_chunk_changes_the_output_of_a_random_model(dtype: torch.dtype) -> None:
    model = random_model(SPEC, torch.device("cpu"), dtype)
    whole, altered = prompts()
    want, *others = (model(torch.tensor([ids])).logits[0, -1].float() for ids in (whole, *altered))
    assert all(moved(want, got) > TOLERANCE[dtype] for got in others)


def test_equal_seeds_give_equal_weights_and_different_seeds_different_ones() -> None:
    first, again, other = (
        random_model(SPEC, torch.device("cpu"), torch.float32, seed).lm_head.weight for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.slow
@pytest.mark.vllm
def test_every_chunk_changes_the_output_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(*TRACED)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")  # the default four GiB would all be filled with zeros
    pytest.importorskip("vllm", reason="vLLM is not installed; make setup installs it")
    from tests.engines.vllm import forked  # noqa: F401

    whole, altered = prompts()
    with open_workbench(BenchModel(random_weights=SPEC, engine="vllm", dtype="bfloat16"), context=512) as place:
        want, *others = (
            place.engine.generate(
                TokenizedPrompt(tuple(ids), ()), SamplingParams(max_tokens=24), FULL_RECOMPUTE
            ).token_ids
            for ids in (whole, *altered)
        )
    assert want not in others
