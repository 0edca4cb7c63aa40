"""Searches for the least compute that holds a standard.

Each candidate that is tried is first *looked* at on the same few prompts. A policy's ratios are halved until the least is found
that its look does not rule out, and of other policies only what would be cheaper is looked at. Then candidates go on from the
least compute on, a few side by side, because a prompt costs more than its blends. One is given up as soon as it could no longer
hold; prompts on which others failed come first, so that this shows soon. The first that holds on all prompts is the cheapest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from cacheblend_rag.blending.policies import policy
from cacheblend_rag.blending.settings import BlendSchedule
from cacheblend_rag.calibrate.candidates import RATIOS, Candidate
from cacheblend_rag.calibrate.compared import Comparison
from cacheblend_rag.calibrate.standard import Result, Standard
from cacheblend_rag.errors import InputError

LOOK: Final = 8
"""Prompts that every candidate which is tried at all is measured on, so that what a plot shows is no selection."""
_ABREAST: Final = 2

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
        trials: What was tried.
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
        self._order = {candidate: place for place, candidate in enumerate(candidates)}
        self.trials: list[Trial] = []
        self._failures = [0] * len(self._groups)

    @property
    def enough_prompts(self) -> bool:
        """Return whether there are enough prompts to show that a candidate holds."""
        return len(set(self._groups)) >= self._standard.needed

    def run(self) -> Trial | None:
        """Return the cheapest candidate that holds; None if there is none."""
        self._leave_out()
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
        trial = self._look(wanted)
        if trial is None:
            return held
        while trial.left and not trial.given_up:
            self._say(f"prompt {len(trial.results) + 1} of {len(self._groups)}: {wanted}")
            self._go_on(trial, trial.left[0])
        return trial if not trial.given_up and self._holds(trial) else held

    def look_at_rest(self) -> None:
        """Measure what was not tried on the first prompts: for a picture of it all."""
        for candidate in self._order:
            self._look(candidate)

    def best_so_far(self) -> Trial | None:
        """Return the cheapest candidate that does hold on the prompts it was tried on; None if there is none."""
        looks = min(LOOK, len(self._groups))
        held = [
            trial
            for trial in self.trials
            if trial.candidate.ratio and not trial.given_up and len(trial.results) >= looks and self._promises(trial)
        ]
        return min(held, key=lambda trial: trial.compute, default=None)

    def _holds(self, trial: Trial) -> bool:
        return self._standard.shown_by(trial.results) if self.enough_prompts else self._promises(trial)

    def _promises(self, trial: Trial) -> bool:
        """Say whether a candidate does hold on the prompts it was tried on, shown or not."""
        # On few prompts full KV reuse is not believed: nothing would be left to notice what they do not show.
        believed = trial.candidate.ratio > 0 or self.enough_prompts
        return believed and self._standard.supported_by(trial.results)

    def _leave_out(self) -> None:
        """Drop the ratios of each policy below the least that its look does not rule out; more ratio is taken to be nearer."""
        lines: dict[tuple[str, BlendSchedule], list[Candidate]] = {}
        for candidate in self._waiting:
            lines.setdefault((candidate.policy, candidate.schedule), []).append(candidate)
        cheapest = len(self._order)
        for line in lines.values():
            low, high = 0, sum(self._order[candidate] < cheapest for candidate in line)
            at = high - 1 if cheapest < len(self._order) else high // 2
            while low < high:
                trial = self._look(line[at])
                if trial is None or trial.given_up:
                    low = at + 1
                else:
                    high = at
                    if self._promises(trial):
                        cheapest = min(cheapest, self._order[line[at]])
                at = (low + high) // 2
            self._waiting = [candidate for candidate in self._waiting if candidate not in line[:low]]

    def _next_front(self) -> list[Trial]:
        front: list[Trial] = []
        while self._waiting and len(front) < _ABREAST:
            trial = self._look(self._waiting.pop(0))
            if trial is not None and not trial.given_up:
                front.append(trial)
        return front

    def _look(self, candidate: Candidate) -> Trial | None:
        """Return the trial of a candidate, begun if it was not; None for one that a model cannot have."""
        if (known := next((trial for trial in self.trials if trial.candidate == candidate), None)) is not None:
            return known
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
