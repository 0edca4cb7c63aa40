"""Defines a figure: the paper's finding, how it is measured here, and how it is drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cacheblend_lab.datasets import hash_files, load_data_set
from cacheblend_lab.evaluation.attention import AttentionInspector
from cacheblend_lab.evaluation.evaluate import EvalResult, EvalSettings, evaluate, identify_run
from cacheblend_lab.evaluation.prepare import Preparer, set_header
from cacheblend_lab.workbench import Workbench
from cacheblend_rag.blending.settings import FuseOptions
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.errors import InputError, ModelError, PromptTooLongError

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

Row = dict[str, Any]
Say = Callable[[float, str], None]
_INSPECTED = 6


@dataclass(frozen=True)
class Figure:
    """Holds one of the paper's figures.

    Attributes:
        paper: Finding of the paper, with numbers if the paper's text gives any.
        caption: How the figure was measured here, and its limitations.
        measure: Returns the data, one row per point; plain numbers and strings.
        minutes: Approximate share of a whole run's time, for the progress bar.
    """

    number: int
    title: str
    paper: str
    caption: str
    measure: Callable[[FigureContext, Say], list[Row]]
    draw: Callable[[Sequence[Row]], Drawing]
    minutes: float = 1.0


@dataclass
class FigureContext:
    """Holds model and settings that figures are measured with.

    Attributes:
        out: Directory of the run; answers go there, too, so that an interrupted run can resume.
        repeat: Timed rounds of each point of a sweep.
    """

    engine: TransformersEngine
    settings: EvalSettings
    out: Path
    repeat: int = 3
    _results: dict[Any, EvalResult] = field(default_factory=dict)
    _measured: dict[str, list[Row]] = field(default_factory=dict)

    @property
    def blend(self) -> FuseOptions:
        """Return the decisions about the run's blend."""
        return self.engine.profile.resolve(self.settings.blend, self.engine.num_layers)

    def evaluate(self, methods: Sequence[str], say: Say, **changes: Any) -> EvalResult:
        """Evaluate the data set by ``methods``; answers of earlier figures are reused.

        Raises:
            InputError: The data set's file has changed since the run began.
        """
        settings = replace(self.settings, methods=tuple(methods), **changes)
        result = evaluate(
            self.engine, settings, self.out, lambda done, total, at: say(done / total, f"question {done} of {total}")
        )
        if result.settings["files"] != self.identity["files"]:
            raise InputError(f"{self.settings.dataset} has changed since the run began; start it again.")
        self._results[(tuple(methods), tuple(sorted(changes)))] = result
        return result

    def once(self, name: str, measure: Callable[[], list[Row]]) -> list[Row]:
        """Return the result of ``measure``, which runs once for all figures that need it."""
        if name not in self._measured:
            self._measured[name] = measure()
        return self._measured[name]

    @property
    def workbench(self) -> Workbench:
        """Return the workbench of the engine, for sweeps over random tokens."""
        return Workbench.of(self.engine)

    @property
    def main(self) -> EvalResult | None:
        """Return the evaluation with the run's own settings; None if no figure needed it."""
        return next((r for (_, changed), r in self._results.items() if not changed and "blend" in r.labels), None)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Return the settings that every figure depends on; the data set's files are hashed once, when the run begins."""
        files = hash_files(self.settings.dataset, self.settings.data)
        return {**identify_run(self.engine, self.settings, files, None), "limit": self.settings.limit}

    @cached_property
    def inspectors(self) -> list[AttentionInspector]:
        """Return inspectors of a few prompts of the data set, questions that need two chunks first."""
        how = self.settings.preparation
        data = load_data_set(
            self.settings.dataset,
            self.settings.data,
            8 * _INSPECTED,
            self.settings.seed,
            self.engine.tokenizer,
            kinds=self.settings.kinds,
            chunks=how.k,
            chunk_tokens=how.chunk_tokens,
        )
        set_header(self.engine, data.samples)
        samples = sorted(data.samples, key=lambda sample: "cross" not in sample.kind)
        chosen = list({sample.group or sample.id: sample for sample in reversed(samples)}.values())
        chosen.sort(key=lambda sample: "cross" not in sample.kind)
        preparer = Preparer(self.engine, how)
        found: list[AttentionInspector] = []
        for sample in chosen:
            try:
                found.append(AttentionInspector.of(self.engine, preparer.case(sample).prompt))
            except (InputError, PromptTooLongError, ModelError) as error:
                why = error  # the sample has no prompt, or its prompt has no stale KV
            if len(found) == _INSPECTED:
                break
        if not found:
            raise ModelError(f"There is no prompt to look into: {why}")
        return found
