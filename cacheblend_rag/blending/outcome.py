"""Records the outcome of a prompt: one record for the fusor, the wire, the spans and the frameworks' metadata."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from cacheblend_rag.errors import InputError
from cacheblend_rag.store.events import TierReads

if TYPE_CHECKING:
    from pydantic import TypeAdapter

Mode = Literal["blend", "prefill"]
Fate = Literal["exact", "reused", "recomputed", "missing"]
Lack = Literal["kv", "own_kv", "static"]
_KNOWN: Mapping[str, Any] = {"extra": "forbid"}


@dataclass(frozen=True)
class ChunkLoad:
    """Says where the stored KV of one chunk, or of the header, came from.

    Attributes:
        tier: Name of the tier.
        nbytes: Number of bytes read, without the layers that a dense pass computes.
        seconds: Time in which at least one of the chunk's reads ran, beside the computation; 0 from RAM, where nothing
            is read.
    """

    tier: str
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class ChunkOutcome:
    """Says what became of one chunk of a prompt.

    Attributes:
        id: Id of the chunk.
        start: First position of the chunk in the prompt.
        tokens: Number of tokens of the chunk.
        fate: ``exact``: KV that was computed in this very context was used. ``reused``: KV that was computed in another
            context was used, except for the recomputed tokens. ``recomputed``: the whole chunk was computed, although
            its KV may be stored. ``missing``: the KV that the chunk needs was not stored, so the chunk was computed.
        computed: Number of the chunk's tokens that were computed.
        lacks: Things that the store lacked: ``kv``, the chunk's KV; ``own_kv``, the model's own KV of a first chunk, whose
            exact reuse needs more than a KV writer's KV; ``static``, the static deviation of the chunk, which the policy
            or the ratio needed. The engine stores each of them after the answer.
        load: Where the stored KV came from, in a blend; None if no stored KV was read.
    """

    id: str
    start: int
    tokens: int
    fate: Fate
    computed: int = 0
    lacks: tuple[Lack, ...] = ()
    load: ChunkLoad | None = None


@dataclass(frozen=True)
class Usage:
    """Holds the token counts of one request.

    ``prompt_tokens = reused_tokens + recomputed_tokens + (text and missing chunks)``; tokens that were not reused were
    computed: ``computed_tokens = prompt_tokens - reused_tokens``.

    Attributes:
        prompt_tokens: Tokens in the prompt.
        reused_tokens: Prompt tokens whose stored KV was used as it is (the exact prefix included).
        recomputed_tokens: Tokens with stored KV that the selection policy chose to recompute.
        computed_tokens: Prompt tokens that went through all layers: text, missing chunks and recomputed tokens.
        completion_tokens: Tokens generated.
        selection_tokens: Additional cost of choosing the recomputed tokens: tokens of dense passes and of the
            question's pass over stored KV, times the share of layers they went through. 0 for `static`.
        kept_tokens: Reused tokens whose KV the engine's prefix cache had from an earlier prompt with the same
            beginning.
        exact_tokens: Reused tokens whose KV was computed in this very context.

    Example:
        Print how many prompt tokens were reused::

            usage = engine.generate("Who is the captain?").usage
            print(f"{usage.reused_tokens} of {usage.prompt_tokens} prompt tokens reused")
    """

    __pydantic_config__: ClassVar = _KNOWN

    prompt_tokens: int
    reused_tokens: int
    recomputed_tokens: int
    computed_tokens: int
    completion_tokens: int = 0
    selection_tokens: float = 0.0
    kept_tokens: int = 0
    exact_tokens: int = 0


@dataclass(frozen=True)
class PromptOutcome:
    """Records the outcome of a prompt; a field added here reaches the wire, answers, spans and metadata by itself.

    The fusor fills in the fields it knows; other components add theirs with :func:`dataclasses.replace`.

    Attributes:
        mode: ``"blend"`` if stored KV was used anywhere in the prompt, else ``"prefill"``.
        reason: Why the engine chose this mode, in words.
        usage: Token counts.
        chunks: Record of each chunk, in the order of the prompt; empty if the engine did not plan the prompt.
        policy: Name of the policy that chose the tokens to recompute; None for a prefill, and if a model reuses only
            its exact prefix.
        ratio: Share of the candidates that the policy chose; None if ``policy`` is None.
        load_s: Seconds the computation waited for stored KV.
        blend_s: Seconds from a blend's first segment to its last, other requests' steps in between included.
        loaded_bytes: Bytes of stored KV read; with several ranks, on the first rank.
        header: Where the stored KV of the header came from, in a blend; None if no KV of the header was read.
        reads: Bytes, number and time of the reads, by tier other than RAM.
        prefill_s: Seconds that computing all tokens behind the engine's prefix cache would have taken, at the speed at
            which this prompt's own passes ran; None for a model that is not blended.
        expected_s: Seconds to the first token that the controller expected; None if the controller decided nothing.
        fingerprint: Identity of the model that answered; empty if unknown.
        calibrated: Whether calibration has chosen how the model is blended; otherwise the accuracy of a blend is
            unmeasured.

    Example:
        Print why an engine did not blend; a :class:`Generation` is a PromptOutcome::

            generation = engine.generate("Who is the captain?")
            if generation.mode == "prefill":
                print(generation.reason)
    """

    __pydantic_config__: ClassVar = _KNOWN

    mode: Mode
    reason: str
    usage: Usage
    chunks: tuple[ChunkOutcome, ...] = ()
    policy: str | None = None
    ratio: float | None = None
    load_s: float = 0.0
    blend_s: float = 0.0
    loaded_bytes: int = 0
    header: ChunkLoad | None = None
    reads: Mapping[str, TierReads] = field(default_factory=dict)
    prefill_s: float | None = None
    expected_s: float | None = None
    fingerprint: str = ""
    calibrated: bool = False

    @property
    def missing(self) -> tuple[str, ...]:
        """Return the ids of chunks whose KV was not stored; the engine stores their KV after the answer."""
        return self.lacking("kv")

    @property
    def in_place(self) -> tuple[str, ...]:
        """Return the ids of chunks that were computed as a whole, although their KV may be stored."""
        return tuple(chunk.id for chunk in self.chunks if chunk.fate == "recomputed")

    def lacking(self, what: Lack) -> tuple[str, ...]:
        """Return the ids of chunks of which the store lacked ``what``."""
        return tuple(chunk.id for chunk in self.chunks if what in chunk.lacks)

    @property
    def loads(self) -> tuple[ChunkLoad, ...]:
        """Return where stored KV came from: the header's KV, if it was read, then each chunk's."""
        return tuple(load for load in (self.header, *(chunk.load for chunk in self.chunks)) if load is not None)

    @property
    def tokens_by_fate(self) -> dict[str, int]:
        """Return the prompt's tokens by fate, with the key ``text`` for computed tokens outside the chunks.

        The five counts add up to the prompt.
        """
        usage = self.usage
        missing = sum(chunk.computed for chunk in self.chunks if chunk.fate == "missing")
        recomputed = sum(chunk.computed for chunk in self.chunks) - missing
        return {
            "exact": usage.exact_tokens,
            "reused": usage.reused_tokens - usage.exact_tokens,
            "recomputed": recomputed,
            "missing": missing,
            "text": usage.computed_tokens - recomputed - missing,
        }

    @property
    def facts(self) -> dict[str, Any]:
        """Return every field by its name, as JSON values; the usage is a dict of its own."""
        found: dict[str, Any] = _adapter().dump_python(self, mode="json")
        return found

    def to_params(self) -> dict[str, Any]:
        """Return the fields in the wire format, the usage's fields beside the others; :meth:`from_params` reads it."""
        facts = self.facts
        return {**facts.pop("usage"), **facts}

    @staticmethod
    def from_params(params: Any) -> PromptOutcome:
        """Read the result of :meth:`to_params`.

        Raises:
            InputError: A field is unknown, malformed or missing; the message names it.
        """
        from pydantic import ValidationError

        if not isinstance(params, Mapping):
            raise InputError("The report of a prompt is malformed: it is no object.")
        counted = {each.name for each in fields(Usage)}
        usage = {name: value for name, value in params.items() if name in counted}
        rest = {name: value for name, value in params.items() if name not in counted}
        try:
            return _adapter().validate_python({**rest, "usage": usage})
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"]))
            raise InputError(f"The report of a prompt is malformed: {place}: {first['msg']}.") from error


@cache
def _adapter() -> TypeAdapter[PromptOutcome]:
    from pydantic import TypeAdapter

    return TypeAdapter(PromptOutcome)
