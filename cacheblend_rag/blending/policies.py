"""Defines token-selection policies, holds the built-in ones, and finds policies of installed packages by name.

A policy scores the tokens with stored KV, to choose the tokens to recompute. A new built-in policy is a class in this
file and its place in `POLICIES`; `examples/third_party_policy` is a policy in a package of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, ClassVar, Final

from cacheblend_rag.errors import InputError
from cacheblend_rag.store import plugins

if TYPE_CHECKING:  # programs that need no torch otherwise check options, such as the command line
    import torch

GROUP = "cacheblend_rag.policies"
"""The entry-point group of other packages' policies."""


@dataclass(frozen=True)
class Candidates:
    """Holds the known facts about the tokens with stored, inexact KV, in ascending position.

    All tensors are ``[candidates]``, on one device.

    Attributes:
        positions: Absolute positions in the prompt.
        chunk: Number of the prompt's chunk that each token belongs to, counting chunks with candidates from 0.
        offset: Index of each token within its chunk.
        deviation: KV deviation at the check layer (fp32, summed over KV heads and dimensions of K and V), for policies
            that need it.
        attention: Attention of the question to each token (fp32, mean over layers, heads and question tokens), measured
            over stored KV, for policies that need it.
        static: Static deviation (:mod:`cacheblend_rag.blending.static`); None unless every chunk has it stored.

    Example:
        Score the tokens of a chunk higher the earlier they stand (in :meth:`SelectionPolicy.score`)::

            scores = 1.0 / (candidates.offset + 1)
            in_first_chunk = candidates.at(candidates.chunk == 0)
    """

    positions: torch.Tensor
    chunk: torch.Tensor
    offset: torch.Tensor
    deviation: torch.Tensor | None = None
    attention: torch.Tensor | None = None
    static: torch.Tensor | None = None

    def at(self, mask: torch.Tensor) -> Candidates:
        """Return the candidates at the boolean ``mask``, ``[candidates]``."""
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: tensor[mask] for name, tensor in tensors.items() if tensor is not None})


class SelectionPolicy(ABC):
    """Scores tokens. The tokens of the highest score are recomputed, besides question, text and missing chunks.

    A policy is a subclass with a name and a score. Users pass an object, or a name if :data:`GROUP` has an entry point
    of that name.

    Attributes:
        name: Name that users give and that is stored. Prefix and session caches distinguish their KV by this name: two
            objects that choose differently need two names, so a policy with parameters has them in its name.
        needs_static: Whether the policy scores by the static deviation stored with each chunk (costs nothing at the
            question).
        needs_deviation: Whether KV deviation must be measured first (costs the dense pass up to the check layer).
        needs_attention: Whether the question's attention must be measured first (costs a pass of the question, and
            waiting for the stored KV of all layers).
        without_static: Name of the policy to fall back to if a chunk has no static deviation; must not need one itself.
        without_attention: Name of the policy to fall back to if the model's attention cannot be measured.
        effort: Number of tokens, relative to `static-query`, that the policy recomputes to come as near to full
            recompute (docs/results.md): a fallback policy's ratio is raised accordingly.

    Example:
        Recompute the first tokens of every chunk::

            class Starts(SelectionPolicy):
                name = "starts"

                def score(self, candidates):
                    return 1.0 / (candidates.offset + 1)
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
        """Return each token's need to be recomputed, ``[candidates]``, in any unit.

        Must depend on its argument alone, so that every tensor-parallel rank chooses the same tokens; so must
        :meth:`select`.
        """

    def select(self, candidates: Candidates, count: int) -> torch.Tensor:
        """Return a boolean mask ``[candidates]`` of about ``count`` tokens to recompute; see :func:`highest`."""
        return highest(self.score(candidates), count)


def highest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Return a boolean mask ``[candidates]`` of the ``count`` highest ``scores``; of equal scores the earlier ones."""
    scores = scores.double().nan_to_num(float("inf"))  # sorting puts NaN highest, too
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
    """Scores by static deviation (:mod:`cacheblend_rag.blending.static`), so it selects before the first layer runs."""

    name = "static"
    needs_static = True
    effort = 1.8

    def score(self, candidates: Candidates) -> torch.Tensor:
        assert candidates.static is not None
        return candidates.static


class StaticQueryPolicy(SelectionPolicy):
    """Scores by the square root of the static deviation times the question's attention over stored KV.

    The root brings the squared distance to the scale of the attention. Tokens that deviate but are not attended to
    score low, and so do tokens that are attended to but do not deviate. Needs all layers' KV before it selects, but no
    dense pass.
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
    """Scores by the question's attention over stored KV (as in ProphetKV, arXiv 2602.02579, and A³, arXiv 2511.17560).

    Needs all layers' KV before it selects, but no check layer.
    """

    name = "query"
    needs_attention = True

    def score(self, candidates: Candidates) -> torch.Tensor:
        assert candidates.attention is not None
        return candidates.attention


class FullReusePolicy(SelectionPolicy):
    """Recomputes nothing: full KV reuse, with positions corrected."""

    name = "full-reuse"

    def score(self, candidates: Candidates) -> torch.Tensor:
        return candidates.positions.new_zeros(len(candidates.positions))

    def select(self, candidates: Candidates, count: int) -> torch.Tensor:
        return super().select(candidates, 0)


POLICIES: Final[dict[str, type[SelectionPolicy]]] = {
    each.name: each for each in (StaticPolicy, StaticQueryPolicy, HKVDPolicy, QueryPolicy, FullReusePolicy)
}
"""Built-in policies, by name."""


def check_policy(which: object) -> None:
    """Raise InputError if ``which`` is neither a policy nor the name of a policy."""
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
    """Return the policy named ``which``, or ``which`` if it is a policy.

    Raises:
        InputError: No policy has that name, or a package's policy cannot be loaded.
    """
    if not isinstance(which, str):
        return which
    check_policy(which)
    return _named(which)


def possible(wanted: SelectionPolicy, ranked: bool, watched: bool) -> SelectionPolicy:
    """Return ``wanted``, or its fallback if chunks are not ``ranked`` or attention cannot be ``watched``."""
    chosen = wanted
    while (chosen.needs_static and not ranked) or (chosen.needs_attention and not watched):
        chosen = policy(chosen.without_static if chosen.needs_static and not ranked else chosen.without_attention)
    return chosen


def fallback_reason(wanted: SelectionPolicy, chosen: SelectionPolicy, ratio: float, unranked: bool) -> str:
    """Return in words which policy took the place of ``wanted``, by which ratio, and why."""
    why = (
        "not all chunks are ranked" if wanted.needs_static and unranked else "this model's attention cannot be watched"
    )
    return f"; {wanted.name} fell back to {chosen.name} {ratio:.3g}, since {why}"


def policy_name(which: str | SelectionPolicy) -> str:
    """Return a policy's name, for storing or display."""
    return which if isinstance(which, str) else which.name


def name_elsewhere(which: str | SelectionPolicy) -> str:
    """Return the name by which another process finds the same policy.

    Raises:
        InputError: The policy is an object that another process would not find by its name.
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
    return POLICIES[name]() if name in POLICIES else plugins.load(GROUP, name, "selection policy", partial(_made, name))


def _made(name: str, found: Any) -> SelectionPolicy:
    made = found() if isinstance(found, type) else found
    if not isinstance(made, SelectionPolicy) or made.name != name:
        raise TypeError("no SelectionPolicy of that name")
    return made


@cache
def _installed() -> list[str]:
    """Return the names of other packages' policies; cached, because the search takes tens of milliseconds."""
    return sorted(plugins.names(GROUP))


def _unknown(which: object) -> InputError:
    known = ", ".join([*POLICIES, *_installed()])
    return InputError(
        f"There is no selection policy {which!r:.200}; known ones: {known}. "
        f"Packages add others by the entry-point group {GROUP!r}."
    )
