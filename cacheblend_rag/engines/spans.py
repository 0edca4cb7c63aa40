"""Reports each request of an engine to OpenTelemetry as spans, made from the request's trace."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any, Self, get_args

from cacheblend_rag import spans
from cacheblend_rag.blending.outcome import Fate, PromptOutcome
from cacheblend_rag.blending.trace import DECODE, PLAN, PREFILL, REST, Trace, TraceEvent

if TYPE_CHECKING:
    from opentelemetry.trace import Span

_Events = Sequence[TraceEvent]
_PARTS = {
    PLAN: "cacheblend.plan",
    PREFILL: "cacheblend.prefill",
    REST: "cacheblend.prefill",
    DECODE: "cacheblend.decode",
}


class RequestSpans:
    """Creates the spans of one request, which end with the context; the request's span is a child of the current span.

    Attributes:
        trace: Trace that records the work for the request; None if no spans are recorded.
    """

    def __init__(self, namespace: str, side: spans.Side = "internal"):
        """Begin the span of a request in a ``namespace``; ``side`` is ``"client"`` if another process answers it."""
        self._span = spans.begin("cacheblend.generate", side)
        self.trace = Trace() if self._span.is_recording() else None
        if self.trace is not None:
            self._span.set_attribute("cacheblend.tenant", namespace)

    @property
    def headers(self) -> dict[str, str]:
        """Return HTTP headers for a process that does part of the work; see :func:`cacheblend_rag.spans.headers`."""
        return spans.headers(self._span)

    def answered(self, outcome: PromptOutcome) -> None:
        """Add the outcome of the prompt to the request's span."""
        if self.trace is not None:
            self._span.set_attributes(reuse_attributes(outcome))

    def __enter__(self) -> Self:
        """Enter the context that ends the spans; the span does not become current, since streams are used outside."""
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if self.trace is not None:
            _add_parts(self._span, self.trace.events())
        if error is not None:
            spans.failed(self._span, error)
        self._span.end()


def reuse_attributes(outcome: PromptOutcome) -> dict[str, Any]:
    """Return a span's attributes for a prompt: tokens, seconds, bytes and numbers of chunks; no ids and no text."""
    counts = asdict(outcome.usage)
    found: dict[str, Any] = {
        "gen_ai.usage.input_tokens": counts.pop("prompt_tokens"),
        "gen_ai.usage.output_tokens": counts.pop("completion_tokens"),
    }
    found |= {f"cacheblend.tokens.{name.removesuffix('_tokens')}": count for name, count in counts.items()}
    for each in fields(PromptOutcome):
        value = getattr(outcome, each.name)
        if isinstance(value, (str, int, float)):
            found[f"cacheblend.{each.name}"] = value
    for fate in get_args(Fate):
        found[f"cacheblend.chunks.{fate}"] = sum(chunk.fate == fate for chunk in outcome.chunks)
    for load in outcome.loads:
        name = f"cacheblend.tier.{load.tier}.bytes"
        found[name] = found.get(name, 0) + load.nbytes
    return found


def _add_parts(request: Span, recorded: _Events) -> None:
    """Add a span for each part of a request, from its first event to its last."""
    parts: dict[str, list[TraceEvent]] = defaultdict(list)
    passes: list[TraceEvent] = []
    for event in recorded:
        if event.kind == "loading":
            parts["cacheblend.load"].append(event)
        elif name := _PARTS.get(event.name):
            parts[name].append(event)
        else:
            passes.append(event)
    for name, events in parts.items():
        told = _load_attributes(events) if name == "cacheblend.load" else _sums(events)
        spans.part(request, name, *_times(events), **told)
    if passes:
        fuse = spans.part(request, "cacheblend.fuse", *_times(passes))
        for event in passes:
            name = "cacheblend." + event.name.replace(" ", "_")
            spans.part(fuse, name, *_times([event]), **_sums([event]))


def _times(events: _Events) -> tuple[float, float]:
    return min(event.begin for event in events), max(event.end for event in events)


def _sums(events: _Events) -> dict[str, int]:
    """Return the sums of the events' details, which are numbers of tokens."""
    found: dict[str, int] = {}
    for event in events:
        for name, value in event.details.items():
            key = "cacheblend.tokens" if name == "tokens" else f"cacheblend.tokens.{name}"
            found[key] = found.get(key, 0) + value
    return found


def _load_attributes(events: _Events) -> dict[str, int]:
    found: dict[str, int] = {"cacheblend.reads": len(events)}
    for event in events:
        name = f"cacheblend.tier.{event.details['tier']}.bytes"
        found[name] = found.get(name, 0) + event.details["bytes"]
    return found
