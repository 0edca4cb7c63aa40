"""Computes the log-likelihood log p(y | prompt) of given completions behind a prompt, over stored KV."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch

from cacheblend_rag.blending.settings import BlendSettings
from cacheblend_rag.engines.base import BlendEngine, Prompt, Request, check_length
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.transformers.cache import ModelsOwnCache, PositionedCache
from cacheblend_rag.engines.transformers.engine import PromptRun
from cacheblend_rag.engines.transformers.owner import ModelOwner
from cacheblend_rag.engines.transformers.target import ModelRunner
from cacheblend_rag.errors import CacheBlendError, InputError

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput

    from cacheblend_rag.engines.vllm import VLLMEngine

_Scorer = Callable[[Any, Request, Sequence[Sequence[int]]], "list[Score]"]


@dataclass(frozen=True)
class Score:
    """Holds the likelihood of a given completion behind a prompt, at temperature 1.

    Attributes:
        token_logprobs: Natural-log probability of each completion token, given the prompt and the earlier completion
            tokens.
    """

    token_logprobs: tuple[float, ...]

    @property
    def logprob(self) -> float:
        """Return the log-likelihood of the whole completion: log p(y | prompt)."""
        return sum(self.token_logprobs)


def can_score(engine: BlendEngine) -> bool:
    """Return whether :func:`score` supports an engine; a remote server does not return the required probabilities."""
    return _scorer(engine) is not None


def score(
    engine: BlendEngine, prompt: Prompt, completions: Sequence[Sequence[int]], settings: BlendSettings | None = None
) -> list[Score]:
    """Return the likelihood of each of ``completions`` (token ids) behind the prompt, over stored KV.

    A prompt of header and one chunk is not blended: its reused KV is exact.

    Raises:
        PromptTooLongError: Prompt and the longest completion exceed the context window.
        UnknownChunkError: A referenced chunk was never registered.
        InputError: A completion has no tokens, or the engine cannot score.
    """
    scorer = _scorer(engine)
    if scorer is None:
        raise InputError(
            f"{type(engine).__name__} cannot score completions; use TransformersEngine or VLLMEngine (--engine, without "
            "--server)."
        )
    empty = [number for number, ids in enumerate(completions) if not ids]
    if empty or not completions:
        which = f"Completion {empty[0]} has no tokens" if empty else "There are no completions"
        raise InputError(f"{which}; give the token ids of what is to be scored.")
    longest = SamplingParams(max_tokens=max(map(len, completions)))
    return scorer(engine, engine.request(prompt, longest, settings), completions)


def _scorer(engine: BlendEngine) -> _Scorer | None:
    if isinstance(engine, ModelOwner):
        return _with_transformers
    vllm = sys.modules.get("cacheblend_rag.engines.vllm.engine")  # importing vLLM is slow and may fail
    return _in_vllm if vllm is not None and isinstance(engine, vllm.VLLMEngine) else None


def _with_transformers(engine: ModelOwner, request: Request, completions: Sequence[Sequence[int]]) -> list[Score]:
    """Score completions; they share the prompt's prefill, unless the model is not blended."""
    # The state of a recurrent layer cannot be reset to the end of the prompt.
    together = [completions] if engine.gate.passed else [[each] for each in completions]
    return [found for each in together for found in _behind_one_prefill(engine, request, each)]


def _behind_one_prefill(engine: ModelOwner, request: Request, completions: Sequence[Sequence[int]]) -> list[Score]:
    with PromptRun(engine, request) as run:
        run.prefill(None)
        assert run.cache is not None
        with engine.lock:
            if isinstance(run.cache, PositionedCache):
                return _one_after_another(engine.runner, run.cache, run.logits, completions)
            (only,) = completions
            return [_score(_token_by_token(engine.runner, run.cache, run.logits, only), only)]


def _one_after_another(
    runner: ModelRunner, cache: PositionedCache, logits: torch.Tensor, completions: Sequence[Sequence[int]]
) -> list[Score]:
    behind, scores = cache.length, []
    for ids in completions:
        rows = logits[None]
        if len(ids) > 1:
            rows = torch.cat([rows, runner.follow(torch.tensor([ids[:-1]], device=runner.device), cache)[0]])
            cache.filled(behind)
        scores.append(_score(rows, ids))
    return scores


def _token_by_token(
    runner: ModelRunner, cache: ModelsOwnCache, logits: torch.Tensor, ids: Sequence[int]
) -> torch.Tensor:
    rows = [logits]
    for token in ids[:-1]:
        rows.append(runner.append(torch.tensor([[token]], device=runner.device), cache)[0])
    return torch.stack(rows)


def _score(logits: torch.Tensor, ids: Sequence[int]) -> Score:
    """Return the score of ``ids`` from ``logits``, ``[tokens, vocab]``; each row predicts the token of its index."""
    wanted = torch.tensor([list(ids)], device=logits.device).T
    return Score(tuple(logits.float().log_softmax(-1).gather(1, wanted)[:, 0].tolist()))


def _in_vllm(engine: VLLMEngine, request: Request, completions: Sequence[Sequence[int]]) -> list[Score]:
    """Score completions; each completion is a separate request, and the requests run concurrently."""

    async def all_of_them() -> list[Score]:
        return list(await asyncio.gather(*(_asked(engine, request, ids) for ids in completions)))

    return asyncio.run_coroutine_threadsafe(all_of_them(), engine.loop).result()


async def _asked(engine: VLLMEngine, request: Request, completion: Sequence[int]) -> Score:
    """Make vLLM compute everything behind the last chunk, so that vLLM returns the log-probabilities of the completion."""
    from vllm import SamplingParams as VLLMSampling
    from vllm.sampling_params import RequestOutputKind

    prompt = replace(request.prompt, token_ids=(*request.prompt.token_ids, *completion), text=None)
    check_length(len(prompt.token_ids), 1, engine.context_window)
    # The salt is unique, because vLLM gives no log-probabilities of tokens that its prefix cache holds.
    name = uuid4().hex
    tokens, params = engine.tokens_prompt(prompt, request.options, name, unasked=len(completion))
    await engine.before(prompt.token_ids, params, prompt)
    wanted = VLLMSampling(
        max_tokens=1,
        temperature=0.0,
        prompt_logprobs=0,
        detokenize=False,
        # Unless this is set, prompt_logprobs switches the connector off as well as the prefix cache.
        skip_reading_prefix_cache=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args={"kv_transfer_params": params} if params else None,
    )
    last: RequestOutput | None = None
    async for output in engine.llm.generate(tokens, wanted, f"cacheblend-score-{name}"):  # type: ignore[arg-type]
        last = output
    if last is None or not last.prompt_logprobs:
        raise CacheBlendError("vLLM ended a scoring request with an error; its log says why.")
    rows = last.prompt_logprobs[-len(completion) :]
    engine.finished(engine.report(last.kv_transfer_params, len(prompt.token_ids), 0, 0, asked=bool(params)), prompt)
    found = [row[token].logprob for row, token in zip(rows, completion, strict=True) if row is not None]
    return Score(tuple(found))
