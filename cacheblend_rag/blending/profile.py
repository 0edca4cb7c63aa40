"""Loads and saves the profile and costs of a model: how to blend it, and its loading and computing costs here.

A profile lies in the model's own directory (``cacheblend.json``, as the bundled model has it), in a KV writer's
directory, or among the user's files, named by fingerprint. Costs lie only among the user's files. Profiles are written by
``cacheblend doctor --calibrate`` and costs by ``cacheblend store calibrate``; every engine reads both.
"""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from cacheblend_rag.blending.costs import Costs
from cacheblend_rag.blending.policies import FullReusePolicy, check_policy, policy
from cacheblend_rag.blending.settings import BlendSettings, FuseOptions, Quality, Reuse, TextRange, TextRatio
from cacheblend_rag.errors import InputError
from cacheblend_rag.homes import user_folder, write_json
from cacheblend_rag.store.identity import WrittenBy

_FILE = "cacheblend.json"
EMBEDDED = "transformers"
"""Name of the engine whose costs serve another engine until that engine's own costs are measured."""
_log = logging.getLogger(__name__)
_QUALITY: dict[Reuse, Quality] = {"chunks": "high", "prefix": "exact", "off": "full"}


@dataclass(frozen=True)
class ModelProfile:
    """Says how to blend one model.

    Attributes:
        ratio: Default recompute ratio, used for ``quality="high"``.
        policy: Default token-selection policy.
        check_layers: Layers at which KV deviation is measured; the paper's layer 1 unless calibrated.
        widths: Size of the set at each check layer, as multiples of the ratio (gradual filtering).
        reuse: ``"chunks"`` to blend; ``"prefix"`` if calibration found that no blend is good enough.
        fast: Highest ratio for ``quality="fast"``: ``ratio`` itself may be lower.
        text: Range of text for which the ratio holds; None if calibration has not measured it.
        blockwise: Whether the model was trained to read chunks that attend only to themselves (Block-Attention, arXiv
            2409.15355). Then full KV reuse is not an approximation but the model's own way: chunks are computed behind
            no header, none of their tokens is recomputed, and missing chunks are stored before the prompt is computed.
        calibrated: Measurements of calibration; empty for defaults, also for defaults that come with a KV writer.
        origin: File that the profile was read from; empty for the general defaults.
        always: Whether a quality blends every prompt, not only prompts that a blend makes faster: the user has set the
            ratio.
    """

    ratio: float = 0.5
    policy: str = "static-query"
    check_layers: tuple[int, ...] = (1,)
    widths: tuple[float, ...] = (1.0,)
    reuse: Reuse = "chunks"
    fast: float = 0.15
    text: TextRange | None = None
    blockwise: bool = False
    calibrated: dict[str, Any] = field(default_factory=dict)
    origin: str = field(default="", compare=False)
    always: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        """Refuse values that no model can be blended with; raises InputError as :class:`BlendSettings` does."""
        check_policy(self.policy)  # a package's policy is loaded no earlier than a prompt needs the policy
        for ratio in (self.ratio, self.fast):
            FuseOptions(FullReusePolicy(), ratio, self.check_layers, self.widths, self.reuse)

    @property
    def is_calibrated(self) -> bool:
        """Return whether calibration has chosen the profile, or the profile leaves nothing to choose."""
        return bool(self.calibrated) or self.blockwise

    def resolve(self, settings: BlendSettings, num_layers: int, controlled: bool = False) -> FuseOptions:
        """Return the decisions about a blend by ``settings``; if ``controlled``, a loading controller chooses the ratio.

        Raises:
            InputError: A check layer lies outside a model of ``num_layers`` layers, or the ratio is ``"auto"`` but
                neither a loading controller nor a calibrated text range can choose it.
        """
        if settings.ratio == "auto" and self.text is None and not controlled:
            raise InputError(
                "ratio is 'auto', which needs a profile that says for which text its ratio holds, or the costs of loading and "
                "computing: run `cacheblend doctor --calibrate` or `cacheblend store calibrate` for this model, or give a number."
            )
        asked = settings.check_layers
        if asked is not None and asked[-1] >= num_layers:
            raise InputError(
                f"check_layers is {list(asked)!s:.200}; this model's KV deviation can be checked at layers 1 to {num_layers - 1}."
            )
        layers = self.check_layers if asked is None else asked
        return FuseOptions(
            policy(self.policy if settings.policy is None else settings.policy),
            self._ratio(settings),
            layers,
            self.widths if layers == self.check_layers else (),
            settings.reuse or self.reuse,
            settings.ratio == "auto",
            None if settings.named or self.always or self.blockwise else settings.quality or _QUALITY[self.reuse],
        )

    def _ratio(self, settings: BlendSettings) -> float | TextRatio:
        """Return the ratio of a blend by ``settings``, or the rule that computes the ratio from the prompt's chunks."""
        if settings.ratio == "auto":
            return self.ratio if self.text is None else TextRatio(self.ratio, self.text.most_left_out)
        if settings.ratio is not None:
            return settings.ratio
        return min(self.ratio, self.fast) if settings.quality == "fast" else self.ratio


@cache
def log_uncalibrated() -> None:
    """Log once per process that a model is blended by default settings."""
    _log.warning(
        "A model that is not calibrated is blended by defaults: nobody has looked how near its answers are to a full prefill's "
        "on your documents, and they say calibrated=false. `cacheblend doctor --calibrate` looks."
    )


def load_profile(
    digest: str, model_directory: Path | None = None, ratio: float | None = None, writer: WrittenBy | None = None
) -> ModelProfile:
    """Return the profile of a model: the user's own, else the one in the model's directory, else the defaults.

    With a KV ``writer``, a profile of model and writer together takes precedence: the user's own or the one in the
    writer's directory. A calibrated profile takes precedence over defaults that come with a writer.

    Raises:
        InputError: ``ratio``, which replaces the profile's ratio, is out of range.
    """
    found = _read_profile(digest, model_directory, writer)
    # A given ratio asks for a blend, as in a request.
    return found if ratio is None else replace(found, ratio=ratio, reuse="chunks", always=True)


def _read_profile(digest: str, model_directory: Path | None, writer: WrittenBy | None) -> ModelProfile:
    candidates = [] if writer is None else [_own_file(digest, writer), Path(writer.directory) / _FILE]
    candidates.append(_own_file(digest))
    if model_directory is not None:
        candidates.append(model_directory / _FILE)
    found = []
    for file in candidates:
        with suppress(OSError, ValueError, KeyError, TypeError, InputError):
            found.append(_profile_in(file))
    return next((each for each in found if each.is_calibrated), found[0] if found else ModelProfile())


def _profile_in(file: Path) -> ModelProfile:
    data = json.loads(file.read_text(encoding="utf-8"))
    if data.get("blockwise") is True:  # a blockwise profile needs no other field
        return ModelProfile(ratio=0.0, blockwise=True, origin=str(file))
    return ModelProfile(
        ratio=data["ratio"],
        policy=data.get("policy", ModelProfile.policy),
        check_layers=tuple(data["check_layers"]),
        widths=tuple(float(width) for width in data["widths"]),
        reuse=data.get("reuse", ModelProfile.reuse),
        fast=data.get("fast", ModelProfile.fast),
        text=None if data.get("text") is None else TextRange(**data["text"]),
        calibrated=dict(data.get("calibrated", {})),
        origin=str(file),
    )


def save_profile(
    profile: ModelProfile, digest: str, directory: Path | None = None, writer: WrittenBy | None = None
) -> Path:
    """Write a model's profile (with a KV ``writer``) to the user's files, or into ``directory``; return the file."""
    file = _own_file(digest, writer) if directory is None else directory / _FILE
    data = asdict(profile)
    del data["origin"], data["always"]
    write_json(file, data)
    return file


def _own_file(digest: str, writer: WrittenBy | None = None) -> Path:
    name = digest if writer is None else f"{digest}-{writer.digest}"
    return user_folder("data") / "profiles" / f"{name}.json"


def save_costs(costs: Costs, digest: str, device: str, engine: str = EMBEDDED) -> Path:
    """Write the costs of a model on a device, as an engine runs it, to the user's files; return the file."""
    file = _costs_file(digest, device, engine)
    write_json(file, asdict(costs))
    return file


def load_costs(digest: str, device: str, engine: str = EMBEDDED) -> Costs | None:
    """Return the costs of a model on a device for an engine; the embedded engine's costs if only these are known.

    Return None if no costs were measured, or if the file cannot be read.
    """
    file = _costs_file(digest, device, engine)
    if engine != EMBEDDED and not file.exists():
        return load_costs(digest, device)
    try:
        return Costs.from_json(json.loads(file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, InputError) as error:
        _log.warning("The costs in %s cannot be used: %s", file, error)
        return None


def _costs_file(digest: str, device: str, engine: str) -> Path:
    numbered = "cuda:0" if device == "cuda" else device  # vLLM reports the device without a number
    ran_by = "" if engine == EMBEDDED else f"-{engine}"
    return user_folder("data") / "costs" / f"{digest}-{numbered.replace(':', '-')}{ran_by}.json"
