"""One request of an engine as OpenTelemetry spans: plan, load, fuse, prefill and decode, made of what its trace has recorded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

from opentelemetry.trace import Span, SpanKind

from cacheblend_rag import spans
from cacheblend_rag.blending.meter import ChunkLoad
from cacheblend_rag.blending.trace import DECODE, PLAN, PREFILL, REST, Recorded, Trace
from cacheblend_rag.engines.results import Usage

_Events = Sequence[Mapping[str, Any]]
_PARTS = {
    PLAN: "cacheblend.plan",
    PREFILL: "cacheblend.prefill",
    REST: "cacheblend.prefill",
    DECODE: "cacheblend.decode",
}


class Answered(Protocol):
    """What became of a prompt, as engines tell it."""

    @property
    def mode(self) -> str: ...  # noqa: D102
    @property
    def reason(self) -> str: ...  # noqa: D102
    @property
    def usage(self) -> Usage: ...  # noqa: D102
    @property
    def missing(self) -> Sequence[str]: ...  # noqa: D102
    @property
    def in_place(self) -> Sequence[str]: ...  # noqa: D102
    @property
    def policy(self) -> str | None: ...  # noqa: D102
    @property
    def ratio(self) -> float | None: ...  # noqa: D102
    @property
    def loads(self) -> Iterable[ChunkLoad]: ...  # noqa: D102
    @property
    def expected_s(self) -> float | None: ...  # noqa: D102


class RequestSpans:
    """The spans of one request, which last as long as the context; the request's own is a part of the one that is current.

    Attributes:
        trace: Where to record what is done for the request; None where nobody wants to know.
    """

    def __init__(self, whole: Trace | None, tenant: str, kind: SpanKind = SpanKind.INTERNAL):
        """Begin a request.

        Args:
            whole: A trace of all requests, which this one's is added to; None where there is none.
            tenant: Whose request it is.
            kind: Whether another process answers it.
        """
        self._span, self._whole = spans.begin("cacheblend.generate", kind), whole
        self._wanted = self._span.is_recording()
        self.trace = Trace() if self._wanted or whole is not None else None
        if self._wanted:
            self._span.set_attribute("cacheblend.tenant", tenant)

    @property
    def headers(self) -> dict[str, str]:
        """For a request to another process that does part of the work; see :func:`cacheblend_rag.spans.headers`."""
        return spans.headers(self._span)

    def answered(self, answer: Answered, load_s: float) -> None:
        """Note what became of the prompt; ``load_s`` is how long it waited for stored KV."""
        if self._wanted:
            self._span.set_attributes(reuse_attributes(answer, load_s))

    def __enter__(self) -> Self:
        """Use as a context manager that ends the spans; the request's own is not made current, for streams are used outside."""
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        """End them."""
        if self.trace is not None:
            recorded = self.trace.recorded()
            if self._whole is not None:
                self._whole.merge(recorded)
            if self._wanted:
                _add_parts(self._span, recorded)
        if error is not None:
            spans.failed(self._span, error)
        self._span.end()


def reuse_attributes(answer: Answered, load_s: float) -> dict[str, Any]:
    """Return what a span says of a prompt's reuse: tokens, seconds and bytes, no ids and no text."""
    usage = answer.usage
    found: dict[str, Any] = {
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "cacheblend.mode": answer.mode,
        "cacheblend.reason": answer.reason,
        "cacheblend.tokens.reused": usage.reused_tokens,
        "cacheblend.tokens.recomputed": usage.recomputed_tokens,
        "cacheblend.tokens.computed": usage.computed_tokens,
        "cacheblend.chunks.missing": len(answer.missing),
        "cacheblend.chunks.in_place": len(answer.in_place),
        "cacheblend.load_wait_s": load_s,
    }
    optional = {
        "cacheblend.policy": answer.policy,
        "cacheblend.ratio": answer.ratio,
        "cacheblend.expected_s": answer.expected_s,
    }
    found |= {name: value for name, value in optional.items() if value is not None}
    for load in answer.loads:
        name = f"cacheblend.tier.{load.tier}.bytes"
        found[name] = found.get(name, 0) + load.nbytes
    return found


def _add_parts(request: Span, recorded: Recorded) -> None:
    """Add a span for each part of a request, from its first event to its last."""
    parts: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    passes: list[Mapping[str, Any]] = []
    for event in recorded.events:
        if event["cat"] == "loading":
            parts["cacheblend.load"].append(event)
        elif name := _PARTS.get(event["name"]):
            parts[name].append(event)
        elif "layer" not in event["args"]:
            passes.append(event)
    for name, events in parts.items():
        told = _load_attributes(events) if name == "cacheblend.load" else _sums(events)
        spans.part(request, name, *_times(recorded, events), **told)
    if passes:
        fuse = spans.part(request, "cacheblend.fuse", *_times(recorded, passes))
        for event in passes:
            name = "cacheblend." + event["name"].replace(" ", "_")
            spans.part(fuse, name, *_times(recorded, [event]), **_sums([event]))


def _times(recorded: Recorded, events: _Events) -> tuple[float, float]:
    begin, end = min(e["ts"] for e in events), max(e["ts"] + e["dur"] for e in events)
    return recorded.began + begin / 1e6, recorded.began + end / 1e6


def _sums(events: _Events) -> dict[str, int]:
    """Return the details of events, which are numbers of tokens, added up."""
    found: dict[str, int] = {}
    for event in events:
        for name, value in event["args"].items():
            key = "cacheblend.tokens" if name == "tokens" else f"cacheblend.tokens.{name}"
            found[key] = found.get(key, 0) + value
    return found


def _load_attributes(events: _Events) -> dict[str, int]:
    found: dict[str, int] = {"cacheblend.reads": len(events)}
    for event in events:
        name = f"cacheblend.tier.{event['args']['tier']}.bytes"
        found[name] = found.get(name, 0) + event["args"]["bytes"]
    return found
