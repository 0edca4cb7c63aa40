"""Defines how to blend one prompt: a request's settings, and the fusor's options, which were decided by the settings.

Names the paper's baselines as settings (paper section 7). Programs that need no torch otherwise check options here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

from cacheblend_rag.blending.policies import check_policy, name_elsewhere, policy, possible
from cacheblend_rag.errors import InputError

if TYPE_CHECKING:
    import torch

    from cacheblend_rag.blending.policies import SelectionPolicy


Reuse = Literal["chunks", "prefix", "off"]
"""``"chunks"`` blends all stored chunks, ``"prefix"`` reuses only an exact prefix, ``"off"`` reuses nothing."""
Ratio = float | Literal["auto"]
Quality = Literal["full", "exact", "high", "fast"]
_REUSE: dict[Quality, Reuse] = {"full": "off", "exact": "prefix", "high": "chunks", "fast": "chunks"}


@dataclass(frozen=True)
class BlendSettings:
    """Says how to treat stored KV in one prompt. The profile supplies the options that are left open.

    Attributes:
        ratio: Recompute ratio: the share of reused chunk tokens (outside the exact prefix) that is recomputed, 0 to 1,
            or ``"auto"``. ``"auto"`` takes at least the ratio that the text needs: the profile's ratio, and more for
            text unlike the calibration's text (:mod:`cacheblend_rag.blending.settings`). If the costs of loading were
            measured, ``"auto"`` recomputes as much more as costs no time (:mod:`cacheblend_rag.blending.controller`).
        policy: Token-selection policy: the name of a built-in policy or of an installed package's
            (:mod:`cacheblend_rag.blending.policies`); or, if the model runs in this process, a
            :class:`~cacheblend_rag.blending.policies.SelectionPolicy`.
        check_layers: Layers at which KV deviation is measured, ascending, from 1 on.
        quality: Replaces the other three options: ``"high"`` blends by the profile, ``"fast"`` recomputes less,
            ``"exact"`` reuses only the KV that an ordinary prefix cache could reuse, which changes no answer, and
            ``"full"`` reuses nothing. If all options are open, the quality is ``"high"``, or ``"exact"`` if calibration
            found that no blend is good enough. ``"high"`` and ``"fast"`` compute a prompt that a blend would not answer
            clearly sooner; the three options above blend every prompt.

    Raises:
        InputError: A value is out of range, a policy is unknown, or a quality is given beside options that it replaces.
            The engine refuses layers beyond the model.

    Example:
        Recompute 20% of the reused tokens, chosen by the static policy::

            settings = BlendSettings(ratio=0.2, policy="static")
            generation = engine.generate("Who is the captain?", settings=settings)
    """

    ratio: Ratio | None = None
    policy: str | SelectionPolicy | None = None
    check_layers: tuple[int, ...] | None = None
    quality: Quality | None = None

    def __post_init__(self) -> None:
        if self.ratio is not None and self.ratio != "auto":
            _check_ratio(self.ratio)
        if self.policy is not None:
            check_policy(self.policy)
        if self.check_layers is not None:
            object.__setattr__(self, "check_layers", _ascending_layers(self.check_layers))
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
        """Return the names of the given options among ratio, policy and check layers."""
        return tuple(name for name in HOW_NAMES if getattr(self, name) is not None)

    @property
    def reuse(self) -> Reuse | None:
        """Return which stored KV is used; None leaves the choice to the profile."""
        return _REUSE[self.quality] if self.quality is not None else "chunks" if self.named else None

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
        """Read options by name, from a request for example; None leaves an option open.

        Raises:
            InputError: An option does not exist, or a value is out of range.
        """
        if unknown := sorted(set(params) - set(OPTION_NAMES)):
            raise InputError(f"There is no blend option {unknown[0]!r}; there are {', '.join(OPTION_NAMES)}.")
        return cls(**{name: value for name, value in params.items() if value is not None})


HOW_NAMES = ("ratio", "policy", "check_layers")
OPTION_NAMES = (*HOW_NAMES, "quality")


def is_whole(value: Any) -> bool:
    """Return whether an option's value is a whole number; True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Return whether an option's value is a number; True and False are not."""
    return is_whole(value) or isinstance(value, float)


def _check_ratio(ratio: Any) -> None:
    if not (is_number(ratio) and 0 <= ratio <= 1):
        raise InputError(f"ratio is {ratio!r}; give a value from 0 (full KV reuse) to 1 (full recompute), or 'auto'.")


def _ascending_layers(layers: Any) -> tuple[int, ...]:
    """Return ``layers`` as a tuple; raise InputError unless they are ascending whole numbers from 1 on."""
    found = tuple(layers) if isinstance(layers, (list, tuple)) else ()
    whole = all(map(is_whole, found))
    # A check at layer 0 would always measure zero: the KV of layer 0 depends only on the token and its position.
    if not found or not whole or found[0] < 1 or any(a >= b for a, b in pairwise(found)):
        raise InputError(f"check_layers is {layers!r:.200}; give ascending layers from 1 on, such as (1,) or (1, 3).")
    return found


BLEND = BlendSettings(quality="high")
"""Blend by the profile, even if the profile's default is not to blend."""
FULL_RECOMPUTE = BlendSettings(quality="full")
PREFIX_CACHING = BlendSettings(quality="exact")
FULL_REUSE = BlendSettings(ratio=0.0, policy="hkvd")
"""Reuse all stored KV. At ratio 0 no policy measures anything, and this policy needs nothing stored with the chunks."""


MOST = 0.6
"""Highest ratio that ``"auto"`` chooses by the text: calibration measures no higher ratio."""
_SPREADS = 2.0


@dataclass(frozen=True)
class TextRange:
    """Says for which text a profile's ratio holds.

    Attributes:
        left_out: Mean share of static deviation that the ratio left out in the prompts of the calibration.
        spread: Standard deviation of that share over the prompts.

    Raises:
        InputError: A value is not a share from 0 to 1.
    """

    left_out: float
    spread: float

    def __post_init__(self) -> None:
        for value in (self.left_out, self.spread):
            if not isinstance(value, (int, float)) or not 0 <= value <= 1:
                raise InputError(f"A profile's text range has {value!r}; both numbers are shares from 0 to 1.")

    @property
    def most_left_out(self) -> float:
        """Return the largest left-out share that still counts as text like the calibration's."""
        return min(1.0, self.left_out + _SPREADS * self.spread)


@dataclass(frozen=True)
class TextRatio:
    """Chooses a prompt's ratio by its text: a higher ratio for text unlike the text the profile was calibrated on.

    Under ``ratio="auto"`` this is the lowest ratio; the loading controller (:mod:`cacheblend_rag.blending.controller`)
    may raise it. A ratio leaves out the share of the prompt's static deviation outside the tokens of highest static
    deviation. The left-out share is known before anything is computed, and it distinguishes kinds of text: few tokens
    depend on their context in some texts, many in others. The share measures how far a prompt is from the calibration's
    prompts, not whether its answer is right.

    Attributes:
        least: Lowest ratio: the profile's, which holds for text like the calibration's.
        left_out: Largest share of the prompt's static deviation that may be left out.
    """

    least: float
    left_out: float

    def __post_init__(self) -> None:
        for value in (self.least, self.left_out):
            if not isinstance(value, (int, float)) or not 0 <= value <= 1:
                raise InputError(f"ratio='auto' was given {value!r}; its limits are shares from 0 to 1.")

    def choose(self, static: torch.Tensor) -> float:
        """Return the smallest ratio that leaves out no more than allowed; ``static`` is ``[candidates]``."""
        if not len(static):
            return self.least
        # The shares descend from 1, at no tokens, to 0: the number of shares above the limit equals the number of
        # tokens needed.
        count = int((left_out_by_count(static) > self.left_out).sum())
        return min(max(self.least, count / len(static)), max(self.least, MOST))


def left_out_by_count(static: torch.Tensor) -> torch.Tensor:
    """Return the share of ``static``, ``[candidates]``, outside its ``n`` highest values, for ``n`` from 0 on, in fp64."""
    # On the CPU, so that every rank computes the same sums.
    ranked = static.detach().double().cpu().sort(descending=True).values
    covered = ranked.new_zeros(len(ranked) + 1)
    covered[1:] = ranked.cumsum(0)
    if not covered[-1] > 0:
        return covered.new_zeros(len(covered))  # if no token depends on its context, nothing is left out
    return (1 - covered / covered[-1]).clamp(0, 1)


@dataclass(frozen=True)
class FuseOptions:
    """Holds the decisions about a prompt's blend; :meth:`~cacheblend_rag.blending.profile.ModelProfile.resolve` makes them.

    An object of this class is pickled as the JSON values of :meth:`to_params`, so that a policy travels by its name.

    Attributes:
        policy: Policy that chooses the tokens to recompute. If a chunk has no static deviation, or a model's attention
            cannot be measured, the policy falls back to the policy that it names for this case, at a ratio raised by
            that policy's effort.
        ratio: Recompute ratio of the tokens with stale KV; 0 is full KV reuse, 1 equals the full prefill. Or the rule
            that chooses the ratio by the chunks' static deviations; if a chunk has none, the rule's lowest ratio.
        check_layers: Ascending layers at which KV deviation is measured, for policies that measure KV deviation.
        widths: For each check layer, the set's size as a multiple of the recompute ratio; the last is 1. If no widths
            are given, each is 1.25 times the next.
        reuse: Stored KV that the prompt may use.
        auto: Whether the ratio is the lowest one, which the loading controller may raise.
        quality: Requested quality, or the profile's; None if the request says how to blend.

    Raises:
        InputError: A value is out of range.
    """

    policy: SelectionPolicy
    ratio: float | TextRatio
    check_layers: tuple[int, ...] = (1,)
    widths: tuple[float, ...] = ()
    reuse: Reuse = "chunks"
    auto: bool = False
    quality: Quality | None = None

    def __post_init__(self) -> None:
        if not (self.auto and isinstance(self.ratio, TextRatio)):
            _check_ratio(self.ratio)
        layers = _ascending_layers(self.check_layers)
        widths = tuple(self.widths) or tuple(1.25**i for i in reversed(range(len(layers))))
        if len(widths) != len(layers) or not all(is_number(width) and 0 < width < inf for width in widths):
            raise InputError(
                f"widths is {self.widths!r:.200}; give a positive number for each of {len(layers)} layers."
            )
        if self.reuse not in get_args(Reuse):
            raise InputError(f"reuse is {self.reuse!r:.200}; give one of {', '.join(map(repr, get_args(Reuse)))}.")
        object.__setattr__(self, "check_layers", layers)
        object.__setattr__(self, "widths", widths)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return FuseOptions.from_params, (self.to_params(),)

    @property
    def watches_question(self) -> bool:
        """Return whether the tokens to recompute may depend on the question."""
        wanted = self.policy
        return wanted.needs_attention or possible(wanted, ranked=False, watched=True).needs_attention

    @property
    def terms(self) -> dict[str, Any]:
        """Return all options that determine how a prompt's chunks are blended, as JSON values.

        The loading controller's costs are no option: whatever the controller decides, it recomputes at least as much as
        requested.
        """
        return {
            "reuse": self.reuse,
            "policy": self.policy.name,
            "ratio": asdict(self.ratio) if isinstance(self.ratio, TextRatio) else self.ratio,
            "auto": self.auto,
            "check_layers": list(self.check_layers),
            "widths": list(self.widths),
        }

    def at_least(self, ratio: float) -> FuseOptions:
        """Return the options with a ratio, or a rule for the ratio, that is no lower than ``ratio``."""
        mine = self.ratio
        if isinstance(mine, TextRatio):
            return replace(self, ratio=replace(mine, least=max(mine.least, ratio)))
        return replace(self, ratio=max(mine, ratio))

    def to_params(self) -> dict[str, Any]:
        """Return all options as JSON values; :meth:`from_params` reads them, in any process.

        Raises:
            InputError: The policy is an object that other processes cannot find by its name.
        """
        return {**self.terms, "policy": name_elsewhere(self.policy), "quality": self.quality}

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> Self:
        """Read the options that :meth:`to_params` returned.

        Raises:
            InputError: A value is out of range, or a package's policy cannot be loaded.
            TypeError: An option is missing, or does not exist.
        """
        given = {**params, "policy": policy(str(params.get("policy", "")))}
        if isinstance(rule := given.get("ratio"), Mapping):
            given["ratio"] = TextRatio(**rule)
        return cls(**given)
