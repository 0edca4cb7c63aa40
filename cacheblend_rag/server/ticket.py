"""Carries a prompt's plan from the renderer, through vLLM's handlers, to the engine and back to the report."""

from __future__ import annotations

from collections.abc import Mapping
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
