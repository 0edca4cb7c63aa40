"""Tests that replayed passes in a real vLLM equal the reference; a replay runs the pass again with the device's inputs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from cacheblend_rag.blending.settings import BlendSettings
from tests.blending import reference
from tests.blending.prompts import Scene
from tests.engines.vllm.engines import SHAPE, first_logprobs, run, save_model, start
from tests.engines.vllm.test_parity import chosen_by
from tests.interpreted import INTERPRETED

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not INTERPRETED, reason="Triton is not installed, or compiles for this machine's GPU"),
]


WINDOW = 128
"""Tokens of context; a replayed pass reads pages for all of them, and the interpreter is slow."""


def replay_passes(worker: Any) -> None:
    """Make the worker place all layers at once, and capture a pass by keeping the function that runs it."""
    from cacheblend_rag.blending import reads
    from cacheblend_rag.blending.bulk import StoredLayers
    from cacheblend_rag.engines.vllm import graphs
    from cacheblend_rag.engines.vllm.target import all_ranks
    from cacheblend_rag.engines.vllm.worker import _worker_side
    from cacheblend_rag.store.kv import ChunkKV, LayerKV, join_tokens

    reads._CPUReads.in_place = True  # type: ignore[misc]
    ChunkKV.blocks = lambda self, begin, end: []  # type: ignore[method-assign]
    paged = _worker_side()._paged
    assert paged is not None and paged.kernels is not None
    kernels = paged.kernels

    def place_layers(stored: StoredLayers, slots: torch.Tensor) -> Callable[[int], None]:
        for layer in range(stored.first, paged.num_layers if stored.spans else 0):
            parts = [
                LayerKV(*(t[:, span.skip : span.skip + span.end - span.start] for t in span.kv.layer(layer)))
                for span in stored.spans
            ]
            kernels.place(layer, join_tokens(parts), stored.moves[layer], slots)
        return lambda layer: None

    def capture(run: Callable[[], graphs.Gave], pool: Any) -> Any:
        left = run()
        for tensor in left:
            if tensor is not None:
                tensor.fill_(float("nan"))  # a capture computes no values

        def replay() -> None:
            worker.replayed += 1
            for tensor, again in zip(left, run(), strict=True):
                if tensor is not None:
                    tensor.copy_(again)

        return left, replay, pool

    worker.replayed = 0
    kernels.place_layers = place_layers  # type: ignore[method-assign, assignment]
    graphs.capture = capture  # type: ignore[assignment]
    pages = WINDOW // paged.block_size, paged.block_size
    paged.graphs = graphs.PagedGraphs(paged.scatter, paged.look, lambda layer: None, all_ranks, pages, paged.device)


def captured(worker: Any) -> list[list[Any]]:
    """Return the kinds of passes that the worker has captured."""
    from cacheblend_rag.engines.vllm.worker import _worker_side

    paged = _worker_side()._paged
    assert paged is not None and paged.graphs is not None
    return [list(kind) for kind in paged.graphs._replays.passes]


def replayed(worker: Any) -> int:
    """Return how many passes the worker has replayed."""
    count: int = worker.replayed
    return count


def in_worker(engine: Any, ask: Callable[[Any], Any]) -> Any:
    return run(engine, engine.llm.collective_rpc(ask))[0]


def test_replayed_passes_equal_the_reference_in_any_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # the test sends functions to the worker
    model = save_model(hf.Qwen3Config(**{**SHAPE, "num_hidden_layers": 2}, head_dim=32), tmp_path / "model")
    # The scenes have different tokens in three or four pages; the last scene is shorter and is padded.
    scenes = [Scene(seed, chunk_tokens=(40, 16, 24 - 4 * (seed == 2)), question=9) for seed in range(3)]
    options = {"enforce_eager": False, "block_size": 32, "max_model_len": WINDOW}
    with start(tmp_path / "model", tmp_path / "store", header=scenes[0].header, **options) as engine:
        assert engine.gate.passed, engine.gate.reason
        in_worker(engine, replay_passes)
        for seed, scene in enumerate(scenes):
            scene.header = scenes[0].header
            engine.precompute(scene.chunks)
            got = first_logprobs(engine, scene.prompt, BlendSettings(0.3, "hkvd", (1,)))
            want = reference.blend(model, scene.header, scene.parts(), 0.3, (1,)).logits.float().log_softmax(-1)
            torch.testing.assert_close(got, want, atol=1e-4, rtol=0)
            # The second pass of its kind was captured; later passes are replayed. A blend has two passes, one for its front.
            assert in_worker(engine, captured) == [[32, False]]
            assert in_worker(engine, replayed) == 2 * seed + 1
        for seed, scene in enumerate(scenes[1:]):
            _, want = chosen_by(engine, model, "query", scene)
            engine.reset_prefix_cache()
            got = first_logprobs(engine, scene.prompt, BlendSettings(0.3, "query", (1,)))
            torch.testing.assert_close(got, want, atol=1e-4, rtol=0)
            # The question's pass is replayed like the other two passes, once it has been captured.
            assert in_worker(engine, captured) == [[32, False], [32, True]][: 1 + (seed > 0)]
            assert in_worker(engine, replayed) == 2 * len(scenes) + 1 + 3 * seed
