"""Says what a token-selection policy is, holds ours, and finds them and those of installed packages by name.

A policy scores the tokens with stored KV, to choose those that are recomputed. A new one of ours is a class here and its place in
`POLICIES`; `examples/third_party_policy` is one in its own package.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, ClassVar, Final

from cacheblend_rag.errors import InputError

if TYPE_CHECKING:  # options are checked by programs that need no torch otherwise, such as the command line
    import torch

GROUP = "cacheblend_rag.policies"
"""The entry-point group of other packages' policies."""


@dataclass(frozen=True)
class Candidates:
    """Holds what is known of the tokens with stored, inexact KV, in ascending position.

    All tensors are ``[candidates]``, on one device.

    Attributes:
        positions: Absolute positions in the prompt.
        chunk: Which chunk of the prompt each belongs to, counting chunks with candidates from 0.
        offset: Index within its chunk.
        deviation: KV deviation at the check layer (fp32, summed over KV heads and dimensions of K and V), for policies
            that need it.
        attention: How much the question attends to each (fp32, mean over layers, heads and question tokens), measured over
            stored KV, for policies that need it.
        static: Static deviation (:mod:`cacheblend_rag.blending.static`), where every chunk's is stored.
    """

    positions: torch.Tensor
    chunk: torch.Tensor
    offset: torch.Tensor
    deviation: torch.Tensor | None = None
    attention: torch.Tensor | None = None
    static: torch.Tensor | None = None

    def at(self, mask: torch.Tensor) -> Candidates:
        """Return those that ``mask``, ``[candidates]``, says."""
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: tensor[mask] for name, tensor in tensors.items() if tensor is not None})


class SelectionPolicy(ABC):
    """Scores tokens; those of the highest score are recomputed, besides the question, the text between chunks and missing chunks.

    A policy is a subclass with a name and a score. It is given as an object, or by name if :data:`GROUP` has an entry point for
    it.

    Attributes:
        name: What users call it, and what is written down of it. Kept KV (conversations, vLLM's prefix cache) is told apart by
            it: two objects that choose differently need two names, so one with parameters has them in its name.
        needs_static: Whether it scores by the static deviation stored with each chunk (costs nothing at the question).
        needs_deviation: Whether KV deviation must be measured first (costs the dense pass up to the check layer).
        needs_attention: Whether the question's attention must be measured first (costs a pass of the question, and waiting for
            the stored KV of all layers).
        without_static: Of one that needs static deviations: name of the policy, without such a need, that takes its place where
            a chunk has none.
        without_attention: Of one that needs attention: the same where a model's cannot be watched.
        effort: How many times the tokens of `static-query` it takes to come as near to full recompute (docs/results.md): where
            a policy gives way, the other one's ratio is so much higher.
    """

    name: str
    needs_static: ClassVar[bool] = False
    needs_deviation: ClassVar[bool] = False
    needs_attention: ClassVar[bool] = False
    without_static: ClassVar[str] = "hkvd"
    without_attention: ClassVar[str] = "static"
    effort: ClassVar[float] = 1.0

    @abstractmethod
    def score(self, candidates: Candidates) -> torch.Tensor:
        """Return how much each token needs to be recomputed, ``[candidates]``, in any unit.

        Must depend on its argument alone, so that every tensor-parallel rank chooses the same tokens; so must :meth:`select`.
        """

    def select(self, candidates: Candidates, count: int) -> torch.Tensor:
        """Return a boolean mask ``[candidates]`` of the tokens to recompute, about ``count`` of them; see :func:`highest`."""
        return highest(self.score(candidates), count)


def highest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Return a boolean mask ``[candidates]`` of the ``count`` highest ``scores``; the earlier one where two are equal."""
    scores = scores.double().nan_to_num(float("inf"))  # as sorting would have it
    count = min(count, len(scores))
    least = scores.topk(count, sorted=False).values.amin() if count else float("inf")
    mask = scores > least
    mask[(scores == least).nonzero().squeeze(1)[: count - int(mask.sum())]] = True
    return mask


class HKVDPolicy(SelectionPolicy):
    """Scores by KV deviation at the check layer (CacheBlend, arXiv 2405.16444, section 4).

    The fusor narrows the set with depth (gradual filtering).
    """

    name = "hkvd"
    needs_deviation = True
    effort = 3.6

    def score(self, candidates: Candidates) -> torch.Tensor:
        assert candidates.deviation is not None
        return candidates.deviation


class StaticPolicy(SelectionPolicy):
    """Scores by static deviation (:mod:`cacheblend_rag.blending.static`), so that all is chosen before the first layer runs."""

    name = "static"
    needs_static = True
    effort = 1.8

    def score(self, candidates: Candidates) -> torch.Tensor:
        assert candidates.static is not None
        return candidates.static


class StaticQueryPolicy(SelectionPolicy):
    """Scores by the square root of the static deviation times the question's attention over stored KV.

    The root brings the squared distance to the scale of the attention; what deviates unread scores low, as does what is read but
    right. Needs all layers' KV before it selects, but no dense pass.
    """

    name = "static-query"
    needs_static = True
    needs_attention = True
    without_static = "query"

    def score(self, candidates: Candidates) -> torch.Tensor:
        assert candidates.static is not None
        assert candidates.attention is not None
        return candidates.static.sqrt() * candidates.attention


class QueryPolicy(SelectionPolicy):
    """Scores by the question's attention over stored KV (as ProphetKV, arXiv 2602.02579, and A³, arXiv 2511.17560, propose).

    Needs no check layer, but all layers' KV beforehand.
    """

    name = "query"
    needs_attention = True

    def score(self, candidates: Candidates) -> torch.Tensor:
        assert candidates.attention is not None
        return candidates.attention


class FullReusePolicy(SelectionPolicy):
    """Recomputes nothing, one end of the range: full KV reuse, with positions corrected."""

    name = "full-reuse"

    def score(self, candidates: Candidates) -> torch.Tensor:
        return candidates.positions.new_zeros(len(candidates.positions))

    def select(self, candidates: Candidates, count: int) -> torch.Tensor:
        return super().select(candidates, 0)


POLICIES: Final[dict[str, type[SelectionPolicy]]] = {
    each.name: each for each in (StaticPolicy, StaticQueryPolicy, HKVDPolicy, QueryPolicy, FullReusePolicy)
}
"""Ours, by name."""


def check_policy(which: object) -> None:
    """Refuse what is neither a policy nor the name of one; raises InputError."""
    if isinstance(which, str):
        if which not in POLICIES and which not in _installed():
            raise _unknown(which)
        return
    if not isinstance(which, SelectionPolicy):
        raise _unknown(which)
    name = getattr(which, "name", None)
    if not isinstance(name, str) or not name:
        raise InputError(f"The selection policy {which!r:.200} has no name; give its class one.")
    if name in POLICIES and type(which) is not POLICIES[name]:
        raise InputError(f"{type(which).__name__} is called {name!r}, as a policy of ours is; give it another name.")


def policy(which: str | SelectionPolicy) -> SelectionPolicy:
    """Return the policy of that name, or the one given.

    Raises:
        InputError: No such policy, or a package's cannot be loaded.
    """
    if not isinstance(which, str):
        return which
    check_policy(which)
    return _named(which)


def possible(wanted: SelectionPolicy, ranked: bool, watched: bool) -> SelectionPolicy:
    """Return ``wanted``, or the policy that takes its place where chunks are not ranked or attention is not to be watched."""
    chosen = wanted
    while (chosen.needs_static and not ranked) or (chosen.needs_attention and not watched):
        chosen = policy(chosen.without_static if chosen.needs_static and not ranked else chosen.without_attention)
    return chosen


def gave_way(wanted: SelectionPolicy, chosen: SelectionPolicy, ratio: float, unranked: bool) -> str:
    """Say in words that another policy chose, by which ratio, and why."""
    why = (
        "not all chunks are ranked" if wanted.needs_static and unranked else "this model's attention cannot be watched"
    )
    return f"; {wanted.name} gave way to {chosen.name} {ratio:.3g}, since {why}"


def policy_name(which: str | SelectionPolicy) -> str:
    """Return a policy's name, to be written down or shown."""
    return which if isinstance(which, str) else which.name


def name_elsewhere(which: str | SelectionPolicy) -> str:
    """Return the name by which another process finds the same policy.

    Raises:
        InputError: An object that is not what its name stands for there.
    """
    name = policy_name(which)
    if isinstance(which, str):
        return name
    if name in POLICIES or name in _installed():
        there = policy(name)
        if type(there) is type(which) and vars(there) == vars(which):
            return name
    kind = type(which)
    raise InputError(
        f"The selection policy {name!r} is an object of this process; vLLM's processes and servers find policies by name. "
        f"Register '{kind.__module__}:{kind.__qualname__}' as {name!r} in the entry-point group {GROUP!r} of a package that is "
        "installed there, too."
    )


@cache
def _named(name: str) -> SelectionPolicy:
    return POLICIES[name]() if name in POLICIES else _load(name, _installed()[name])


@cache
def _installed() -> dict[str, list[EntryPoint]]:
    """Return other packages' policies; looked for once, and only when a name is not ours: it takes tens of milliseconds."""
    found: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=GROUP):
        found.setdefault(point.name, []).append(point)
    return found


def _load(name: str, points: list[EntryPoint]) -> SelectionPolicy:
    packages = " and ".join(point.dist.name if point.dist else point.value for point in points)
    if len(points) > 1:
        raise InputError(f"The selection policy {name!r} is in several packages, {packages}; remove all but one.")
    try:
        found = points[0].load()
        made = found() if isinstance(found, type) else found
    except Exception as error:  # whatever a package does when it is imported
        raise InputError(
            f"The selection policy {name!r} of the package {packages} cannot be loaded ({type(error).__name__}: {error}); "
            "mend or remove that package."
        ) from error
    if not isinstance(made, SelectionPolicy) or made.name != name:
        raise InputError(
            f"The package {packages} has {points[0].value!r} for the selection policy {name!r}, which is no SelectionPolicy of "
            "that name; mend or remove that package."
        )
    return made


def _unknown(which: object) -> InputError:
    known = ", ".join([*POLICIES, *_installed()])
    return InputError(
        f"There is no selection policy {which!r:.200}; known ones: {known}. "
        f"Packages add others by the entry-point group {GROUP!r}."
    )
