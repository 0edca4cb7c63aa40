"""The engine as vLLM's handlers see it: every prompt of every route passes here."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING, Any

from cacheblend_rag.protocol import ReuseReport
from cacheblend_rag.server.ticket import Ticket, take_ticket

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    from cacheblend_rag.engines.vllm.client import BlendClient
    from cacheblend_rag.server.metrics import ReuseMetrics


class ServedEngine:
    """Stands in for an ``AsyncLLM``; what it does not know itself, that one does.

    It runs a prompt with what its ticket says, and with nothing else: ``kv_transfer_params`` that came from a client would let
    it store KV under names of its choice, and its ``cache_salt`` must not meet that of a blended prompt.
    """

    def __init__(self, llm: AsyncLLM, client: BlendClient, metrics: ReuseMetrics):
        """Serve ``llm``, whose connector is ours."""
        self._llm, self._client, self._metrics = llm, client, metrics

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run a prompt; see vLLM's method of that name."""
        prompt, ticket = take_ticket(prompt)
        extra = {k: v for k, v in (sampling_params.extra_args or {}).items() if k != "kv_transfer_params"}
        ticket = ticket or Ticket(reason="this route is served by ordinary prefill")
        if ticket.params:
            extra["kv_transfer_params"] = ticket.params
        else:
            prompt = _with_own_salt(prompt)
        sampling_params.extra_args = extra or None
        if ticket.exact:
            sampling_params.skip_reading_prefix_cache = True
        outputs = self._llm.generate(prompt, sampling_params, request_id, **options)
        try:
            async for output in outputs:
                self._account(output, ticket)
                yield output
        finally:
            await outputs.aclose()

    def _account(self, output: RequestOutput, ticket: Ticket) -> None:
        if not output.finished:
            if ticket.params:
                output.num_cached_tokens = None  # vLLM counts every token of a blend, the recomputed ones too
            return
        prompt_tokens = len(output.prompt_token_ids or ())
        completion_tokens = sum(len(piece.token_ids) for piece in output.outputs)
        outcome = self._client.outcome(
            output.kv_transfer_params,
            prompt_tokens,
            output.num_cached_tokens or 0,
            completion_tokens,
            asked=bool(ticket.params),
        )
        usage = outcome.usage
        output.kv_transfer_params, output.num_cached_tokens = None, usage.reused_tokens
        ticket.report = ReuseReport(
            mode=outcome.mode,
            reason=ticket.reason if ticket.reason and self._client.gate.passed else outcome.reason,
            reused_tokens=usage.reused_tokens,
            recomputed_tokens=usage.recomputed_tokens,
            computed_tokens=usage.computed_tokens,
            selection_tokens=usage.selection_tokens,
            missing=outcome.missing,
            policy=outcome.policy,
            ratio=outcome.ratio,
            load_s=outcome.load_s,
            blend_s=outcome.blend_s,
            loaded_bytes=outcome.loaded_bytes,
            loads=outcome.loads,
            fingerprint=self._client.fingerprint.digest,
        )
        self._metrics.finished(ticket.report)
        self._client.finished(outcome)

    async def notify_kv_transfer_request_rejected(self, *_: Any, **__: Any) -> None:
        """Ignore vLLM's hand-over between prefill and decode servers: this connector has none, and clients may not ask."""


def _with_own_salt(prompt: Any) -> Any:
    """Return a prompt whose client's salt can never be that of a blended prompt."""
    salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
    return prompt if salt is None else {**prompt, "cache_salt": f"client:{salt}"}
