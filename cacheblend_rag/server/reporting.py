"""Carries a prompt's plan from the renderer to the engine, and what became of the prompt back to ``usage``, streams' too."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from cacheblend_rag.blending.outcome import PromptOutcome

if TYPE_CHECKING:
    from vllm.inputs import EngineInput

KEY = "cacheblend_ticket"
"""Where an engine input holds its ticket. vLLM builds engine inputs field by field, so no client can put one there."""

REQUEST_FIELD = "cacheblend_tickets"
"""Where a request object holds the tickets of its prompts."""


@dataclass
class Ticket:
    """One prompt's way through the server.

    Attributes:
        params: The ``kv_transfer_params`` to run it with; empty for an ordinary prefill.
        exact: Whether not even vLLM's prefix cache is to be read.
        reason: Why nothing is to be blended, if so; empty leaves it to the engine to say.
        outcome: What became of it, once it is finished.
    """

    params: dict[str, Any] = field(default_factory=dict)
    exact: bool = False
    reason: str = ""
    outcome: PromptOutcome | None = None


def with_ticket(engine_input: Mapping[str, Any], ticket: Ticket) -> EngineInput:
    """Return the engine input with a ticket."""
    return cast("EngineInput", {**engine_input, KEY: ticket})


def take_ticket(engine_input: Any) -> tuple[Any, Ticket | None]:
    """Return the engine input as vLLM knows it, and its ticket."""
    if not isinstance(engine_input, Mapping) or not isinstance(engine_input.get(KEY), Ticket):
        return engine_input, None
    rest = {name: value for name, value in engine_input.items() if name != KEY}
    return rest, engine_input[KEY]


def clients_salt(given: str | None) -> str | None:
    """Return a client's ``cache_salt`` as one that can be no namespace's own."""
    return None if given is None else f"client:{given}"


class _Reporting:
    def __init__(self, handler: Any):
        self._handler = handler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handler, name)


class ReportingChat(_Reporting):
    """Stands in for vLLM's chat handler."""

    async def create_chat_completion(self, request: Any, raw_request: Any = None) -> Any:
        """Answer a chat; see vLLM's method of that name."""
        return reported(request, await self._handler.create_chat_completion(request, raw_request))


class ReportingCompletion(_Reporting):
    """Stands in for vLLM's completion handler."""

    async def create_completion(self, request: Any, raw_request: Any = None) -> Any:
        """Complete prompts; see vLLM's method of that name."""
        return reported(request, await self._handler.create_completion(request, raw_request))


def reported(request: Any, answer: Any) -> Any:
    """Return a handler's answer with reports in its usage: one report, or a list of them for several prompts."""
    if isinstance(answer, AsyncGenerator):
        return _reported_stream(request, answer)
    usage = getattr(answer, "usage", None)
    reports = _reports(request)
    if usage is not None and reports:
        fields = usage.model_dump(exclude_none=True)
        _add(fields, reports)
        # A class of vLLM's that takes fields it does not know, as OpenAI's clients do.
        answer.usage = type(usage)(**fields)
    return answer


async def _reported_stream(request: Any, pieces: AsyncIterator[str]) -> AsyncIterator[str]:
    async for piece in pieces:
        # The piece with the usage has no choices; all others pass unread.
        if '"usage"' in piece and piece.startswith("data: {") and (reports := _reports(request)):
            data = json.loads(piece.removeprefix("data: "))
            if not data.get("choices") and data.get("usage"):
                _add(data["usage"], reports)
                yield f"data: {json.dumps(data, ensure_ascii=False)}\n\n"
                continue
        yield piece


def _reports(request: Any) -> list[PromptOutcome]:
    tickets = getattr(request, REQUEST_FIELD, None) or []
    return [ticket.outcome for ticket in tickets if ticket.outcome is not None]


def _add(usage: dict[str, Any], reports: list[PromptOutcome]) -> None:
    details = dict(usage.get("prompt_tokens_details") or {})
    details["cached_tokens"] = sum(report.usage.reused_tokens for report in reports)
    usage["prompt_tokens_details"] = details
    shown = [report.to_params() for report in reports]
    usage["cacheblend"] = shown[0] if len(shown) == 1 else shown
