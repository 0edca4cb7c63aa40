"""The parity gate in bfloat16 fails every wrong blend, in each layer, and passes right ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as hf

from cacheblend_rag.blending.gate import GateReport, run_gate
from cacheblend_rag.blending.rope import Move, Rope
from cacheblend_rag.engines.transformers.target import ModelRunner, TransformersSubject, TransformersTarget
from cacheblend_rag.store.kv import LayerKV
from tests.blending.families import _BASE, make_model

pytestmark = pytest.mark.slow
LAYERS, CHUNK = 5, 16
_MOE = {"num_experts_per_tok": 2}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaConfig(**_BASE),
    "llama, deep": lambda: hf.LlamaConfig(**{**_BASE, "num_hidden_layers": 16, "initializer_range": 0.06}),
    "qwen3": lambda: hf.Qwen3Config(**_BASE, head_dim=16),
    "mixtral": lambda: hf.MixtralConfig(**_BASE, **_MOE, num_local_experts=4),
    "qwen3-moe": lambda: hf.Qwen3MoeConfig(**_BASE, **_MOE, head_dim=16, num_experts=8, moe_intermediate_size=48),
    # This model has sinks, windows, and biases in every projection.
    "gpt-oss": lambda: hf.GptOssConfig(**_BASE, **_MOE, head_dim=16, num_local_experts=4, sliding_window=24),
}
# PLACES has every layer of the first model, and one layer of each further model.
PLACES = [
    *(("llama", layer) for layer in range(LAYERS)),
    *((name, at % LAYERS) for at, name in enumerate(MODELS) if at),
]
Place = Callable[[int, LayerKV, torch.Tensor, Move | None], tuple[LayerKV, torch.Tensor, Move | None] | None]


def gate(name: str, mutated: type[TransformersTarget] = TransformersTarget, seed: int = 0) -> GateReport:
    class Subject(TransformersSubject):
        def target(self, token_ids: Any, rope: Rope) -> Any:
            return mutated(self.runner, rope, token_ids)

    return run_gate(Subject(ModelRunner(make_model(MODELS[name](), torch.bfloat16, seed))))[0]


def placing(change: Place) -> type[TransformersTarget]:
    """Return a target that places the KV that ``change`` returns for a layer, or nothing where that is None."""

    class Placing(TransformersTarget):
        def place(self, layer: int, kv: LayerKV, positions: torch.Tensor, move: Move | None) -> None:
            if (changed := change(layer, kv, positions, move)) is not None:
                super().place(layer, changed[0], changed[1], changed[2])

    return Placing


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", MODELS)
def test_a_right_blend_passes_the_gate(name: str, seed: int) -> None:
    report = gate(name, seed=seed)
    assert report.passed, report.reason


@pytest.mark.parametrize(("name", "chunk"), [(name, at % 3) for at, name in enumerate(MODELS)])
def test_kv_of_another_chunk_fails_the_gate(name: str, chunk: int) -> None:
    def swap(_: int, kv: LayerKV, positions: torch.Tensor, move: Move | None) -> Any:
        mine, others = slice(chunk * CHUNK, (chunk + 1) * CHUNK), (chunk + 1) % 3 * CHUNK
        if kv.k.shape[1] < 3 * CHUNK:
            return kv, positions, move
        found = LayerKV(*(t.clone() for t in kv))
        for whole, source in zip(found, kv, strict=True):
            whole[:, mine] = source[:, others : others + CHUNK]
        return found, positions, move

    assert not gate(name, placing(swap)).passed


@pytest.mark.parametrize(("name", "layer"), PLACES)
def test_keys_rotated_by_one_position_too_many_fail_the_gate(name: str, layer: int) -> None:
    def turned(at: int, kv: LayerKV, positions: torch.Tensor, move: Move | None) -> Any:
        if move is None or layer != at:
            return kv, positions, move
        cos, sin = move.rotation
        frequency = 10000.0 ** -(torch.arange(cos.shape[-1]) / cos.shape[-1])
        more = replace_rotation(
            move, cos * frequency.cos() - sin * frequency.sin(), sin * frequency.cos() + cos * frequency.sin()
        )
        return kv, positions, more

    assert not gate(name, placing(turned)).passed


def replace_rotation(move: Move, cos: torch.Tensor, sin: torch.Tensor) -> Move:
    return replace(move, rotation=type(move.rotation)(cos, sin))


@pytest.mark.parametrize(("name", "layer"), PLACES)
def test_kv_placed_one_position_off_fails_the_gate(name: str, layer: int) -> None:
    def shifted(at: int, kv: LayerKV, positions: torch.Tensor, move: Move | None) -> Any:
        return kv, positions + (layer == at), move

    assert not gate(name, placing(shifted)).passed


@pytest.mark.parametrize(("name", "layer"), PLACES)
def test_an_unplaced_layer_fails_the_gate(name: str, layer: int) -> None:
    class Zeros(placing(lambda at, kv, positions, move: None if at == layer else (kv, positions, move))):  # type: ignore[misc]
        def __init__(self, runner: ModelRunner, rope: Rope, token_ids: Any):
            super().__init__(runner, rope, token_ids)
            # Another prompt's KV lies there, as in a paged cache: finite numbers of ordinary size.
            runner.append(torch.tensor([token_ids[::-1]]), self.cache)
            self.cache.filled(0)

    assert not gate(name, Zeros).passed


@pytest.mark.parametrize("name", MODELS)
def test_tokens_computed_one_position_off_fail_the_gate(name: str) -> None:
    class Late(TransformersTarget):
        def forward(self, positions: torch.Tensor, *more: Any) -> Any:
            ids, self._ids = self._ids, torch.cat([self._ids[:1], self._ids])
            try:
                return super().forward(positions + 1, *more)
            finally:
                self._ids = ids

    assert not gate(name, Late).passed
