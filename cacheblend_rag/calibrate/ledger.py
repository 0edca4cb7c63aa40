"""Stores what a calibration has measured of its prompts, also in a file, so that a stopped calibration can resume."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from cacheblend_rag.blending.settings import left_out_by_count
from cacheblend_rag.calibrate.candidates import RATIOS, Candidate, LayerValues, layer_values
from cacheblend_rag.calibrate.compared import Coarser, Comparison, PromptMeasurement
from cacheblend_rag.calibrate.metrics import Judge
from cacheblend_rag.errors import InputError
from cacheblend_rag.prompts.prompt import TokenizedPrompt

# Cost of a prompt besides its blends, in full recomputes of the prompt: its chunks' KV and ranking, its own answer.
_MAKING = 3.0
_PASS = 1.0


@dataclass(frozen=True)
class PromptFacts:
    """Holds the facts of a prompt that do not depend on its blends.

    Attributes:
        tokens: Number of tokens.
        stale: Number of tokens with stale KV.
        forced: Number of tokens that are always computed.
        left_out: Share of the prompt's static deviation that each ratio leaves out; None if a chunk is not ranked.
    """

    tokens: int
    stale: int
    forced: int
    left_out: dict[str, float] | None


class Ledger:
    """Stores findings by key, and in a file of JSON lines if one is given; unreadable findings are measured again."""

    def __init__(self, file: Path | None = None):
        """Read the findings in the file; raises InputError if the file can be neither read nor created."""
        self._file = file
        self._found: dict[tuple[str, str], Any] = {}
        if file is None:
            return
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            lines = file.read_text("utf-8", errors="replace").splitlines() if file.exists() else []
        except OSError as error:
            raise InputError(
                f"{file}, where measurements are kept, cannot be used: {error.strerror or error}."
            ) from error
        for line in lines:
            try:
                prompt, what, value = json.loads(line)
            except ValueError:
                continue
            self._found[prompt, what] = value

    def find(self, prompt: str, what: str, measure: Callable[[], Any]) -> Any:
        """Return the stored finding; if there is none, store and return the result of ``measure``, converted to JSON and back."""
        if (prompt, what) not in self._found:
            text = json.dumps([prompt, what, measure()])
            if self._file is not None:
                with self._file.open("a", encoding="utf-8") as handle:
                    handle.write(f"\n{text}")  # the newline ends a line that a killed process left open
            self._found[prompt, what] = json.loads(text)[2]
        return self._found[prompt, what]

    def remove(self) -> None:
        """Delete the file."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)


class Prompts:
    """Holds the prompts of a calibration, each measured when it is first needed.

    Attributes:
        count: Number of prompts.
        done: Work done, in full recomputes of a prompt.
    """

    def __init__(self, make: Callable[[int], PromptMeasurement], keys: Sequence[str], ledger: Ledger):
        """Make prompt ``n``, with key ``keys[n]``, by ``make(n)``."""
        self._make, self._keys, self._ledger = make, keys, ledger
        self.count = len(keys)
        self._made: dict[int, PromptMeasurement] = {}
        self._seen: set[tuple[str, str]] = set()
        self.done = 0.0

    def facts(self, number: int) -> PromptFacts:
        """Return the facts of a prompt."""
        return PromptFacts(**self._find(number, "facts", _MAKING, lambda each: asdict(_facts(each))))

    def layers(self, number: int) -> LayerValues:
        """Return overlap and visible of each layer from 1 on, in one prompt."""
        return [(overlap, visible) for overlap, visible in self._find(number, "layers", _PASS, layer_values)]

    def compare(self, number: int, candidate: Candidate) -> Comparison:
        """Blend a prompt by a candidate and compare the blend with full recompute."""
        cost = 0.1 + candidate.ratio * self.facts(number).stale / self.facts(number).tokens
        return self._compared(number, f"blend: {candidate!r}", cost, lambda each: each.compare(candidate.options))

    def score(self, number: int) -> float:
        """Return the judge's score of a prompt's full recompute."""
        return float(self._find(number, "score", 0.0, lambda each: each.score()))

    def by_weights(self, number: int, bits: int, coarser: Coarser) -> Comparison:
        """Prefill a prompt by coarser weights and compare the prefill with full recompute."""
        return self._compared(number, f"weights: {bits} bits", _PASS, lambda each: each.by_weights(coarser))

    def _compared(
        self, number: int, what: str, cost: float, run: Callable[[PromptMeasurement], Comparison]
    ) -> Comparison:
        found = self._find(number, what, cost, lambda each: asdict(run(each)))
        return Comparison(tuple(found["agrees"]), tuple(found["kl"]), found["compute"], found["loss"])

    def _find(self, number: int, what: str, cost: float, measure: Callable[[PromptMeasurement], Any]) -> Any:
        key = self._keys[number], what
        found = self._ledger.find(*key, lambda: measure(self._measurement(number)))
        if key not in self._seen:
            self._seen.add(key)
            self.done += cost
        return found

    def _measurement(self, number: int) -> PromptMeasurement:
        if number not in self._made:
            self._made[number] = self._make(number)
        return self._made[number]


def key_of(prompt: TokenizedPrompt, continuation: Sequence[int], judge: Judge | None) -> str:
    """Return a hash of a prompt's tokens, chunk positions, continuation and judge, which identifies the prompt."""
    spans = [(span.start, span.end) for span in prompt.spans]
    return hashlib.sha256(repr((prompt.token_ids, spans, tuple(continuation), judge)).encode()).hexdigest()[:32]


def left_out(static: torch.Tensor, ratio: float) -> float:
    """Return the share of ``static``, ``[candidates]``, outside the tokens of highest value that ``ratio`` covers."""
    return float(left_out_by_count(static)[round(ratio * len(static))])


def _facts(measured: PromptMeasurement) -> PromptFacts:
    static = measured.static
    shares = None if static is None else {str(ratio): left_out(static, ratio) for ratio in RATIOS}
    return PromptFacts(len(measured.prompt.token_ids), measured.stale_tokens, measured.forced_tokens, shares)
