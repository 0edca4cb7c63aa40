"""Defines the messages between the client, the scheduler's connector and the workers' connectors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, ClassVar

from pydantic import GetPydanticSchema, TypeAdapter
from pydantic_core import core_schema
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from cacheblend_rag.blending.controller import Choice
from cacheblend_rag.blending.costs import Computed, Costs, MeasuredCost
from cacheblend_rag.blending.outcome import PromptOutcome
from cacheblend_rag.blending.plan import Origin, origins
from cacheblend_rag.blending.settings import FuseOptions
from cacheblend_rag.blending.trace import TraceEvent
from cacheblend_rag.errors import CacheBlendError, InputError
from cacheblend_rag.prompts.chunk import Chunk
from cacheblend_rag.prompts.prompt import ChunkSpan, TokenizedPrompt
from cacheblend_rag.store.files import DEFAULT, Namespace
from cacheblend_rag.store.kv import KVKey

PARAMS = "cacheblend"
"""Key of this package's part of a request's ``kv_transfer_params``, in the input and in the output."""

_KNOWN: Mapping[str, Any] = {"extra": "forbid"}
_Options = Annotated[
    FuseOptions,
    GetPydanticSchema(
        lambda _, __: core_schema.no_info_plain_validator_function(
            FuseOptions.from_params,
            serialization=core_schema.plain_serializer_function_ser_schema(FuseOptions.to_params),
        )
    ),
]


@dataclass(frozen=True)
class BlendJob:
    """Requests a blend, with the positions of the chunks and the treatment of their KV.

    Attributes:
        spans: Start, end and id of each chunk, ascending.
        options: Decisions about the blend.
        costs: Costs for the loading controller; None if the controller decides nothing.
        trace: Whether to record a trace of loading and computing.
        namespace: Namespace of the stored KV that the blend uses.
        turn_ends: Ends of earlier prompts of the conversation; sent along since the scheduler has no chat template.
        unasked: Number of tokens at the end that are an answer to be scored, not a question; their attention selects no
            tokens.
    """

    __pydantic_config__: ClassVar = _KNOWN

    spans: tuple[tuple[int, int, str], ...]
    options: _Options
    costs: Costs | None = None
    trace: bool = False
    namespace: Namespace = DEFAULT
    turn_ends: tuple[int, ...] = ()
    unasked: int = 0

    def check(self, prompt_tokens: int) -> None:
        """Raise ValueError if the job is inconsistent or does not fit a prompt of ``prompt_tokens`` tokens."""
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
        """Return the origins of the prompt's approximate KV, which do not depend on the store's contents."""
        return origins(
            [(a, b) for a, b, _ in self.spans],
            token_ids,
            self.turn_ends,
            header_tokens,
            self.options.terms,
            self.options.watches_question,
        )

    def prompt(self, token_ids: tuple[int, ...]) -> TokenizedPrompt:
        """Return the tokenized prompt with the spans of its chunks."""
        return TokenizedPrompt(
            token_ids,
            tuple(ChunkSpan(Chunk(id=name, text="", token_ids=token_ids[a:b]), a, b) for a, b, name in self.spans),
        )


@dataclass(frozen=True)
class SaveJob:
    """Requests storage of the KV of a prompt ``header + chunk`` from ``start`` on; a ``start`` of 0 stores the header.

    With ``ranking`` the prompt is ``header + probe + chunk``, and the chunk's static deviation is added to its stored
    entry. The entry belongs to ``namespace``. With ``written`` the KV writer computes the prompt, whose first
    ``written`` tokens end with the chunk; vLLM computes the prompt's last token. No KV behind the chunk is stored.
    """

    __pydantic_config__: ClassVar = _KNOWN

    start: int
    ranking: bool = False
    namespace: Namespace = DEFAULT
    written: int = 0

    def check(self, prompt_tokens: int) -> None:
        """Raise ValueError if the job does not fit a prompt of ``prompt_tokens`` tokens."""
        if not 0 <= self.start < prompt_tokens:
            raise ValueError("the start of what is to be saved is outside the prompt")
        if self.written and not self.start <= self.written < prompt_tokens:
            raise ValueError("what is to be written is outside the prompt")


def receipt(key: KVKey, ranking: bool) -> str:
    """Return the name under which a worker reports a written entry; a ranking has another name than the KV itself."""
    return f"{key}:ranking" if ranking else str(key)


BUSY = "too many entries wait for the disk already; try again"
"""Receipt of a save that a worker had no room for; no other failed save is worth a retry."""


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def to_params(message: BlendJob | SaveJob | FinishReport) -> dict[str, Any]:
    """Return a message as this package's part of ``kv_transfer_params``, without fields that have their default."""
    kind: Any = type(message)
    return {PARAMS: _adapter(kind).dump_python(message, mode="json", exclude_defaults=True)}


def read_params(params: Mapping[str, Any] | None, prompt_tokens: int) -> BlendJob | SaveJob | None:
    """Return the job in a request's ``kv_transfer_params``; None if there is no part of this package.

    Raises:
        InputError: The part is malformed; requests may come from anybody on the network.
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
    """Orders a blend of the positions ``start`` to ``end`` of a request's pages; ``token_ids`` is the whole prompt.

    The KV writer computes the positions of a :class:`SaveJob`. All ranks follow the loading controller's ``choice``.
    ``start_exact`` says whether the KV before ``start`` was computed in exactly this context.
    """

    request_id: str
    token_ids: tuple[int, ...]
    start: int
    end: int
    pages: tuple[tuple[int, ...], ...]
    job: BlendJob | SaveJob
    choice: Choice | None = None
    start_exact: bool = True

    @property
    def options(self) -> FuseOptions:
        """Return the options for the fusor, with a ratio no lower than that of the loading controller's choice."""
        assert isinstance(self.job, BlendJob)
        return self.job.options if self.choice is None else self.job.options.at_least(self.choice.ratio)


@dataclass(frozen=True)
class Save:
    """Orders a ``job`` for the part of a request's prompt that a step has computed.

    Attributes:
        request_id: Id of the request.
        token_ids: Token ids of the whole prompt.
        pages: Pages of the request, which hold the positions ``begin`` to ``end`` after this step; layers with a window
            may have no pages for other positions.
        begin: First position of this part; the parts of a prompt follow each other without a gap.
        end: Position behind the last position of this part; the last part ends with the prompt.
        job: Job of the request.
    """

    request_id: str
    token_ids: tuple[int, ...]
    pages: tuple[tuple[int, ...], ...]
    begin: int
    end: int
    job: SaveJob

    @property
    def complete(self) -> bool:
        """Return whether this part is the prompt's last part."""
        return self.end == len(self.token_ids)


@dataclass
class StepMeta(KVConnectorMetadata):
    """Holds the workers' tasks for one engine step.

    Attributes:
        loads: New blends.
        saves: Prompts, or parts of prompts, to copy out after this step.
        idle: Whether no request is computed in this step, so that a blend delays no request.
        pace: Measured seconds per token of each kind of work; every rank cuts its passes by the same numbers.
        held: Requests whose blends pause in this step.
    """

    loads: list[LoadOrder] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    idle: bool = False
    pace: dict[str, float] = field(default_factory=dict)
    held: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class FinishReport:
    """Holds the report of a finished request, which its output's ``kv_transfer_params`` contain as JSON values.

    Attributes:
        outcome: Outcome of the prompt, as far as scheduler and workers know it.
        measured: Computations that the workers have measured since the last report.
        out: Whether each remote tier was skipped at the request's end, by name of the tier.
        trace: Recorded events, if a trace was requested.
    """

    outcome: PromptOutcome
    measured: tuple[Computed, ...] = ()
    out: Mapping[str, bool] = field(default_factory=dict)
    trace: tuple[TraceEvent, ...] = ()

    @property
    def cost(self) -> MeasuredCost:
        """Return the measurements that correct the loading controller's costs."""
        return MeasuredCost(self.measured, self.outcome.reads, self.outcome.load_s)


def read_report(params: Mapping[str, Any] | None) -> FinishReport | None:
    """Return the report in a finished request's ``kv_transfer_params``; None if there is no part of this package."""
    ours = (params or {}).get(PARAMS)
    report: FinishReport | None = _adapter(FinishReport).validate_python(ours) if ours else None
    return report


@dataclass
class WorkerMeta(KVConnectorWorkerMetadata):
    """Holds the outcomes and failures of blends that ended in this step, by request, and the workers' measurements.

    An outcome counts only the positions that the blend filled. ``traces`` holds the recorded events, if requested.

    ``times`` holds tokens and seconds of each kind of work measured since the last report. ``computed`` holds the
    blends and prefill steps that were measured as a whole. ``held`` holds the bytes of each entry that has come into
    the first rank's RAM, and 0 for an entry that has left the RAM.
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
        """Merge two ranks' results; the first rank's take precedence, since all ranks compute the same tokens."""
        assert isinstance(other, WorkerMeta)
        done, failed = {**other.done, **self.done}, {**other.failed, **self.failed}
        traces, times = {**other.traces, **self.traces}, {**other.times, **self.times}
        held = {**other.held, **self.held}
        return WorkerMeta(done, traces, failed, times, self.computed or other.computed, held)
