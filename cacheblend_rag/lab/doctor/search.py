"""Searches for the least compute that holds a standard.

Candidates are tried from the least compute on. Each is first *looked* at on the same few prompts; those that could still hold
go on, a few side by side, because a prompt costs more than its blends. A candidate is given up as soon as it could no longer
hold, were it to agree wholly on all prompts that are left; prompts on which others failed come first, so that this shows soon.
The first that holds on all prompts is the cheapest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from cacheblend_rag.blending.policies import policy
from cacheblend_rag.errors import InputError
from cacheblend_rag.lab.doctor.candidates import RATIOS, Candidate
from cacheblend_rag.lab.doctor.compared import Comparison, PromptMeasurement
from cacheblend_rag.lab.doctor.standard import Result, Standard

LOOK: Final = 8
"""Prompts that every candidate which is tried at all is measured on, so that what a plot shows is no selection."""
_ABREAST: Final = 4

Measure = Callable[[int, Candidate], Comparison]
"""Blends one of the prompts, by its number, and compares it with full recompute."""


@dataclass
class Trial:
    """Holds a candidate and what was measured of it.

    Attributes:
        candidate: The candidate.
        results: One for each prompt it was measured on; the first :data:`LOOK` are every candidate's.
        left: Numbers of the prompts it was not measured on.
        given_up: Whether it could no longer hold.
    """

    candidate: Candidate
    results: list[Result] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    given_up: bool = False

    @property
    def fair_results(self) -> list[Result]:
        """Return those of all prompts, or of the first ones alone: when it stopped says something about the others."""
        return self.results[:LOOK] if self.left else self.results

    @property
    def compute(self) -> float:
        """Return what its blends computed, as a share of the prompt's tokens through all layers, mean over prompts."""
        return float(np.mean([compared.compute for _, compared in self.fair_results]))

    @property
    def kl(self) -> float:
        """Return the mean KL, in nats, over tokens and prompts."""
        return float(np.mean([value for _, compared in self.fair_results for value in compared.kl]))


class Search:
    """Tries candidates on prompts, and keeps what was measured.

    Attributes:
        trials: What was tried, in the order of compute.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        groups: Sequence[str],
        standard: Standard,
        measure: Measure,
        say: Callable[[str], None] = lambda line: None,
    ):
        """Measure nothing yet.

        Args:
            candidates: The least compute first.
            groups: Each prompt's group; prompts of one group share their chunks.
            standard: What a candidate must reach.
            measure: Blends a prompt.
            say: Called with a line of text before each step.
        """
        self._waiting, self._groups, self._standard = list(candidates), list(groups), standard
        self._measure, self._say = measure, say
        self.trials: list[Trial] = []
        self._failures = [0] * len(self._groups)

    @property
    def enough_prompts(self) -> bool:
        """Return whether there are enough prompts to show that a candidate holds."""
        return len(set(self._groups)) >= self._standard.needed

    def run(self) -> Trial | None:
        """Return the cheapest candidate that holds; None if there is none."""
        while front := self._next_front():
            rest = sorted(front[0].left, key=lambda number: -self._failures[number])
            for number in rest:
                running = [trial for trial in front if not trial.given_up]
                if not running:
                    break
                names = ", ".join(str(trial.candidate) for trial in running)
                self._say(f"prompt {len(running[0].results) + 1} of {len(self._groups)}: {names}")
                for trial in running:
                    self._go_on(trial, number)
            for trial in front:
                if not trial.given_up and self._holds(trial):
                    return trial
        return None

    def step_above(self, held: Trial, steps: int) -> Trial:
        """Return the trial of a ratio so many steps above one that holds, if it does as well, else that one."""
        higher = [ratio for ratio in RATIOS if ratio > held.candidate.ratio > 0][:steps]
        if not higher:
            return held
        wanted = replace(held.candidate, ratio=higher[-1])
        trial = next((trial for trial in self.trials if trial.candidate == wanted), None) or self._look(wanted)
        if trial is None:
            return held
        self._waiting = [candidate for candidate in self._waiting if candidate != wanted]
        while trial.left and not trial.given_up:
            self._say(f"prompt {len(trial.results) + 1} of {len(self._groups)}: {wanted}")
            self._go_on(trial, trial.left[0])
        return trial if not trial.given_up and self._holds(trial) else held

    def look_at_rest(self) -> None:
        """Measure what was not tried on the first prompts: for a picture of it all."""
        while self._waiting:
            self._look(self._waiting.pop(0))

    def _holds(self, trial: Trial) -> bool:
        if self.enough_prompts:
            return self._standard.shown_by(trial.results)
        # On few prompts full KV reuse is not believed: nothing would be left to notice what they do not show.
        return trial.candidate.ratio > 0 and self._standard.supported_by(trial.results)

    def _next_front(self) -> list[Trial]:
        front: list[Trial] = []
        while self._waiting and len(front) < _ABREAST:
            trial = self._look(self._waiting.pop(0))
            if trial is not None and not trial.given_up:
                front.append(trial)
        return front

    def _look(self, candidate: Candidate) -> Trial | None:
        self._say(f"a look at {candidate}")
        trial = Trial(candidate, left=list(range(LOOK, len(self._groups))))
        try:
            for number in range(min(LOOK, len(self._groups))):
                trial.results.append((self._groups[number], self._measured(number, candidate)))
        except InputError:
            if policy(candidate.policy).needs_attention:
                return None  # a model whose attention cannot be watched
            raise
        self.trials.append(trial)
        self._judge(trial)
        return trial

    def _go_on(self, trial: Trial, number: int) -> None:
        trial.left.remove(number)
        trial.results.append((self._groups[number], self._measured(number, trial.candidate)))
        self._judge(trial)

    def _measured(self, number: int, candidate: Candidate) -> Comparison:
        found = self._measure(number, candidate)
        self._failures[number] += not all(found.agrees)
        return found

    def _judge(self, trial: Trial) -> None:
        trial.given_up = not self._standard.within_reach(trial.results, [self._groups[number] for number in trial.left])


class Prompts:
    """Holds the prompts of a calibration, measured when they are first needed."""

    def __init__(self, make: Callable[[int], PromptMeasurement], count: int):
        """Make prompt ``n`` of ``count`` by ``make(n)``."""
        self._make = make
        self._made: dict[int, PromptMeasurement] = {}
        self.count = count

    def __getitem__(self, number: int) -> PromptMeasurement:
        """Return one, measured by full recompute."""
        if number not in self._made:
            self._made[number] = self._make(number)
        return self._made[number]

    def compare(self, number: int, candidate: Candidate) -> Comparison:
        """Blend one of them."""
        return self[number].compare(candidate.options)

    def measured(self) -> list[PromptMeasurement]:
        """Return those that were needed so far."""
        return [self._made[number] for number in sorted(self._made)]
