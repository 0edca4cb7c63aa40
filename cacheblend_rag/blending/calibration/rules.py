"""Calibration: which check layers and which recompute ratio a model needs, measured on a few RAG prompts.

Which layer predicts the KV deviation of the later ones is a property of the model, so nothing is assumed.
For every prompt the full prefill gives the true KV of all layers; from it follow

- the *oracle*: the deviation of every layer, divided by the layer's mean, summed over layers;
- how well each layer agrees with it: overlap of the top tokens, and Spearman's rank correlation;
- what counts: the KL divergence between full prefill and blend, mean over the answer's first tokens (teacher-forced on the
  full prefill's own greedy answer), for every check layer, for pairs of them, and for every ratio.

The rules that turn this into a profile:

1. *Schedule*: the cheapest that reaches :data:`ENOUGH` of the best KL reduction any schedule reaches at the paper's ratio. Of
   single check layers the earliest is the cheapest; pairs (gradual filtering) are tried where they would be cheaper still.
   Reduction is 1 minus the blend's KL over full KV reuse's.
2. *Ratio*: the smallest of :data:`RATIOS` whose KL reduction is at least :data:`ENOUGH` with 95% confidence (bootstrap over
   prompts). Where none is, the smallest from the paper's 15% up that reaches :data:`ENOUGH` of what the largest reaches.
   With fewer than :data:`MIN_PROMPTS` prompts never less than 15%.
3. *Policy*: :data:`RANKED` policies need no dense pass, whose cost is counted as a ratio: the check layers passed, as a share
   of all layers. The one that reaches :data:`ENOUGH` with that confidence at the least compute takes the place of ``hkvd`` where
   it computes less, and with at least :data:`MIN_PROMPTS` prompts. Check layers stay in the profile for chunks without a rank.
4. If full KV reuse loses nothing on these prompts, they cannot tell schedules apart: the defaults stay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr

from cacheblend_rag.blending.calibration.measurement import PromptMeasurement, Scored, top
from cacheblend_rag.blending.fusor import BlendSchedule
from cacheblend_rag.blending.gate import GateSubject
from cacheblend_rag.blending.policies import policy
from cacheblend_rag.blending.policies.base import SelectionPolicy
from cacheblend_rag.blending.profile import ModelProfile
from cacheblend_rag.blending.rope import Rope
from cacheblend_rag.errors import InputError
from cacheblend_rag.prompts.prompt import TokenizedPrompt

RATIOS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3)
PAPER_RATIO = 0.15
ENOUGH = 0.9
MIN_PROMPTS = 8
RANKED = ("static", "static-query")
# Below this mean KL, in nats, full KV reuse answers as the full prefill does.
_HARMLESS = 0.01
_PAIR_WIDTHS = ((1.25, 1.0), (2.5, 1.0))
_RESAMPLES, _CONFIDENCE = 2000, 0.95

Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class LayerAgreement:
    """How well one layer's KV deviation predicts that of all layers.

    Attributes:
        layer: The layer.
        overlap: Share of the oracle's top tokens that are among the layer's, at the paper's ratio.
        spearman: Rank correlation with the oracle over all tokens.
        kl: Mean KL, in nats, of a blend that checks at this layer; None where it would cost too much to be of use.
    """

    layer: int
    overlap: float
    spearman: float
    kl: float | None


@dataclass(frozen=True)
class Calibration:
    """What was measured and what follows. KL in nats, means over prompts, at the paper's ratio unless said otherwise.

    Attributes:
        profile: What to use from now on.
        why: Which rules chose it, in words.
        prompts: Number of prompts.
        kl: Mean KL of ``none`` (full KV reuse), ``random`` and ``oracle`` selection.
        layers: Every layer from 1 on.
        schedules: Mean KL of every schedule tried.
        ratios: Mean KL of the chosen schedule at every ratio.
        ranked: The same of the policies that need no dense pass, by name.
    """

    profile: ModelProfile
    why: str
    prompts: int
    kl: dict[str, float]
    layers: list[LayerAgreement]
    schedules: list[tuple[BlendSchedule, float]]
    ratios: dict[float, float]
    ranked: dict[str, dict[float, float]]

    def as_json(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return asdict(self)


def calibrate(
    subject: GateSubject,
    rope: Rope,
    header_ids: Sequence[int],
    prompts: Sequence[TokenizedPrompt],
    end_token: int | None = None,
    progress: Callable[[str], None] | None = None,
    probe: Sequence[int] = (),
) -> Calibration:
    """Measure ``prompts`` and choose a profile by the rules above.

    Args:
        subject: The model.
        rope: Its rotation.
        header_ids: What chunks are precomputed behind.
        prompts: RAG prompts of at least two chunks each.
        end_token: Ends an answer.
        progress: Called with a line of text before each step.
        probe: What chunks are ranked behind; without one, policies that rank at indexing are left out.

    Raises:
        InputError: No prompt holds a token with stale KV.
    """
    say = progress or (lambda line: None)
    measurements = []
    for number, prompt in enumerate(prompts, 1):
        say(f"full prefill and chunks of prompt {number} of {len(prompts)}")
        measurement = PromptMeasurement(subject, rope, header_ids, prompt, end_token, probe)
        if measurement.usable:
            measurements.append(measurement)
    if not measurements:
        raise InputError("Calibration needs prompts of at least two chunks and a question behind them; there is none.")
    return _Calibrator(measurements, subject.num_layers, say, bool(probe)).run()


class _Calibrator:
    def __init__(
        self, measurements: list[PromptMeasurement], num_layers: int, say: Callable[[str], None], has_ranks: bool
    ):
        self._measurements, self._num_layers, self._say = measurements, num_layers, say
        self._has_ranks = has_ranks
        self._measured: dict[tuple[BlendSchedule, float], Floats] = {}

    def run(self) -> Calibration:
        default = BlendSchedule()
        generator = torch.Generator().manual_seed(0)
        self._say("full KV reuse, random and oracle selection")
        none = np.array([measurement.kl(policy("full-reuse"), 0.0, default) for measurement in self._measurements])
        ends = {
            "none": none,
            "random": np.array(
                [
                    measurement.kl(_random(measurement, generator), PAPER_RATIO, default)
                    for measurement in self._measurements
                ]
            ),
            "oracle": np.array(
                [measurement.kl(Scored(measurement.oracle), PAPER_RATIO, default) for measurement in self._measurements]
            ),
        }
        schedules = self._schedules(none)
        ranked: dict[str, dict[float, Floats]] = {}
        if none.mean() < _HARMLESS:
            profile, why, ratios = ModelProfile(), "full KV reuse changes nothing on these prompts; defaults kept", {}
        else:
            chosen, why = self._choose_schedule(schedules, none)
            ratios = {ratio: self._measure(chosen, ratio) for ratio in RATIOS}
            ratio, because = _choose_ratio(ratios, none)
            profile = ModelProfile(ratio, check_layers=chosen.check_layers, widths=chosen.widths)
            why = f"{why}; {because}"
            ranked = self._ranked_policies()
            compute = ratio + self._cost(chosen) / self._num_layers
            if (better := _cheaper(ranked, none, compute)) is not None:
                profile, because = replace(profile, policy=better[0], ratio=better[1]), better[2]
                why = f"{why}; {because}"
        kl = {name: float(values.mean()) for name, values in ends.items()}
        summary = {"prompts": len(self._measurements), "why": why, "kl": kl}
        return Calibration(
            profile=replace(profile, calibrated=summary),
            why=why,
            prompts=len(self._measurements),
            kl=kl,
            layers=self._agreement(),
            schedules=[(schedule, float(values.mean())) for schedule, values in schedules.items()],
            ratios={ratio: float(values.mean()) for ratio, values in ratios.items()},
            ranked={
                name: {ratio: float(values.mean()) for ratio, values in found.items()} for name, found in ranked.items()
            },
        )

    def _measure(self, schedule: BlendSchedule, ratio: float) -> Floats:
        """Return the KL of every prompt."""
        key = (schedule, ratio)
        if key not in self._measured:
            self._say(f"blends at {ratio:.0%}, check layers {', '.join(map(str, schedule.check_layers))}")
            self._measured[key] = np.array(
                [measurement.kl(policy("hkvd"), ratio, schedule) for measurement in self._measurements]
            )
        return self._measured[key]

    def _ranked_policies(self) -> dict[str, dict[float, Floats]]:
        """Return the KL of every prompt by the policies that rank at indexing, at every ratio."""
        found: dict[str, dict[float, Floats]] = {}
        for name in RANKED if self._has_ranks else ():
            self._say(f"blends by {name}")
            with suppress(InputError):  # a model whose attention cannot be watched
                found[name] = {
                    ratio: np.array([m.kl(policy(name), ratio, BlendSchedule()) for m in self._measurements])
                    for ratio in RATIOS
                }
        return found

    def _schedules(self, none: Floats) -> dict[BlendSchedule, Floats]:
        # A dense pass over more than half of the layers costs more than blending saves.
        singles = [BlendSchedule((layer,), (1.0,)) for layer in range(1, max(2, self._num_layers // 2 + 1))]
        found = {schedule: self._measure(schedule, PAPER_RATIO) for schedule in singles}
        best = min(found, key=lambda schedule: float(found[schedule].mean()))
        chosen, _ = self._choose_schedule(found, none)
        for last in sorted({best.check_layers[0], chosen.check_layers[0]}):
            for first, widths in ((first, widths) for first in range(1, last) for widths in _PAIR_WIDTHS):
                schedule = BlendSchedule((first, last), widths)
                if self._cost(schedule) < self._cost(chosen):
                    found[schedule] = self._measure(schedule, PAPER_RATIO)
        return found

    def _choose_schedule(
        self,
        found: dict[BlendSchedule, Floats],
        none: Floats,
    ) -> tuple[BlendSchedule, str]:
        reduction = {schedule: 1 - float(kl.mean()) / max(float(none.mean()), 1e-30) for schedule, kl in found.items()}
        best = max(reduction.values())
        enough = [schedule for schedule, value in reduction.items() if value >= ENOUGH * best]
        if best <= 0:
            return BlendSchedule(), "no schedule brings the blend closer to the full prefill than full KV reuse is"
        chosen = min(enough, key=self._cost)
        layers = ", ".join(map(str, chosen.check_layers))
        return chosen, (
            f"checking at layer {layers} is the cheapest schedule with {ENOUGH:.0%} of the best KL reduction "
            f"({reduction[chosen]:.0%} of full KV reuse's KL removed, at best {best:.0%}, at {PAPER_RATIO:.0%})"
        )

    def _cost(self, schedule: BlendSchedule) -> float:
        """Return the layers that a token passes on average, the sparse pass left out: it is the same for all."""
        sizes = [1.0, *(PAPER_RATIO * width for width in schedule.widths[:-1])]
        return sum(size * layer for size, layer in zip(sizes, schedule.check_layers, strict=True))

    def _agreement(self) -> list[LayerAgreement]:
        found = []
        for layer in range(1, self._num_layers):
            measured = self._measured.get((BlendSchedule((layer,), (1.0,)), PAPER_RATIO))
            found.append(
                LayerAgreement(
                    layer,
                    float(
                        np.mean(
                            [
                                _overlap(measurement.deviation[layer], measurement.oracle)
                                for measurement in self._measurements
                            ]
                        )
                    ),
                    float(
                        np.mean(
                            [
                                spearmanr(measurement.deviation[layer], measurement.oracle).statistic
                                for measurement in self._measurements
                            ]
                        )
                    ),
                    None if measured is None else float(measured.mean()),
                )
            )
        return found


def _cheaper(ranked: dict[str, dict[float, Floats]], none: Floats, compute: float) -> tuple[str, float, str] | None:
    """Return the ranked policy and ratio that suffice for sure at the least compute below ``compute``, and why."""
    if len(none) < MIN_PROMPTS:
        return None
    sure = [(ratio, name) for name, kl in ranked.items() if (ratio := _smallest_sure(kl, none)) is not None]
    if not sure or min(sure)[0] >= compute:
        return None
    ratio, name = min(sure, key=lambda found: found[0])
    return (
        name,
        ratio,
        f"{name} removes as much at {ratio:.0%} without a dense pass, which hkvd needs {compute:.0%} for in all",
    )


def _smallest_sure(measured: dict[float, Floats], none: Floats) -> float | None:
    """Return the smallest ratio that removes :data:`ENOUGH` of full KV reuse's KL with confidence; None if there is none."""
    draws = np.random.default_rng(0).integers(len(none), size=(_RESAMPLES, len(none)))
    for ratio, kl in measured.items():
        reduction = 1 - kl[draws].mean(1) / none[draws].mean(1).clip(1e-30)
        if float(np.quantile(reduction, 1 - _CONFIDENCE)) >= ENOUGH:
            return ratio
    return None


def _choose_ratio(measured: dict[float, Floats], none: Floats) -> tuple[float, str]:
    floor = 0.0 if len(none) >= MIN_PROMPTS else PAPER_RATIO
    ratio = _smallest_sure({ratio: kl for ratio, kl in measured.items() if ratio >= floor}, none)
    if ratio is not None:
        few = "" if not floor else f", and not less than {PAPER_RATIO:.0%} on only {len(none)} prompts"
        return ratio, (
            f"{ratio:.0%} is the smallest ratio that removes {ENOUGH:.0%} of full KV reuse's KL with "
            f"{_CONFIDENCE:.0%} confidence{few}"
        )
    mean = {ratio: 1 - float(kl.mean()) / float(none.mean()) for ratio, kl in measured.items() if ratio >= PAPER_RATIO}
    if max(mean.values()) <= 0:
        return PAPER_RATIO, "no ratio brings the blend closer to the full prefill than full KV reuse is"
    ratio = min(ratio for ratio, value in mean.items() if value >= ENOUGH * max(mean.values()))
    return ratio, f"no ratio removes {ENOUGH:.0%} of full KV reuse's KL for sure; {ratio:.0%} removes {mean[ratio]:.0%}"


def _random(measurement: PromptMeasurement, generator: torch.Generator) -> SelectionPolicy:
    return Scored(torch.rand(len(measurement.oracle), generator=generator))


def _overlap(deviation: torch.Tensor, oracle: torch.Tensor) -> float:
    count = max(1, round(PAPER_RATIO * len(oracle)))
    return len(set(top(deviation, count).tolist()) & set(top(oracle, count).tolist())) / count
