"""Asks vLLM for an answer, and its workers something, with an answer or an error in any case."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm import SamplingParams as VLLMSampling
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from cacheblend_rag.blending.gate import GateReport
from cacheblend_rag.engines.sampling import SamplingParams

if TYPE_CHECKING:
    from vllm.engine.protocol import EngineClient

    from cacheblend_rag.engines.vllm.arguments import Launch

_LOOK_S = 0.5


async def ask_workers(llm: EngineClient, method: str) -> list[Any]:
    """Return what a method of :class:`~cacheblend_rag.engines.vllm.worker.BlendWorker` says, on each rank.

    vLLM lets a question wait for ever whose engine dies before it answers; here it fails.

    Raises:
        EngineDeadError: vLLM's engine has died.
    """
    asked = asyncio.ensure_future(llm.collective_rpc(method))
    try:
        while not asked.done():
            await asyncio.wait({asked}, timeout=_LOOK_S)
            if llm.errored and not asked.done():
                raise llm.dead_error
        return list(asked.result())
    finally:
        asked.cancel()


async def ask_gate(llm: EngineClient, launch: Launch) -> GateReport:
    """Ask the workers for the gate's findings; warn once if the model is not blended.

    Raises:
        EngineDeadError: vLLM's engine has died meanwhile.
    """
    gate = GateReport(**(await ask_workers(llm, "cacheblend_gate"))[0])
    if not gate.passed:
        served = "is served by ordinary prefill, without blending"
        warnings.warn(f"{launch.fingerprint.name} {served}: {gate.reason}.", stacklevel=2)
    return gate


def vllm_sampling(
    sampling: SamplingParams, params: dict[str, Any], end_tokens: Iterable[int], has_text: bool, whole: bool
) -> VLLMSampling:
    """Return vLLM's form of how to decode.

    Args:
        sampling: Ours.
        params: ``kv_transfer_params`` of the request; empty for none.
        end_tokens: At which an answer ends.
        has_text: Whether there is a tokenizer.
        whole: Whether the prompt is to be computed whole: as the reference, it must not be served from the prefix cache.

    Raises:
        InputError: The JSON schema is no JSON.
    """
    schema = sampling.schema()
    return VLLMSampling(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        seed=sampling.seed,
        stop=list(sampling.stop),
        stop_token_ids=sorted(end_tokens),  # vLLM knows those of the generation config and the tokenizer alone
        detokenize=has_text,
        structured_outputs=None if schema is None else StructuredOutputsParams(json=schema),
        skip_reading_prefix_cache=True if whole else None,
        output_kind=RequestOutputKind.DELTA,
        logprobs=sampling.logprobs,
        extra_args={"kv_transfer_params": params} if params else None,
    )
