"""Make engines of small random models, and get exact numbers from them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from cacheblend_rag.blending.settings import BlendSettings
from cacheblend_rag.prompts.prompt import TokenizedPrompt
from tests.blending.families import _BASE, make_model
from tests.forking import TRACED

VOCABULARY = 300
SHAPE = {**_BASE, "hidden_size": 128, "vocab_size": VOCABULARY, "eos_token_id": None}
"""Four heads of 32 dimensions, the smallest that vLLM's CPU kernels take."""
FULL = BlendSettings(quality="full")
ROOM = 1 << 26
"""Bytes for KV, enough for a few prompts of these shapes; vLLM fills them with zeros first."""
PIECES = {"max_num_batched_tokens": 64, "max_num_seqs": 4, "enable_chunked_prefill": True}
"""Options by which prompts and passes run in pieces of 64 tokens."""


def save_model(config: Any, directory: Path) -> Any:
    """Write a random model's files; return the model."""
    model = make_model(config)
    model.save_pretrained(directory)
    return model


def start(directory: Path | str, store: Path | None, *, generated: bool = False, **options: Any) -> Any:
    """Start an engine; by default it is small, eager and without a tokenizer.

    An engine that is not eager runs the traced graph, or, if ``generated``, C++ code made of it, whose compilation takes half a
    minute. Both ways call the same hooks, and the same functions outside of the graph.
    """
    from cacheblend_rag.engines.vllm import VLLMEngine

    small = {"max_model_len": 1024, "max_logprobs": VOCABULARY, "kv_cache_memory_bytes": ROOM}
    defaults = {"enforce_eager": True, "skip_tokenizer_init": True, **small}
    with pytest.MonkeyPatch.context() as patch:
        if not generated:
            patch.setenv(*TRACED)
        return VLLMEngine(directory, store=store, **{**defaults, **options})


@contextmanager
def with_model(
    config: Any, options: dict[str, Any], header: list[int], folders: pytest.TempPathFactory
) -> Iterator[tuple[Any, Any]]:
    """Yield an engine of a random model whose store holds no KV in RAM, and the model."""
    directory = folders.mktemp("model")
    model = save_model(config, directory)
    with start(directory, folders.mktemp("store"), header=header, ram_budget=0, **options) as engine:
        yield engine, model


def first_logprobs(engine: Any, prompt: TokenizedPrompt, settings: BlendSettings) -> torch.Tensor:
    """Return the log-probabilities ``[vocab]`` of the first generated token."""
    return run(engine, _first_logprobs(engine, prompt, settings))


def run(engine: Any, work: Any) -> Any:
    return asyncio.run_coroutine_threadsafe(work, engine.loop).result(timeout=300)


async def _first_logprobs(engine: Any, prompt: TokenizedPrompt, settings: BlendSettings) -> torch.Tensor:
    from vllm import SamplingParams

    tokens, params = engine.tokens_prompt(prompt, engine.resolve(settings))
    sampling = SamplingParams(
        max_tokens=1,
        temperature=0,
        logprobs=VOCABULARY,
        detokenize=False,
        skip_reading_prefix_cache=settings.reuse == "off" or None,
        extra_args={"kv_transfer_params": params} if params else None,
    )
    async for output in engine.llm.generate(tokens, sampling, f"test-{id(prompt)}-{id(params)}-{settings}"):
        last = output
    found = last.outputs[0].logprobs[0]
    return torch.tensor([found[token].logprob for token in range(VOCABULARY)])


def clear(engine: Any) -> None:
    """Empty the store, the registry and vLLM's prefix cache, as if the engine had just been started."""
    engine.flush()
    for entry in list(engine.store.entries()):
        engine.store.delete(entry.key)
    engine.registry.remove([chunk.id for chunk in engine.registry])
    engine.reset_prefix_cache()


def concurrently(engine: Any, jobs: Sequence[Any]) -> list[Any]:
    """Run coroutine functions side by side in the engine's loop."""

    async def all_of_them() -> list[Any]:
        return await asyncio.gather(*(job() for job in jobs))

    return run(engine, all_of_them())
