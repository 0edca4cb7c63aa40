"""Defines what travels between the client, the scheduler's connector and the workers' connectors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, ClassVar

from pydantic import Field, GetPydanticSchema, TypeAdapter
from pydantic_core import core_schema
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from cacheblend_rag.blending.controller import Choice, Terms
from cacheblend_rag.blending.costs import Computed, MeasuredCost
from cacheblend_rag.blending.outcome import PromptOutcome
from cacheblend_rag.blending.plan import Origin, origins
from cacheblend_rag.blending.policies import policy
from cacheblend_rag.blending.settings import BlendSchedule, FuseOptions, ResolvedSettings, TextRatio, blend_terms
from cacheblend_rag.blending.trace import TraceEvent
from cacheblend_rag.errors import CacheBlendError, InputError
from cacheblend_rag.prompts.chunk import Chunk
from cacheblend_rag.prompts.prompt import ChunkSpan, TokenizedPrompt
from cacheblend_rag.store.files import DEFAULT, Namespace
from cacheblend_rag.store.kv import KVKey

PARAMS = "cacheblend"
"""Our key in a request's ``kv_transfer_params``, on the way in and out."""

_KNOWN: Mapping[str, Any] = {"extra": "forbid"}
_Settings = Annotated[
    ResolvedSettings,
    GetPydanticSchema(
        lambda _, __: core_schema.no_info_plain_validator_function(
            ResolvedSettings.from_params,
            serialization=core_schema.plain_serializer_function_ser_schema(ResolvedSettings.to_params),
        )
    ),
]


@dataclass(frozen=True)
class BlendJob:
    """Asks for a blend: where the chunks are and how to treat them.

    Attributes:
        spans: Start, end and id of each chunk, ascending.
        settings: How to treat stored KV, nothing left open.
        widths: Of the set at each check layer, as multiples of the ratio.
        ratio: The settings' ratio, or the rule that chooses it: workers know no profile.
        terms: What the loading controller reckons by, where the request leaves the ratio to it.
        trace: Whether to record what is loaded and computed when.
        namespace: Where the stored KV is that it uses.
        turn_ends: Where earlier prompts of the conversation ended: the scheduler knows no template.
        unasked: How many tokens at the end are no question, but an answer to be scored: their attention selects nothing.
    """

    __pydantic_config__: ClassVar = _KNOWN

    spans: tuple[tuple[int, int, str], ...]
    settings: _Settings
    widths: tuple[float, ...]
    ratio: Annotated[float, Field(ge=0, le=1)] | TextRatio
    terms: Terms | None = None
    trace: bool = False
    namespace: Namespace = DEFAULT
    turn_ends: tuple[int, ...] = ()
    unasked: int = 0

    @property
    def options(self) -> FuseOptions:
        """Return what the fusor is told."""
        schedule = BlendSchedule(self.settings.check_layers, self.widths)
        return FuseOptions(policy(self.settings.policy), self.ratio, schedule)

    def check(self, prompt_tokens: int) -> None:
        """Refuse to belong to a prompt of ``prompt_tokens`` to which it does not fit; raises ValueError."""
        if len(self.widths) != len(self.settings.check_layers):
            raise ValueError("widths and check_layers differ in number")
        edges = [edge for a, b, _ in self.spans for edge in (a, b)]
        if edges != sorted(edges) or any(a >= b for a, b, _ in self.spans):
            raise ValueError("the spans are not ascending")
        if edges and not 0 <= edges[0] <= edges[-1] <= prompt_tokens:
            raise ValueError("a span lies outside the prompt")
        if not 0 <= self.unasked <= prompt_tokens:
            raise ValueError("the answer to be scored lies outside the prompt")
        if list(self.turn_ends) != sorted(self.turn_ends):
            raise ValueError("the ends of turns are not ascending")

    def origins(self, token_ids: tuple[int, ...], header_tokens: int) -> tuple[Origin, ...]:
        """Return how the KV of the prompt will come about, wherever its stored KV is."""
        return origins(
            [(a, b) for a, b, _ in self.spans],
            token_ids,
            self.turn_ends,
            header_tokens,
            blend_terms(self.settings, self.options),
            self.options.watches_question,
        )

    def prompt(self, token_ids: tuple[int, ...]) -> TokenizedPrompt:
        """Return the prompt with the chunks in it."""
        return TokenizedPrompt(
            token_ids,
            tuple(ChunkSpan(Chunk(id=name, text="", token_ids=token_ids[a:b]), a, b) for a, b, name in self.spans),
        )


@dataclass(frozen=True)
class SaveJob:
    """Asks for a prompt of ``header + chunk`` to be stored; a ``start`` of 0 stores the header itself.

    With ``ranking`` the prompt is ``header + probe + chunk``, and the chunk's static deviation is added to its stored entry.
    The entry is in the ``namespace``. With ``written`` the KV writer computes so many tokens, which end with the chunk; vLLM
    computes the last of those behind them, and of these nothing is stored.
    """

    __pydantic_config__: ClassVar = _KNOWN

    start: int
    ranking: bool = False
    namespace: Namespace = DEFAULT
    written: int = 0

    def check(self, prompt_tokens: int) -> None:
        """Refuse to belong to a prompt of ``prompt_tokens`` to which it does not fit; raises ValueError."""
        if not 0 <= self.start < prompt_tokens:
            raise ValueError("the start of what is to be saved is outside the prompt")
        if self.written and not self.start <= self.written < prompt_tokens:
            raise ValueError("what is to be written is outside the prompt")


def receipt(key: KVKey, ranking: bool) -> str:
    """Return what a worker reports a written entry by; a ranking is another piece of work than the KV itself."""
    return f"{key}:ranking" if ranking else str(key)


BUSY = "too many entries wait for the disk already; try again"
"""Receipt of a save that a worker had no room for: the one that is worth trying again."""


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def to_params(message: BlendJob | SaveJob | FinishReport) -> dict[str, Any]:
    """Return a message as our part of a request's ``kv_transfer_params``; what has its default is left out."""
    kind: Any = type(message)
    return {PARAMS: _adapter(kind).dump_python(message, mode="json", exclude_defaults=True)}


def read_params(params: Mapping[str, Any] | None, prompt_tokens: int) -> BlendJob | SaveJob | None:
    """Read a request's ``kv_transfer_params``; None if they hold nothing of ours.

    Raises:
        InputError: They are malformed. They may come from anybody on the network.
    """
    ours = (params or {}).get(PARAMS)
    if ours is None:
        return None
    try:
        job: BlendJob | SaveJob = _adapter(SaveJob if "start" in ours else BlendJob).validate_python(ours)
        job.check(prompt_tokens)
        return job
    except (CacheBlendError, TypeError, ValueError) as error:
        raise InputError(f"kv_transfer_params[{PARAMS!r}] is malformed: {error}") from error


@dataclass(frozen=True)
class LoadOrder:
    """Fill the positions ``start`` to ``end`` of a request's pages by blending; ``token_ids`` is the whole prompt.

    Those of a :class:`SaveJob` the KV writer computes. ``choice`` is the loading controller's, for all ranks alike.
    """

    request_id: str
    token_ids: tuple[int, ...]
    start: int
    end: int
    pages: tuple[tuple[int, ...], ...]
    job: BlendJob | SaveJob
    choice: Choice | None = None

    @property
    def options(self) -> FuseOptions:
        """Return what the fusor is told of a blend."""
        assert isinstance(self.job, BlendJob)
        return self.job.options if self.choice is None else self.choice.limits(self.job.options)


@dataclass(frozen=True)
class Save:
    """Do a ``job`` with what a step has computed of a request's prompt.

    Attributes:
        request_id: The request.
        token_ids: The whole prompt.
        pages: What holds the positions ``begin`` to ``end`` after this step; of others, layers with a window may have none.
        begin: First position of this part; the parts of a prompt follow each other without a gap.
        end: Behind its last position; the last part ends with the prompt.
        job: What was asked for.
    """

    request_id: str
    token_ids: tuple[int, ...]
    pages: tuple[tuple[int, ...], ...]
    begin: int
    end: int
    job: SaveJob

    @property
    def complete(self) -> bool:
        """Return whether this is the last part."""
        return self.end == len(self.token_ids)


@dataclass
class StepMeta(KVConnectorMetadata):
    """Says what the workers are to do in one engine step.

    Attributes:
        loads: New blends.
        saves: Prompts that are complete after this step.
        idle: No request is computed in this step, so that a blend holds up nobody.
        pace: Seconds per token of each kind of work, as measured; every rank cuts its passes by these same numbers.
        held: Requests whose blends do not go on in this step.
    """

    loads: list[LoadOrder] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    idle: bool = False
    pace: dict[str, float] = field(default_factory=dict)
    held: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class FinishReport:
    """Holds what a finished request's output says in its ``kv_transfer_params``, as JSON values.

    Attributes:
        outcome: What became of its prompt, as far as scheduler and workers know.
        measured: What the workers have measured since the last one.
        out: Of each remote tier, whether it was out by then.
        trace: What was recorded, where that was asked for.
    """

    outcome: PromptOutcome
    measured: tuple[Computed, ...] = ()
    out: Mapping[str, bool] = field(default_factory=dict)
    trace: tuple[TraceEvent, ...] = ()

    @property
    def cost(self) -> MeasuredCost:
        """Return what corrects the loading controller's costs."""
        return MeasuredCost(self.measured, self.outcome.reads, self.outcome.load_s)


def read_report(params: Mapping[str, Any] | None) -> FinishReport | None:
    """Read what a finished request's ``kv_transfer_params`` say; None if they hold nothing of ours."""
    ours = (params or {}).get(PARAMS)
    report: FinishReport | None = _adapter(FinishReport).validate_python(ours) if ours else None
    return report


@dataclass
class WorkerMeta(KVConnectorWorkerMetadata):
    """Says what became of the blends that ended in this step, by request, why others failed, and what work took.

    The counts of an outcome are within the positions that the blend filled; ``traces`` has what was recorded, where asked for.

    ``times`` holds tokens and seconds of each kind of work measured since the last report, ``computed`` the blends and steps of
    prefill that were measured whole. ``held`` has the bytes of every entry that has come into the first rank's RAM, 0 for one
    that has left it.
    """

    done: dict[str, PromptOutcome] = field(default_factory=dict)
    traces: dict[str, tuple[TraceEvent, ...]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    times: dict[str, tuple[float, float]] = field(default_factory=dict)
    computed: list[Computed] = field(default_factory=list)
    held: dict[KVKey, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.done or self.failed or self.times or self.computed or self.held)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerMeta:
        """Take the first rank's results: all ranks choose and compute the same tokens."""
        assert isinstance(other, WorkerMeta)
        done, failed = {**other.done, **self.done}, {**other.failed, **self.failed}
        traces, times = {**other.traces, **self.traces}, {**other.times, **self.times}
        held = {**other.held, **self.held}
        return WorkerMeta(done, traces, failed, times, self.computed or other.computed, held)
