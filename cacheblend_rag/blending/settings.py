"""Says how to treat stored KV in one prompt, and names the paper's baselines as settings (paper section 7)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

from cacheblend_rag.blending.policies import check_policy, name_elsewhere
from cacheblend_rag.errors import InputError

if TYPE_CHECKING:
    from cacheblend_rag.blending.policies.base import SelectionPolicy

Reuse = Literal["chunks", "prefix", "off"]
Ratio = float | Literal["auto"]


@dataclass(frozen=True)
class BlendSettings:
    """Says how to treat stored KV in one prompt. This is the one list of blend options; the profile says the rest.

    Attributes:
        ratio: Recompute ratio: the share of reused chunk tokens (outside the exact prefix) that is recomputed, 0 to 1; or
            ``"auto"``: at least what the text needs, the profile's and more for text unlike that of its calibration
            (:mod:`cacheblend_rag.blending.options`); and, where the costs of loading were measured, as much more as costs no
            time (:mod:`cacheblend_rag.blending.controller`).
        policy: A token-selection policy: its name, ours or an installed package's (:mod:`cacheblend_rag.blending.policies`); or,
            where the model runs in this process, a :class:`~cacheblend_rag.blending.policies.base.SelectionPolicy`.
        check_layers: Layers at which KV deviation is measured, ascending, from 1 on.
        reuse: ``"chunks"`` blends all stored chunks, ``"prefix"`` reuses only what an ordinary prefix cache could,
            ``"off"`` is the full prefill. Left open, it is the profile's where ratio, policy and check layers are, too; else
            ``"chunks"``: who names one of these wants a blend.

    Raises:
        InputError: A value out of range, or an unknown policy. Layers beyond the model are refused by the engine.
    """

    ratio: Ratio | None = None
    policy: str | SelectionPolicy | None = None
    check_layers: tuple[int, ...] | None = None
    reuse: Reuse | None = None

    def __post_init__(self) -> None:
        """Refuse what no model could be blended with."""
        if self.ratio is not None and self.ratio != "auto" and not (_is_number(self.ratio) and 0 <= self.ratio <= 1):
            raise InputError(
                f"ratio is {self.ratio!r}; give a value from 0 (full KV reuse) to 1 (full recompute), or 'auto'."
            )
        if self.policy is not None:
            check_policy(self.policy)
        if self.check_layers is not None:
            object.__setattr__(self, "check_layers", _ascending_layers(self.check_layers))
        if self.reuse is not None and self.reuse not in get_args(Reuse):
            raise InputError(f"reuse is {self.reuse!r}; give one of {', '.join(map(repr, get_args(Reuse)))}.")

    def to_params(self) -> dict[str, Any]:
        """Return the options that are not left open, as JSON values; :meth:`from_params` reads them, in any process.

        Raises:
            InputError: The policy is an object that other processes cannot find by its name.
        """
        given: dict[str, Any] = {name: getattr(self, name) for name in OPTION_NAMES}
        if self.policy is not None:
            given["policy"] = name_elsewhere(self.policy)
        if self.check_layers is not None:
            given["check_layers"] = list(self.check_layers)
        return {name: value for name, value in given.items() if value is not None}

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> Self:
        """Read options by name, such as a request brings; None leaves one open.

        Raises:
            InputError: An option that does not exist, or a value out of range.
        """
        if unknown := sorted(set(params) - set(OPTION_NAMES)):
            raise InputError(f"There is no blend option {unknown[0]!r}; there are {', '.join(OPTION_NAMES)}.")
        return cls(**{name: value for name, value in params.items() if value is not None})


@dataclass(frozen=True)
class ResolvedSettings(BlendSettings):
    """Holds blend options with nothing left open; :meth:`ModelProfile.resolve` makes them."""

    ratio: Ratio
    policy: str | SelectionPolicy
    check_layers: tuple[int, ...]
    reuse: Reuse

    def __post_init__(self) -> None:
        """Refuse an option left open, too."""
        for name in OPTION_NAMES:
            if getattr(self, name) is None:
                raise InputError(f"{name} is left open; give a value.")
        super().__post_init__()


OPTION_NAMES = tuple(option.name for option in fields(BlendSettings))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _ascending_layers(layers: Any) -> tuple[int, ...]:
    """Return ``layers`` as a tuple; raise unless they are ascending whole numbers from 1 on."""
    found = tuple(layers) if isinstance(layers, (list, tuple)) else ()
    whole = all(isinstance(layer, int) and not isinstance(layer, bool) for layer in found)
    if not found or not whole or found[0] < 1 or any(a >= b for a, b in pairwise(found)):
        raise InputError(f"check_layers is {layers!r:.200}; give ascending layers from 1 on, such as (1,) or (1, 3).")
    return found


BLEND = BlendSettings(reuse="chunks")
"""The profile's blend, even where the profile says that there better were none."""
FULL_RECOMPUTE = BlendSettings(reuse="off")
PREFIX_CACHING = BlendSettings(reuse="prefix")
FULL_REUSE = BlendSettings(ratio=0.0, policy="full-reuse")
