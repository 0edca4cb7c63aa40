"""Searches for the least compute that holds a standard.

Each tried candidate is first *looked* at on the same few prompts. The ratios of a policy are bisected for the least
ratio that its look does not rule out; of later policies only cheaper candidates are looked at. Then candidates continue
in order of compute, a few side by side, because a prompt costs more than its blends. A candidate is given up as soon as
it can no longer hold; prompts on which other candidates failed come first, to find this out soon. The first candidate
that holds on all prompts is the cheapest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from cacheblend_rag.blending.policies import policy
from cacheblend_rag.calibrate.candidates import RATIOS, Candidate
from cacheblend_rag.calibrate.compared import Comparison
from cacheblend_rag.calibrate.standard import Result, Standard
from cacheblend_rag.errors import InputError

LOOK: Final = 8
"""Number of prompts on which every tried candidate is measured, so that candidates are compared on the same prompts."""
_ABREAST: Final = 2

Measure = Callable[[int, Candidate], Comparison]
"""Blends the prompt of a number by a candidate, and compares the blend with full recompute."""


@dataclass
class Trial:
    """Holds a candidate and its measurements.

    Attributes:
        candidate: The candidate.
        results: One result for each measured prompt; the first :data:`LOOK` prompts are the same for every candidate.
        left: Numbers of the prompts that were not measured.
        given_up: Whether the candidate can no longer hold.
    """

    candidate: Candidate
    results: list[Result] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    given_up: bool = False

    @property
    def fair_results(self) -> list[Result]:
        """Return the results of all prompts, or of the first :data:`LOOK` if some are left: the later ones are biased."""
        return self.results[:LOOK] if self.left else self.results

    @property
    def compute(self) -> float:
        """Return the mean compute of the blends, as a share of the prompt's tokens through all layers."""
        return float(np.mean([compared.compute for _, compared in self.fair_results]))

    @property
    def kl(self) -> float:
        """Return the mean KL, in nats, over tokens and prompts."""
        return float(np.mean([value for _, compared in self.fair_results for value in compared.kl]))


class Search:
    """Tries candidates on prompts, and stores the measurements.

    Attributes:
        trials: The trial of every candidate tried.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        groups: Sequence[str],
        standard: Standard,
        measure: Measure,
        say: Callable[[str], None] = lambda line: None,
    ):
        """Prepare the search without a measurement.

        Args:
            candidates: The candidates, the least compute first.
            groups: Each prompt's group; prompts of one group share their chunks.
            standard: The standard that a candidate must reach.
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
        """Return the trial with the ratio ``steps`` above ``held``'s if the higher ratio holds, too, else ``held``."""
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

    def _holds(self, trial: Trial) -> bool:
        return self._standard.shown_by(trial.results) if self.enough_prompts else self._promises(trial)

    def _promises(self, trial: Trial) -> bool:
        """Return whether a candidate holds on its measured prompts, even if they are too few to show it."""
        # Full KV reuse needs enough prompts: it recomputes no token, so that unseen text could fail without notice.
        believed = trial.candidate.ratio > 0 or self.enough_prompts
        return believed and self._standard.supported_by(trial.results)

    def _leave_out(self) -> None:
        """Drop each policy's ratios below the least that its look does not rule out; a higher ratio is assumed to be nearer."""
        lines: dict[tuple[str, tuple[int, ...]], list[Candidate]] = {}
        for candidate in self._waiting:
            lines.setdefault((candidate.policy, candidate.check_layers), []).append(candidate)
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
        """Return the trial of a candidate, started if it is new; None if the model does not support the candidate."""
        if (known := next((trial for trial in self.trials if trial.candidate == candidate), None)) is not None:
            return known
        self._say(f"a look at {candidate}")
        trial = Trial(candidate, left=list(range(LOOK, len(self._groups))))
        try:
            for number in range(min(LOOK, len(self._groups))):
                trial.results.append((self._groups[number], self._measured(number, candidate)))
        except InputError:
            if policy(candidate.policy).needs_attention:
                return None  # the model's attention cannot be observed
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
