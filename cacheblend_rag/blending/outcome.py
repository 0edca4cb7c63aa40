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
_KNOWN: Mapping[str, Any] = {"extra": "forbid"}


@dataclass(frozen=True)
class ChunkLoad:
    """Says where the stored KV of one chunk in a prompt came from.

    Attributes:
        chunk_id: Id of the chunk; empty for the header.
        tier: Name of the tier.
        nbytes: Number of bytes read, without the layers that a dense pass computes.
        seconds: Time in which at least one of the chunk's reads ran, beside the computation; 0 from RAM, where nothing
            is read.
    """

    chunk_id: str
    tier: str
    nbytes: int
    seconds: float


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


@dataclass(frozen=True)
class PromptOutcome:
    """Records the outcome of a prompt; a field added here reaches the wire, answers, spans and metadata by itself.

    The fusor fills in the fields it knows; other components add theirs with :func:`dataclasses.replace`.

    Attributes:
        mode: ``"blend"`` if stored KV was used anywhere in the prompt, else ``"prefill"``.
        reason: Why the engine chose this mode, in words.
        usage: Token counts.
        missing: Ids of chunks whose KV was not in the store (computed in place, then written back).
        in_place: Ids of chunks that were computed although their KV is stored, since the controller expected computing
            to be sooner.
        own_missing: Id of the first chunk, if its exact reuse needs the model's own KV and at most a KV writer's KV is
            stored (computed in place, then written back).
        unranked: Ids of the stale chunks, if the policy or the ratio needed static deviations and a chunk had none.
        policy: Name of the policy that chose the tokens to recompute; None for a prefill, and if a model reuses only
            its exact prefix.
        ratio: Share of the candidates that the policy chose; None if ``policy`` is None.
        load_s: Seconds the computation waited for stored KV.
        blend_s: Seconds from a blend's first segment to its last, other requests' steps in between included.
        loaded_bytes: Bytes of stored KV read; with several ranks, on the first rank.
        loads: Where the stored KV of each chunk came from, in a blend.
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
    missing: tuple[str, ...] = ()
    in_place: tuple[str, ...] = ()
    own_missing: tuple[str, ...] = ()
    unranked: tuple[str, ...] = ()
    policy: str | None = None
    ratio: float | None = None
    load_s: float = 0.0
    blend_s: float = 0.0
    loaded_bytes: int = 0
    loads: tuple[ChunkLoad, ...] = ()
    reads: Mapping[str, TierReads] = field(default_factory=dict)
    prefill_s: float | None = None
    expected_s: float | None = None
    fingerprint: str = ""
    calibrated: bool = False

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
