"""Trains a writer with AdamW, checks it on held-out prompts, saves the state, and restores the best weights."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Final

import torch

from cacheblend_lab.learn.adapter import weights_of
from cacheblend_lab.learn.blend import Lesson
from cacheblend_lab.learn.draws import Draws
from cacheblend_rag.errors import InputError, ModelError, StoreError

_WARM_UP: Final = 0.03  # share of the training
_TRIED: Final = 3
_SYNC: Final = 10  # steps between synchronisations, so that the clock measures an asynchronous GPU
_SMALLER: Final = 0.7

Say = Callable[[str], None]


@dataclass(frozen=True)
class LearnSettings:
    """Holds the settings of training a writer; exactly one of ``minutes`` and ``steps`` must be set.

    Attributes:
        minutes: Duration, over which the learning rate decays.
        steps: Number of steps; equal settings with ``steps`` give equal writers.
        recomputed: Share of the steps that blend at ``ratio`` instead of at 0.
        ratio: Recompute ratio of these steps.
        patience: Number of checks without an improvement after which training stops.
        save_s: Seconds between two saves of the state for resuming.
    """

    minutes: float | None = None
    steps: int | None = None
    rank: int = 16
    rate: float = 5e-4
    recomputed: float = 0.5
    ratio: float = 0.15
    checks: int = 12
    patience: int = 5
    save_s: float = 60.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise `InputError` for values out of range."""
        if (self.minutes is None) == (self.steps is None):
            raise InputError("Give minutes or steps to train, one of them.")
        long = self.minutes if self.steps is None else self.steps
        if min(long or 0, self.rate, self.save_s) <= 0 or min(self.rank, self.checks) < 1:
            raise InputError("minutes, steps, rank, rate, checks and save_s must be above 0.")
        if not (0 <= self.recomputed <= 1 and 0 < self.ratio < 1 and self.patience >= 1):
            raise InputError("recomputed lies from 0 to 1, ratio between 0 and 1, and patience is at least 1.")

    @property
    def ratios(self) -> tuple[float, ...]:
        """Return the recompute ratios that the writer is trained for and checked at."""
        every = (0.0,) if self.recomputed < 1 else ()
        return (*every, self.ratio) if self.recomputed else every


@dataclass(frozen=True)
class LearnPoint:
    """Holds a point of the training curve.

    Attributes:
        loss: Mean KL of the batches since the last point; None at the start.
        kl: Held-out KL at each ratio, in nats.
    """

    step: int
    seconds: float
    loss: float | None
    kl: tuple[float, ...]


@dataclass
class Trained:
    """Holds the result of training.

    Attributes:
        before: Held-out KL at each ratio with the model's own chunk KV.
        curve: Start and checks.
        best: Best check, whose weights the trained writer has; None before the first check.
        stopped: Reason why training ended, as text; empty while it runs.
    """

    before: tuple[float, ...]
    curve: list[LearnPoint] = field(default_factory=list)
    best: LearnPoint | None = None
    stopped: str = ""
    prompts: int = 0
    tokens: int = 0

    def share(self, point: LearnPoint) -> float:
        """Return the KL at a point divided by the KL before training, averaged over the ratios."""
        return sum(a / max(b, 1e-12) for a, b in zip(point.kl, self.before, strict=True)) / len(self.before)


class Training:
    """Runs one training; an interrupted run resumes from its last saved state."""

    def __init__(
        self,
        lesson: Lesson,
        train: Draws,
        held_out: Draws,
        settings: LearnSettings,
        state: Path,
        say: Say,
        looked: int,
        origin: dict[str, Any],
    ):
        """Prepare the optimiser."""
        self._lesson, self._train, self._held_out, self._how = lesson, train, held_out, settings
        self._state, self._say, self._looked, self._origin = state, say, looked, origin
        self._weights = weights_of(lesson.writing)
        self._cuda = lesson.blender.device.type == "cuda"
        self._optimiser = torch.optim.AdamW(
            self._weights.values(), lr=settings.rate, betas=(0.9, 0.98), weight_decay=0.0, fused=self._cuda or None
        )
        self._step, self._spent = 0, 0.0
        self._kept: dict[str, torch.Tensor] = {}
        self._since: list[torch.Tensor] = []

    def run(self) -> Trained:
        """Train the writer, restore its best weights, and return the result."""
        self._trained = self._resumed() or self._begin()
        trained, how = self._trained, self._how
        self._began = self._saved = time.monotonic()
        while not trained.stopped and (share := self._share()) < 1:
            self._fitting(partial(self._learn, share))
            if self._share() >= 1 or int(self._share() * how.checks) > len(trained.curve) - 1:
                self._check()
            if time.monotonic() - self._saved > how.save_s:
                self._save()
        trained.stopped = trained.stopped or "all of it was done"
        if self._kept:
            self._load(self._kept)
        return trained

    def _elapsed(self) -> float:
        return self._spent + time.monotonic() - self._began

    def _share(self) -> float:
        """Return the share of the training that is done, from 0."""
        if self._how.steps is not None:
            return self._step / self._how.steps
        assert self._how.minutes is not None
        return self._elapsed() / (60 * self._how.minutes)

    def _learn(self, share: float) -> None:
        how, lesson = self._how, self._lesson
        batch = self._train.batch(self._step)
        ratio = how.ratio if Random(f"{how.seed} ratio {self._step}").random() < how.recomputed else 0.0
        loss = lesson.loss(batch, ratio)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self._weights.values(), 1.0, foreach=True)
        warm = min(1.0, share / _WARM_UP) if how.minutes else min(1.0, (self._step + 1) / (_WARM_UP * (how.steps or 1)))
        self._optimiser.param_groups[0]["lr"] = how.rate * max(0.02, warm * (0.5 + 0.5 * math.cos(math.pi * share)))
        self._optimiser.step()
        self._optimiser.zero_grad()
        self._since.append(loss.detach())
        self._step += 1
        self._trained.prompts += len(batch.ids)
        self._trained.tokens += batch.tokens
        if self._cuda and self._step % _SYNC == 0:
            torch.cuda.synchronize()

    def _fitting(self, work: Callable[[], None]) -> None:
        """Call ``work``; if the device runs out of memory, shrink the batches and call it again."""
        while True:
            with suppress(torch.OutOfMemoryError):
                work()
                return
            self._optimiser.zero_grad()
            torch.cuda.empty_cache()
            if self._train.shrink(_SMALLER):
                raise ModelError("The device has no room for a single prompt; use a smaller model, or another device.")
            self._say(f"out of memory: batches of {self._train.batch_tokens:,} tokens from now on")

    def _begin(self) -> Trained:
        """Report the expected duration, and measure the held-out KL of the model's own chunk KV."""
        self._fitting(lambda: self._try(1))  # warm up
        begin = time.monotonic()
        self._fitting(lambda: self._try(_TRIED))
        each = (time.monotonic() - begin) / _TRIED
        steps = self._how.steps or round(60 * (self._how.minutes or 0) / each)
        self._say(f"about {steps:,} steps of {each:.2f} s: {steps * each / 60:.1f} min, and {self._how.checks} checks")
        trained = Trained(self._kl(plain=True))
        trained.curve.append(LearnPoint(0, 0.0, None, trained.before))
        self._say(f"held-out KL of the model's own KV: {_in_words(self._how.ratios, trained.before)}")
        return trained

    def _try(self, steps: int) -> None:
        """Compute losses and gradients without changing the weights, for timing."""
        for number in range(steps):
            torch.autograd.backward(self._lesson.loss(self._train.batch(number), self._how.ratio))
            self._optimiser.zero_grad()
        if self._cuda:
            torch.cuda.synchronize()

    def _check(self) -> None:
        trained = self._trained
        loss = float(torch.stack(self._since).mean()) if self._since else None
        self._since = []
        point = LearnPoint(self._step, self._elapsed(), loss, self._kl())
        trained.curve.append(point)
        if not all(map(math.isfinite, point.kl)):
            trained.stopped = "the KL is no number any more; try a lower learning rate"
            return
        if trained.best is None or trained.share(point) < trained.share(trained.best):
            trained.best = point
            self._kept = {name: tensor.detach().cpu().clone() for name, tensor in self._weights.items()}
        elif len(trained.curve) - 1 - trained.curve.index(trained.best) >= self._how.patience:
            trained.stopped = f"no better for {self._how.patience} checks"
        said = "" if loss is None else f", learning {loss:.4f}"
        self._say(
            f"step {point.step:,}, {point.seconds:.0f} s, {trained.prompts:,} prompts{said}: held-out KL "
            f"{_in_words(self._how.ratios, point.kl)}, {trained.share(point):.0%} of the model's own"
        )

    @torch.no_grad()
    def _kl(self, plain: bool = False) -> tuple[float, ...]:
        """Return the held-out KL at each ratio, averaged over batches."""
        found = []
        for ratio in self._how.ratios:
            parts = [self._lesson.loss(self._held_out.batch(i), ratio, plain) for i in range(self._looked)]
            found.append(float(torch.stack(parts).mean()))
        return tuple(found)

    def _load(self, weights: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, tensor in weights.items():
                self._weights[name].copy_(tensor)

    def _save(self) -> None:
        """Write the state for resuming, completely or not at all."""
        self._saved = time.monotonic()
        state = {
            "settings": self._identity(),
            "step": self._step,
            "spent": self._elapsed(),
            "weights": {name: tensor.detach().cpu() for name, tensor in self._weights.items()},
            "kept": self._kept,
            "optimiser": self._optimiser.state_dict(),
            "since": [float(loss) for loss in self._since],
            "trained": asdict(self._trained),
        }
        beside = self._state.with_suffix(".new")
        try:
            torch.save(state, beside)
            beside.replace(self._state)
        except OSError as error:
            raise StoreError(f"{self._state} cannot be written ({error}); free some space.") from error

    def _resumed(self) -> Trained | None:
        """Restore the state from the file and return the result so far; None without a file."""
        if not self._state.exists():
            return None
        try:
            state = torch.load(self._state, map_location="cpu", weights_only=True)
        except Exception as error:
            raise InputError(f"{self._state} is damaged ({error}); remove it to begin anew.") from error
        if state["settings"] != self._identity():
            raise InputError(
                f"{self._state} was begun with other settings, texts, another model or another start; remove it to begin "
                "anew, or give the same."
            )
        self._load(state["weights"])
        self._optimiser.load_state_dict(state["optimiser"])
        self._step, self._spent, self._kept = state["step"], state["spent"], state["kept"]
        self._since = [torch.tensor(loss) for loss in state["since"]]
        saved = state["trained"]
        points = [LearnPoint(**{**point, "kl": tuple(point["kl"])}) for point in saved["curve"]]
        best = saved["best"] and points[[point.step for point in points].index(saved["best"]["step"])]
        self._say(f"going on from step {self._step:,}, {self._spent:.0f} s")
        return Trained(
            tuple(saved["before"]), points, best or None, saved["stopped"], saved["prompts"], saved["tokens"]
        )

    def _identity(self) -> dict[str, Any]:
        """Return the settings and identities that must be equal for a run to resume."""
        return {**asdict(self._how), "save_s": 0.0, "texts": self._train.identity, **self._origin}


def _in_words(ratios: Sequence[float], kl: Sequence[float]) -> str:
    return ", ".join(f"{value:.4f} at {ratio:.0%}" for ratio, value in zip(ratios, kl, strict=True))
