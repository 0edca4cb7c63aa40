"""Records what became of a prompt: one record from the fusor to the wire, the spans and the frameworks' metadata."""

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
        chunk_id: The chunk; empty for the header.
        tier: Name of the tier.
        nbytes: Size of what was read: layers that a dense pass computes afresh are not.
        seconds: Time in which at least one of its reads ran, beside the computation; 0 from RAM, where nothing is read.
    """

    chunk_id: str
    tier: str
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class Usage:
    """Token counts of one request.

    ``prompt_tokens = reused_tokens + recomputed_tokens + (text and missing chunks)``; what was not reused was computed:
    ``computed_tokens = prompt_tokens - reused_tokens``.

    Attributes:
        prompt_tokens: Tokens in the prompt.
        reused_tokens: Prompt tokens whose stored KV was used as it is (the exact prefix included).
        recomputed_tokens: Tokens with stored KV that the selection policy chose to recompute.
        computed_tokens: Prompt tokens that went through all layers: text, missing chunks and recomputed ones.
        completion_tokens: Tokens generated.
        selection_tokens: What choosing the recomputed tokens cost besides: tokens of dense passes and of the question's pass over
            stored KV, times the share of layers they went through. 0 for `static`.
        kept_tokens: Those of the reused tokens whose KV the engine's prefix cache had, of an earlier prompt that begins alike.
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
    """Says what became of a prompt. A fact added here reaches the wire, answers, spans and metadata by itself.

    The fusor fills in what it knows; who knows more completes it with :func:`dataclasses.replace`.

    Attributes:
        mode: ``"blend"`` if stored KV was used anywhere in the prompt, else ``"prefill"``.
        reason: Why that mode, in words.
        usage: Token counts.
        missing: Ids of chunks whose KV was not in the store (computed in place, then written back).
        in_place: Ids of chunks that were computed although their KV is stored: the controller expected that to be sooner.
        own_missing: Id of the first chunk, where a KV writer's KV of it may be stored, but not the model's own, which it takes
            (computed in place, then written back).
        unranked: Ids of chunks for which static deviations were wanted, for policy or ratio, while one of them had none.
        policy: What chose the tokens to recompute; None for a prefill, and where a model's exact prefix alone is reused.
        ratio: Which share of the candidates it chose; None where ``policy`` is.
        load_s: Seconds the computation waited for stored KV.
        blend_s: Seconds from a blend's first segment to its last, other requests' steps in between included.
        loaded_bytes: Bytes of stored KV read; of several ranks, on the first.
        loads: Where the stored KV of each chunk came from, in a blend.
        reads: What reading took, by tier other than RAM.
        prefill_s: Seconds that computing all behind what the engine had kept was expected to take; None for a model that is not
            blended.
        expected_s: Seconds to the first token that the controller expected; None where it decided nothing.
        fingerprint: Identity of the model that answered; empty where nobody said.
        calibrated: Whether calibration has chosen how the model is blended; else nobody has looked how near a blend comes.
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
        """Return every fact by its name, as JSON values; those of the usage lie in a dict of their own."""
        found: dict[str, Any] = _adapter().dump_python(self, mode="json")
        return found

    def to_params(self) -> dict[str, Any]:
        """Return the facts as they travel, the usage's beside the others; :meth:`from_params` reads them."""
        facts = self.facts
        return {**facts.pop("usage"), **facts}

    @staticmethod
    def from_params(params: Any) -> PromptOutcome:
        """Read what :meth:`to_params` gave.

        Raises:
            InputError: A fact is unknown, malformed or missing; the message names it.
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
