"""Says how to blend one prompt: as it is asked for, with nothing left open, and as the fusor is told.

Names the paper's baselines as settings (paper section 7). Programs check options that need no torch otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

from cacheblend_rag.blending.policies import check_policy, name_elsewhere, possible
from cacheblend_rag.errors import InputError

if TYPE_CHECKING:
    import torch

    from cacheblend_rag.blending.policies import SelectionPolicy
    from cacheblend_rag.blending.trace import Trace


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
        if self.ratio is not None and self.ratio != "auto" and not (is_number(self.ratio) and 0 <= self.ratio <= 1):
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
            (:mod:`cacheblend_rag.blending.settings`); and, where the costs of loading were measured, as much more as costs no
            time (:mod:`cacheblend_rag.blending.controller`).
        policy: A token-selection policy: its name, ours or an installed package's (:mod:`cacheblend_rag.blending.policies`); or,
            where the model runs in this process, a :class:`~cacheblend_rag.blending.policies.SelectionPolicy`.
        check_layers: Layers at which KV deviation is measured, ascending, from 1 on.
        quality: In place of the three: ``"high"`` blends by the profile, ``"fast"`` recomputes less, ``"exact"`` reuses only what
            an ordinary prefix cache could, which changes nothing, and ``"full"`` reuses nothing. With all left open it is
            ``"high"``, or ``"exact"`` where calibration found that no blend is good enough. ``"high"`` and ``"fast"`` compute a
            prompt that a blend would not answer clearly sooner; the three options above blend every prompt.

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

    ``reuse`` says what of the stored KV is used at all; the rest is as of :class:`BlendSettings`, errors too.
    ``quality`` is the one that was asked for, or that the profile stands for; None where the request says how to blend.
    """

    ratio: Ratio
    policy: str | SelectionPolicy
    check_layers: tuple[int, ...]
    reuse: Reuse = None  # type: ignore[assignment]  # refused below: a field behind inherited defaults must have one
    quality: Quality | None = None

    def __post_init__(self) -> None:
        for option in fields(self):
            if option.name != "quality" and getattr(self, option.name) is None:
                raise InputError(f"{option.name} is left open; give a value.")
        super().__post_init__()
        if self.reuse not in get_args(Reuse):
            raise InputError(f"reuse is {self.reuse!r}; give one of {', '.join(map(repr, get_args(Reuse)))}.")

    @property
    def only_if_sooner(self) -> bool:
        """Return whether the engine decides if there is a blend: a quality was asked for, not how to blend."""
        return self.quality in ("high", "fast")

    @property
    def asked(self) -> BlendSettings:
        """Return the options that ask for just this, whatever the profile; a quality stays the profile's to fill in."""
        if self.quality is not None:
            return BlendSettings(quality=self.quality)
        if self.reuse == "chunks":
            return BlendSettings(self.ratio, self.policy, self.check_layers)
        return FULL_RECOMPUTE if self.reuse == "off" else PREFIX_CACHING


HOW_NAMES = tuple(option.name for option in fields(_How))
OPTION_NAMES = tuple(option.name for option in fields(BlendSettings))


def is_whole(value: Any) -> bool:
    """Say whether an option's value is a whole number; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Say whether it is a number."""
    return is_whole(value) or isinstance(value, float)


def _ascending_layers(layers: Any) -> tuple[int, ...]:
    """Return ``layers`` as a tuple; raise unless they are ascending whole numbers from 1 on."""
    found = tuple(layers) if isinstance(layers, (list, tuple)) else ()
    whole = all(map(is_whole, found))
    if not found or not whole or found[0] < 1 or any(a >= b for a, b in pairwise(found)):
        raise InputError(f"check_layers is {layers!r:.200}; give ascending layers from 1 on, such as (1,) or (1, 3).")
    return found


BLEND = BlendSettings(quality="high")
"""The profile's blend, even where the profile says that there better were none."""
FULL_RECOMPUTE = BlendSettings(quality="full")
PREFIX_CACHING = BlendSettings(quality="exact")
FULL_REUSE = BlendSettings(ratio=0.0, policy="hkvd")
"""At this ratio nothing is measured for a policy; this one asks for nothing that would be stored with the chunks."""


MOST = 0.6
"""The highest ratio that ``"auto"`` chooses: as far as calibration looks."""
_SPREADS = 2.0


@dataclass(frozen=True)
class TextRange:
    """Says for which text a profile's ratio holds.

    Attributes:
        left_out: Mean share of static deviation that the ratio left out in the prompts of the calibration.
        spread: Its standard deviation over them.

    Raises:
        InputError: They are no shares.
    """

    left_out: float
    spread: float

    def __post_init__(self) -> None:
        for value in (self.left_out, self.spread):
            if not isinstance(value, (int, float)) or not 0 <= value <= 1:
                raise InputError(f"A profile's text range has {value!r}; both numbers are shares from 0 to 1.")

    @property
    def most_left_out(self) -> float:
        """Return what is still like the prompts of the calibration."""
        return min(1.0, self.left_out + _SPREADS * self.spread)


@dataclass(frozen=True)
class TextRatio:
    """Chooses a prompt's ratio by its text: a higher one for another kind than the profile was calibrated on.

    Under ``ratio="auto"`` this is the lowest ratio; the loading controller (:mod:`cacheblend_rag.blending.controller`) may
    raise it. What a ratio leaves out is the share of the prompt's static deviation outside the tokens of highest static
    deviation. It is known before anything is computed, and it tells kinds of text apart: the tokens that depend on their
    context are few in some texts, many in others. It says how far a prompt is from those that were calibrated on, not that
    its answer will be right.

    Attributes:
        least: The lowest ratio: the profile's, which holds for text like the calibration's.
        left_out: Most static deviation that may be left out, as a share of the prompt's.
        most: The highest ratio.
    """

    least: float
    left_out: float
    most: float = MOST

    def __post_init__(self) -> None:
        for value in (self.least, self.left_out, self.most):
            if not isinstance(value, (int, float)) or not 0 <= value <= 1:
                raise InputError(f"ratio='auto' was given {value!r}; its limits are shares from 0 to 1.")

    def choose(self, static: torch.Tensor) -> float:
        """Return the smallest ratio that leaves out no more than allowed; ``static`` is ``[candidates]``."""
        if not len(static):
            return self.least
        # Descending from 1, at no tokens, to 0: as many counts leave out too much as tokens are needed.
        count = int((left_out_by_count(static) > self.left_out).sum())
        return min(max(self.least, count / len(static)), max(self.least, self.most))


def raised(ratio: float | TextRatio, least: float) -> float | TextRatio:
    """Return a ratio, or the rule that chooses it, that is no lower than ``least``."""
    return replace(ratio, least=max(ratio.least, least)) if isinstance(ratio, TextRatio) else max(ratio, least)


def left_out_by_count(static: torch.Tensor) -> torch.Tensor:
    """Return the share of ``static``, ``[candidates]``, outside its ``n`` highest values, for ``n`` from 0 on, in fp64."""
    # On the CPU, so that every rank adds up alike.
    ranked = static.detach().double().cpu().sort(descending=True).values
    covered = ranked.new_zeros(len(ranked) + 1)
    covered[1:] = ranked.cumsum(0)
    if not covered[-1] > 0:
        return covered.new_zeros(len(covered))  # where nothing depends on its context, nothing is left out
    return (1 - covered / covered[-1]).clamp(0, 1)


@dataclass(frozen=True)
class BlendSchedule:
    """Says at which layers to measure KV deviation, and how many tokens to keep there.

    Attributes:
        check_layers: Ascending layer indices.
        widths: For each check layer, the set's size as a multiple of the recompute ratio; the last is 1.
    """

    check_layers: tuple[int, ...] = (1,)
    widths: tuple[float, ...] = (1.0,)


@dataclass(frozen=True)
class FuseOptions:
    """Says how one prompt is blended; :meth:`~cacheblend_rag.blending.profile.ModelProfile.options` makes one of settings.

    Attributes:
        policy: Chooses the tokens to recompute. Where it cannot (a chunk has no static deviation, a model's attention cannot be
            watched), it gives way to the policy it names for that, at a ratio as much higher as that one needs.
        ratio: Recompute ratio, of the tokens with stale KV; 0 is full KV reuse, 1 equals the full prefill. Or the rule that
            chooses it by the chunks' static deviations; where one has none, it is the lowest that the rule allows.
        schedule: Check layers, for policies that measure KV deviation.
        trace: Where to record what is loaded and computed when; None for nowhere.
        most_wait_s: How long the computation may wait for stored KV, in all; None for as long as it takes.
        whole: Begin with a segment that waits until all stored KV is in host memory. An engine that goes on earlier computes
            layer by layer behind the loading, as without it.
    """

    policy: SelectionPolicy
    ratio: float | TextRatio
    schedule: BlendSchedule = BlendSchedule()
    trace: Trace | None = None
    most_wait_s: float | None = None
    whole: bool = False

    @property
    def watches_question(self) -> bool:
        """Return whether what is recomputed may depend on what is asked."""
        wanted = self.policy
        return wanted.needs_attention or possible(wanted, ranked=False, watched=True).needs_attention


def blend_terms(settings: ResolvedSettings, options: FuseOptions) -> dict[str, Any]:
    """Return all that decides how a prompt's chunks are blended, as JSON values.

    Of the loading controller's costs nothing is in it: whatever it decides recomputes as much as was asked for, or more.
    """
    ratio = options.ratio
    return {
        "reuse": settings.reuse,
        "policy": options.policy.name,
        "ratio": [settings.ratio, asdict(ratio) if isinstance(ratio, TextRatio) else ratio],
        "schedule": asdict(options.schedule),
    }
