"""Tests that cancelling a prompt prevents its computation, or that of its remaining layers."""

from __future__ import annotations

import asyncio
import threading
import warnings
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import torch
import transformers as hf

from cacheblend_rag.blending.settings import BlendSettings
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.engines.transformers.engine import PromptRun
from tests.blending.families import _BASE, make_model
from tests.blending.prompts import Scene, engine_for

LAYERS, ANSWER = 4, SamplingParams(max_tokens=3)
_SIZES = {"vocab_size": 448, "eos_token_id": None, "max_position_embeddings": 1024}
MODELS: dict[str, Callable[[], Any]] = {
    "blended": lambda: hf.LlamaConfig(**_BASE | _SIZES | {"num_hidden_layers": LAYERS}),
    "not blended": lambda: hf.GPT2Config(n_embd=32, n_layer=LAYERS, n_head=4, n_positions=1024, **_SIZES),
}


class CountedLock:
    """A lock whose semaphore ``come`` counts the calls that want it."""

    def __init__(self) -> None:
        self._lock, self.come = threading.Lock(), threading.Semaphore(0)

    def __enter__(self) -> None:
        self.come.release()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class Watched:
    """An engine, a prompt for it, and a record of the layers that ran.

    Attributes:
        layers: The model's layers that ran.
        held_at: The layer that sets ``reached`` and waits until ``go_on`` is set.
        left: Every prompt that ends releases this semaphore.
    """

    def __init__(self, kind: str, monkeypatch: pytest.MonkeyPatch):
        self.scene, model = Scene(), make_model(MODELS[kind]())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one of the models is not blended
            self.engine: TransformersEngine = engine_for(model, self.scene)
        assert self.engine.gate.passed is (kind == "blended")
        self.layers: list[int] = []
        self.held_at: int | None = None
        self.reached, self.go_on, self.left = threading.Event(), threading.Event(), threading.Semaphore(0)
        (layers,) = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == LAYERS]
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(lambda *_, index=index: self._met(index))
        leave = PromptRun.__exit__

        def leaving(run: PromptRun, *error: object) -> None:
            leave(run, *error)
            self.left.release()

        monkeypatch.setattr(PromptRun, "__exit__", leaving)

    def _met(self, layer: int) -> None:
        self.layers.append(layer)
        if layer == self.held_at:
            self.reached.set()
            assert self.go_on.wait(60)

    def asked(self, way: str, settings: BlendSettings | None = None) -> Coroutine[Any, Any, object]:
        if way == "agenerate":
            return self.engine.agenerate(self.scene.prompt, ANSWER, settings)
        return self._streamed(settings)

    async def _streamed(self, settings: BlendSettings | None) -> object:
        return [event async for event in self.engine.astream(self.scene.prompt, ANSWER, settings)]


@pytest.fixture
def watched(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    made = Watched(getattr(request, "param", "blended"), monkeypatch)
    with made.engine:
        yield made


async def wait_for(semaphore: threading.Semaphore, times: int) -> None:
    for _ in range(times):
        assert await asyncio.to_thread(semaphore.acquire, timeout=60)


async def cancel(calls: list[asyncio.Future[object]]) -> None:
    for call in calls:
        call.cancel()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(each, asyncio.CancelledError) for each in results)


@pytest.mark.parametrize("way", ["astream", "agenerate"])
async def test_queued_prompts_are_not_computed_after_they_are_cancelled(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    lock = CountedLock()
    monkeypatch.setattr(watched.engine, "lock", lock)
    with lock:
        calls = [asyncio.ensure_future(watched.asked(way)) for _ in range(3)]
        await wait_for(lock.come, 1 + len(calls))
        await cancel(calls)
    await wait_for(watched.left, len(calls))
    assert watched.layers == []
    assert watched.engine.store.stats().entries == 0  # missing chunks are not written back either


@pytest.mark.parametrize("way", ["astream", "agenerate"])
@pytest.mark.parametrize(
    ("watched", "stored"),
    [("blended", False), ("blended", True), ("not blended", False)],
    indirect=["watched"],
    ids=["prefill", "blend", "not blended"],
)
async def test_a_cancelled_prompt_computes_no_further_layer(watched: Watched, way: str, stored: bool) -> None:
    engine, prompt = watched.engine, watched.scene.prompt
    blend = BlendSettings(ratio=0.5) if stored else BlendSettings()
    want = engine.generate(prompt, ANSWER, blend if not stored else BlendSettings(quality="full")).token_ids
    engine.reset_prefix_cache()
    engine.store.evict(0)
    if stored:
        engine.precompute(watched.scene.chunks)
    await wait_for(watched.left, 1)
    watched.layers.clear()
    watched.held_at = 1
    call = asyncio.ensure_future(watched.asked(way, blend))
    assert await asyncio.to_thread(watched.reached.wait, 60)
    await cancel([call])
    watched.held_at = None
    watched.go_on.set()
    await wait_for(watched.left, 1)
    assert watched.layers == [0, 1]
    # No cache has half a prompt's KV: the next prompt is computed whole, or blended from the stored chunks.
    got = engine.generate(prompt, ANSWER, BlendSettings(ratio=1.0) if stored else blend)
    assert (got.token_ids, got.usage.kept_tokens) == (want, 0)
