"""Stores a training run in a directory: checkpoints, the figures of every step, and the age of the index; resumes a run."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, Final

import torch
from filelock import FileLock, Timeout
from torch import Tensor, nn

from cacheblend_lab.plotting import figure, save_figure
from cacheblend_lab.realm.model import load_weights, save_weights
from cacheblend_rag.errors import InputError, ModelError, StoreError

METRICS: Final = "metrics.jsonl"
_SETTINGS = "settings.json"
_KEPT = 2
_CLIP = 1.0
_WARM_UP = 0.1

Told = dict[str, float | int | str]
Say = Callable[[float, int, str], None]


@dataclass(frozen=True)
class Stage:
    """Describes one stage of training.

    Attributes:
        rate: Highest learning rate; the rate rises over the first tenth of the steps, and falls to 0 at the last step.
        loss: Returns the loss of a step (None for no update) and figures to log.
        saved: Called after each checkpoint with the step.
    """

    number: int
    name: str
    steps: int
    rate: float
    loss: Callable[[int], tuple[Tensor | None, Told]]
    parameters: Iterable[nn.Parameter]
    saved: Callable[[int], None] = lambda step: None


class RunDirectory:
    """Stores the settings, checkpoints and figures of a run; settings and checkpoints are written aside and renamed."""

    def __init__(self, path: Path):
        """Use a directory."""
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.index = path / "index"

    @contextmanager
    def alone(self, settings: dict[str, Any]) -> Iterator[None]:
        """Make the directory, lock it against other runs, and check that an earlier run in it had equal settings.

        Raises:
            StoreError: Another run is active in the directory, or the directory cannot be written.
            InputError: The directory holds a run with other settings.
        """
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self.path / "run.lock")
            lock.acquire(timeout=0)
        except Timeout:
            raise StoreError(f"Another run is at work in {self.path}. Wait for it, or use another --output.") from None
        except OSError as error:
            raise StoreError(f"{self.path} cannot be used: {error.strerror or error}.") from error
        try:
            self._same(settings)
            for left in self.checkpoints.glob(".building*"):
                shutil.rmtree(left)
            yield
        finally:
            lock.release()

    def settings(self) -> dict[str, Any]:
        """Return the settings of the run in the directory; empty without a run."""
        file = self.path / _SETTINGS
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        return found

    def _same(self, settings: dict[str, Any]) -> None:
        before = self.settings()
        other = [name for name in settings if before.get(name) != settings[name]]
        if before and other:
            raise InputError(
                f"{self.path} holds a run with other settings ({', '.join(other)}; {other[0]} was {before.get(other[0])!r}, is "
                f"{settings[other[0]]!r}). To go on with that run, give the same; else use another --output."
            )

    def begin(self, settings: dict[str, Any]) -> None:
        """Write the settings; call it after the settings have been checked."""
        write_aside(self.path / _SETTINGS, json.dumps(settings, indent=2, sort_keys=True) + "\n")

    def newest(self, number: int | None = None) -> tuple[int, int, Path] | None:
        """Return stage, step and directory of the newest checkpoint, of stage ``number`` if given; None without any."""
        found = sorted(self.checkpoints.glob("[0-9]*" if number is None else f"{number}-*"))
        if not found:
            return None
        stage, step = found[-1].name.split("-")
        return int(stage), int(step), found[-1]

    def save(self, stage: int, step: int, model: nn.Module, parts: dict[str, Any]) -> None:
        """Write a checkpoint of weights and of ``parts``' state dicts; only the two newest checkpoints remain."""
        aside = self.checkpoints / ".building"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        save_weights(model, aside)
        torch.save({name: part.state_dict() for name, part in parts.items()}, aside / "optimizer.pt")
        aside.rename(self.checkpoints / f"{stage}-{step:08d}")
        for old in sorted(self.checkpoints.glob("[0-9]*"))[:-_KEPT]:
            shutil.rmtree(old)

    def tell(self, row: Told) -> None:
        """Append a line to ``metrics.jsonl``."""
        with (self.path / METRICS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        """Return the figures of every step, without the incomplete line that a killed run may leave."""
        file = self.path / METRICS
        rows = []
        for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
            try:
                rows.append(json.loads(line))
            except ValueError:
                continue
        return rows

    def forget_after(self, stage: int, step: int) -> None:
        """Remove the figures of the stage's steps from ``step`` on, and of later stages; those steps will run again."""
        kept = [row for row in self.metrics() if (row["stage"], row["step"]) < (stage, step)]
        write_aside(self.path / METRICS, "".join(json.dumps(row) + "\n" for row in kept))


def train(run: RunDirectory, model: nn.Module, stage: Stage, save_every: int, seed: int, say: Say) -> None:
    """Run a stage to its end, from its newest checkpoint if there is one; skip a stage that the run has passed.

    The last step writes a checkpoint, too. The random draws of a step depend only on ``seed``, stage and step, so a
    resumed run repeats the steps of a killed run.
    """
    from transformers import get_linear_schedule_with_warmup

    newest = run.newest()
    if newest is not None and newest[0] > stage.number:
        return
    parameters = list(stage.parameters)
    optimizer = torch.optim.AdamW(parameters, lr=stage.rate, weight_decay=0.01, fused=True)
    schedule = get_linear_schedule_with_warmup(optimizer, round(_WARM_UP * stage.steps), stage.steps)
    first = 0
    if newest is not None:
        load_weights(model, newest[2])
    if newest is not None and newest[0] == stage.number:
        first = newest[1]
        kept = torch.load(newest[2] / "optimizer.pt", weights_only=True)
        optimizer.load_state_dict(kept["optimizer"])
        schedule.load_state_dict(kept["schedule"])
    run.forget_after(stage.number, first)
    model.train()
    for step in range(first, stage.steps):
        began = monotonic()
        torch.manual_seed(seed * 1_000_003 + stage.number * 100_003 + step)
        loss, told = stage.loss(step)
        optimizer.zero_grad()
        if loss is not None:
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(parameters, _CLIP)
        optimizer.step()  # skips all parameters if there was no loss, since they have no gradient
        schedule.step()
        figures = {"loss": loss.item()} if loss is not None else {}
        run.tell({"stage": stage.number, "name": stage.name, "step": step, **figures, **told, "s": monotonic() - began})
        say(step + 1, stage.steps, stage.name)
        if (step + 1) % save_every == 0 or step + 1 == stage.steps:
            run.save(stage.number, step + 1, model, {"optimizer": optimizer, "schedule": schedule})
            stage.saved(step + 1)
    model.eval()


def write_aside(file: Path, text: str) -> None:
    """Write a file completely or not at all."""
    aside = file.with_name(f".{file.name}.{os.getpid()}")
    aside.write_text(text, encoding="utf-8")
    aside.replace(file)


_LOSS_WINDOW = 50


def staleness(directory: Path) -> dict[str, Any]:
    """Return a run's ``steps``, mean ``loss`` over the last 50 and, if an index was searched, the index's staleness.

    Staleness is the number of steps between the parameters that search and the parameters that built the index;
    ``refreshes`` counts the indexes used after the first one.
    """
    rows = RunDirectory(directory).metrics()
    losses = [row["loss"] for row in rows if "loss" in row][-_LOSS_WINDOW:]
    found: dict[str, Any] = {"steps": len(rows)}
    if losses:
        found["loss"] = sum(losses) / len(losses)
    ages = [row["staleness"] for row in rows if "staleness" in row]
    if ages:
        found["staleness_mean"] = sum(ages) / len(ages)
        found["staleness_max"] = max(ages)
        found["refreshes"] = len({row["index_step"] for row in rows if "index_step" in row}) - 1
    return found


def plot_staleness(directory: Path) -> Path | None:
    """Plot the staleness into ``staleness.svg`` and ``.png``; return the SVG's path, or None without matplotlib."""
    rows = [row for row in RunDirectory(directory).metrics() if "staleness" in row]
    try:
        with figure() as (made, axes):
            axes.plot([row["step"] for row in rows], [row["staleness"] for row in rows], drawstyle="steps-post")
            axes.set_xlabel("step")
            axes.set_ylabel("age of the index, in steps")
            save_figure(made, directory / "staleness", "Staleness of the index")
    except ModelError:
        return None
    return directory / "staleness.svg"
