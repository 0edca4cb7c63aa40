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
"""``"chunks"`` blends all stored chunks, ``"prefix"`` reuses only what an ordinary prefix cache could, ``"off"`` nothing."""
Ratio = float | Literal["auto"]
Quality = Literal["full", "exact", "high", "fast"]
_REUSE: dict[Quality, Reuse] = {"full": "off", "exact": "prefix", "high": "chunks", "fast": "chunks"}


@dataclass(frozen=True)
class _How:
    """Says how a blend chooses what it recomputes; see :class:`BlendSettings`."""

    ratio: Ratio | None = None
    policy: str | SelectionPolicy | None = None
    check_layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.ratio is not None and self.ratio != "auto" and not (_is_number(self.ratio) and 0 <= self.ratio <= 1):
            raise InputError(
                f"ratio is {self.ratio!r}; give a value from 0 (full KV reuse) to 1 (full recompute), or 'auto'."
            )
        if self.policy is not None:
            check_policy(self.policy)
        if self.check_layers is not None:
            object.__setattr__(self, "check_layers", _ascending_layers(self.check_layers))

    def to_params(self) -> dict[str, Any]:
        """Return the options that are not left open, as JSON values; :meth:`from_params` reads them, in any process.

        Raises:
            InputError: The policy is an object that other processes cannot find by its name.
        """
        given: dict[str, Any] = {option.name: getattr(self, option.name) for option in fields(self)}
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
        known = [option.name for option in fields(cls)]
        if unknown := sorted(set(params) - set(known)):
            raise InputError(f"There is no blend option {unknown[0]!r}; there are {', '.join(known)}.")
        return cls(**{name: value for name, value in params.items() if value is not None})


@dataclass(frozen=True)
class BlendSettings(_How):
    """Says how to treat stored KV in one prompt. This is the one list of blend options; the profile says the rest.

    Attributes:
        ratio: Recompute ratio: the share of reused chunk tokens (outside the exact prefix) that is recomputed, 0 to 1; or
            ``"auto"``: at least what the text needs, the profile's and more for text unlike that of its calibration
            (:mod:`cacheblend_rag.blending.options`); and, where the costs of loading were measured, as much more as costs no
            time (:mod:`cacheblend_rag.blending.controller`).
        policy: A token-selection policy: its name, ours or an installed package's (:mod:`cacheblend_rag.blending.policies`); or,
            where the model runs in this process, a :class:`~cacheblend_rag.blending.policies.base.SelectionPolicy`.
        check_layers: Layers at which KV deviation is measured, ascending, from 1 on.
        quality: In place of the three: ``"high"`` blends by the profile, ``"fast"`` recomputes less, ``"exact"`` reuses only what
            an ordinary prefix cache could, which changes nothing, and ``"full"`` reuses nothing. With all left open it is
            ``"high"``, or ``"exact"`` where calibration found that no blend is good enough.

    Raises:
        InputError: A value out of range, an unknown policy, or a quality beside what it stands for. Layers beyond the model are
            refused by the engine.
    """

    quality: Quality | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.quality is None:
            return
        if self.quality not in get_args(Quality):
            raise InputError(
                f"quality is {self.quality!r:.200}; give one of {', '.join(map(repr, get_args(Quality)))}."
            )
        if self.named:
            raise InputError(f"quality={self.quality!r} chooses {self.named[0]}; give one or the other.")

    @property
    def named(self) -> tuple[str, ...]:
        """Return which of the options are given that say how to blend."""
        return tuple(name for name in HOW_NAMES if getattr(self, name) is not None)

    @property
    def reuse(self) -> Reuse | None:
        """Return what of the stored KV is used; None leaves it to the profile."""
        return _REUSE[self.quality] if self.quality is not None else "chunks" if self.named else None


@dataclass(frozen=True)
class ResolvedSettings(_How):
    """Holds what is done with a prompt's stored KV, nothing left open; :meth:`ModelProfile.resolve` makes it.

    Attributes:
        ratio: See :class:`BlendSettings`; so are the next two.
        policy: Its policy.
        check_layers: Its check layers.
        reuse: What of the stored KV is used at all.

    Raises:
        InputError: As there.
    """

    ratio: Ratio
    policy: str | SelectionPolicy
    check_layers: tuple[int, ...]
    reuse: Reuse = None  # type: ignore[assignment]  # refused below: a field behind inherited defaults must have one

    def __post_init__(self) -> None:
        for option in fields(self):
            if getattr(self, option.name) is None:
                raise InputError(f"{option.name} is left open; give a value.")
        super().__post_init__()
        if self.reuse not in get_args(Reuse):
            raise InputError(f"reuse is {self.reuse!r}; give one of {', '.join(map(repr, get_args(Reuse)))}.")

    @property
    def asked(self) -> BlendSettings:
        """Return the options that ask for just this, whatever the profile."""
        if self.reuse == "chunks":
            return BlendSettings(self.ratio, self.policy, self.check_layers)
        return FULL_RECOMPUTE if self.reuse == "off" else PREFIX_CACHING


HOW_NAMES = tuple(option.name for option in fields(_How))
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


BLEND = BlendSettings(quality="high")
"""The profile's blend, even where the profile says that there better were none."""
FULL_RECOMPUTE = BlendSettings(quality="full")
PREFIX_CACHING = BlendSettings(quality="exact")
FULL_REUSE = BlendSettings(ratio=0.0, policy="full-reuse")


def blend_by(
    ratio: Ratio | None = None,
    policy: str | SelectionPolicy | None = None,
    check_layers: tuple[int, ...] | None = None,
) -> BlendSettings:
    """Return a blend by what is given; with nothing given it is :data:`BLEND`."""
    given = BlendSettings(ratio, policy, check_layers)
    return given if given.named else BLEND
