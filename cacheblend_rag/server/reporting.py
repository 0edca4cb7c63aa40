"""Adds how a prompt was handled to ``usage``, of whole answers and streams alike."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from cacheblend_rag.blending.outcome import PromptOutcome
from cacheblend_rag.server.ticket import REQUEST_FIELD


class ReportingChat:
    """Stands in for vLLM's chat handler."""

    def __init__(self, handler: Any):
        """Add reports to the answers of ``handler``."""
        self._handler = handler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handler, name)

    async def create_chat_completion(self, request: Any, raw_request: Any = None) -> Any:
        """Answer a chat; see vLLM's method of that name."""
        return reported(request, await self._handler.create_chat_completion(request, raw_request))


class ReportingCompletion:
    """Stands in for vLLM's completion handler."""

    def __init__(self, handler: Any):
        """Add reports to the answers of ``handler``."""
        self._handler = handler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handler, name)

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
