"""Varies `hkvd`: deviation of K, V or both; chunks computed behind the header or alone; first tokens forced or not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from cacheblend_rag.blending.policies import Candidates, SelectionPolicy, policy
from cacheblend_rag.blending.settings import BlendSchedule, FuseOptions
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.errors import ModelError
from cacheblend_rag.lab.doctor.compared import PromptMeasurement, Scored
from cacheblend_rag.lab.evaluation.ablation.tally import Comparisons
from cacheblend_rag.lab.inspection import PromptInspector
from cacheblend_rag.prompts.prompt import TokenizedPrompt

RATIOS = (0.02, 0.05, 0.15)
BASE = "hkvd, K and V"
SINKS = 2


class _WithSinks(SelectionPolicy):
    """HKVD with each chunk's first tokens forced."""

    name = "hkvd with sinks"
    needs_deviation = True

    def score(self, candidates: Candidates) -> torch.Tensor:
        assert candidates.deviation is not None
        return candidates.deviation.masked_fill(candidates.offset < SINKS, float("inf"))


def ablate_deviation(
    engine: TransformersEngine,
    prompts: Sequence[TokenizedPrompt],
    check_layer: int,
    ratios: Sequence[float] = RATIOS,
    progress: Callable[[str], object] | None = None,
) -> dict[str, Any]:
    """Return what :meth:`Comparisons.means` gives.

    ``none`` is full KV reuse, ``oracle`` knows all layers.

    Raises:
        ModelError: The model is not blended.
    """
    if engine.rope is None or not engine.gate.passed:
        raise ModelError(f"This model is not blended, so there is nothing to measure: {engine.gate.reason}.")
    compared = Comparisons()
    schedule = BlendSchedule((check_layer,), (1.0,))
    end = getattr(engine.tokenizer, "eos_token_id", None)
    for number, prompt in enumerate(prompts, 1):
        if progress:
            progress(f"prompt {number} of {len(prompts)}")
        headed = PromptMeasurement(engine.subject(), engine.rope, engine.header_ids, prompt, end)
        alone = PromptMeasurement(engine.subject(), engine.rope, (), prompt, end)
        k, v = PromptInspector(engine, prompt).measure_deviations()
        reuse = policy("full-reuse")
        runs = [("none", headed, reuse, 0.0), ("none, chunks without header", alone, reuse, 0.0)]
        for ratio in ratios:
            # The dense pass computes exactly the full prefill's KV, so these scores are what the check layer would see.
            runs += [
                (BASE, headed, policy("hkvd"), ratio),
                ("hkvd, K alone", headed, Scored(k[check_layer]), ratio),
                ("hkvd, V alone", headed, Scored(v[check_layer]), ratio),
                ("hkvd, first tokens forced", headed, _WithSinks(), ratio),
                ("hkvd, chunks without header", alone, policy("hkvd"), ratio),
                ("oracle", headed, Scored(headed.oracle), ratio),
                ("random", headed, policy("random"), ratio),
            ]
        for name, measurement, chosen, ratio in runs:
            compared.note(name, ratio, measurement.compare(FuseOptions(chosen, ratio, schedule)))
    return compared.means(BASE)
