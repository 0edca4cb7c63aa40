"""Groups options that several commands take, each as one parameter: ``model: ModelOptions``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_type_hints

from cacheblend_rag.console import options
from cacheblend_rag.console.output import echo
from cacheblend_rag.errors import InputError

if TYPE_CHECKING:
    from cacheblend_rag.blending.settings import BlendSettings
    from cacheblend_rag.engines.sampling import SamplingParams


def takes_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command take groups of options as parameters: Typer sees the fields, and the command gets the groups.

    A group is a dataclass whose fields are annotated like a command's parameters, all with a default; a field may itself be a
    group. An instance as the parameter's default changes the fields' defaults.

    Raises:
        ValueError: Two options have the same name.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    flat: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name in groups:
            given = parameter.default is not parameter.empty
            flat += _parameters(parameter.default if given else groups[name]())
        else:
            flat.append(parameter.replace(annotation=hints[name], kind=parameter.KEYWORD_ONLY))

    @wraps(command)
    def run(**values: Any) -> None:
        built = {name: _build(group, values) for name, group in groups.items()}
        command(**built, **values)

    # inspect and Typer read these instead of run's own parameters.
    vars(run)["__signature__"] = inspect.Signature(flat)
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in flat}
    return run


def _parameters(defaults: Any) -> Iterator[inspect.Parameter]:
    """Yield a group's fields as parameters, with the values in ``defaults`` as the parameters' defaults."""
    for name, hint in _hints(type(defaults)).items():
        default = getattr(defaults, name)
        if is_dataclass(hint):
            yield from _parameters(default)
        else:
            yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def _build(group: Any, values: dict[str, Any]) -> Any:
    """Return a group made of its options, which are removed from ``values``."""
    hints = _hints(group)
    return group(
        **{name: _build(hint, values) if is_dataclass(hint) else values.pop(name) for name, hint in hints.items()}
    )


def _hints(group: Any) -> dict[str, Any]:
    hints = get_type_hints(group, include_extras=True)
    return {each.name: hints[each.name] for each in fields(group)}


@dataclass(frozen=True)
class ModelOptions:
    """Groups the options of a command that loads a model."""

    model: options.Model = None
    device: options.Device = None
    dtype: options.DType = None
    threads: options.Threads = None
    writer: options.Writer = None


@dataclass(frozen=True)
class EngineOptions(ModelOptions):
    """Groups the model options of a command that can use any engine, servers included."""

    engine: options.Engine = "transformers"
    server: options.Server = None


@dataclass(frozen=True)
class BlendOptions:
    """Groups the options that control the use of stored KV."""

    ratio: options.BlendRatio = None
    policy: options.Policy = None
    check_layers: options.CheckLayers = None
    quality: options.Quality = None

    def settings(self) -> BlendSettings:
        """Return the options as :class:`BlendSettings`.

        Raises:
            InputError: A value is out of range.
        """
        from cacheblend_rag.blending.settings import BlendSettings

        return BlendSettings(_ratio(self.ratio), self.policy, _layers(self.check_layers), self.quality)


@dataclass(frozen=True)
class BudgetOptions:
    """Groups the options on the places and sizes of the store's KV."""

    kv: options.KV = None
    ram_budget: options.RamBudget = None
    disk_budget: options.DiskBudget = None
    encrypt: options.Encrypt = None

    def nbytes(self) -> tuple[int | None, int | None]:
        """Return the budgets of the RAM tier and the disk tier in bytes; None for a budget that is not given.

        Raises:
            InputError: A budget is not a size.
        """
        from cacheblend_rag.store.opening import parse_size

        ram, disk = (None if text is None else parse_size(text) for text in (self.ram_budget, self.disk_budget))
        return ram, disk

    @property
    def given(self) -> list[str]:
        """Return the names of the options that were given."""
        return [f"--{name.replace('_', '-')}" for name, value in vars(self).items() if value is not None]

    def note(self, directory: Path) -> None:
        """Record in a store the places of its KV and keys, and its disk budget; print a notice if the KV gets another place.

        The RAM budget is not recorded: each process has its own.

        Raises:
            InputError: A place cannot be used, or the options contradict each other.
            StoreError: The record cannot be written, or the stored KV is not encrypted with these keys.
        """
        from cacheblend_rag.store import record_tiers, recorded_tiers

        others = [name for name in self.given if name not in ("--kv", "--encrypt")]
        if self.kv is not None and others:
            raise InputError(f"{', '.join(others)} does not go with --kv: each address takes a budget, as ram://8GiB.")
        if {*self.given} <= {"--ram-budget"}:
            return
        before = recorded_tiers(directory)
        record_tiers(directory, self.kv, self.encrypt, self.disk_budget)
        if self.kv is not None and before not in (None, recorded_tiers(directory)):
            echo(
                f"The KV of {directory} is kept in {self.kv} from now on. What lies in {before} is not moved.", err=True
            )


@dataclass(frozen=True)
class SamplingOptions:
    """Groups the options that control how an answer is decoded."""

    max_tokens: options.MaxTokens = 128
    temperature: options.Temperature = 0.0
    top_p: options.TopP = 1.0
    seed: options.Seed = None

    def params(self) -> SamplingParams:
        """Return the options as :class:`SamplingParams`.

        Raises:
            InputError: A value is out of range.
        """
        from cacheblend_rag.engines.sampling import SamplingParams

        return SamplingParams(self.max_tokens, self.temperature, self.top_p, self.seed, stop_repeating=True)


@dataclass(frozen=True)
class QuestionOptions:
    """Groups the options of commands that answer questions."""

    store: options.Store = None
    model: EngineOptions = field(default_factory=EngineOptions)
    k: options.K = 6
    blend: BlendOptions = field(default_factory=BlendOptions)
    budgets: BudgetOptions = field(default_factory=BudgetOptions)
    sampling: SamplingOptions = field(default_factory=SamplingOptions)


CONVERSATION = QuestionOptions(sampling=SamplingOptions(max_tokens=256))
"""Question options with the defaults of a conversation, whose answers people read and programs do not."""


def _ratio(text: str | None) -> float | Literal["auto"] | None:
    if text is None or text == "auto":
        return None if text is None else "auto"
    try:
        return float(text)
    except ValueError:
        raise InputError(f"--ratio {text!r} is no number; give one from 0 to 1, or auto.") from None


def _layers(text: str | None) -> tuple[int, ...] | None:
    try:
        return None if text is None else tuple(map(int, text.split(",")))
    except ValueError:
        raise InputError(f"--check-layers {text!r} is not an ascending list of layers; write 1 or 1,3.") from None
