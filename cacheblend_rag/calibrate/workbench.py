"""Provides measurements with an open engine, random chunks and prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from cacheblend_rag.calibrate.measure import describe_machine
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.prompts.chunk import Chunk
from cacheblend_rag.prompts.prompt import ChunkSpan, TokenizedPrompt

if TYPE_CHECKING:
    from cacheblend_rag.engines.vllm import VLLMEngine

KVPlace = Literal["ram", "int8", "disk"]
EngineName = Literal["transformers", "vllm"]


@dataclass(frozen=True)
class Workbench:
    """Holds the engine, the model's facts and the store's place for measurements.

    Attributes:
        engine: The engine; its parity gate has passed.
        label: Name of the model in results.
        directory: The directory whose disk is measured; None if the KV is in RAM.
        device: Device of the model.
        dtype: Data type of the model's computation.
        vocab_size: Size of the model's vocabulary.
        name: Name of the engine.
        kv: Place of the stored KV.
    """

    engine: TransformersEngine | VLLMEngine
    label: str
    directory: Path | None
    device: torch.device
    dtype: torch.dtype
    vocab_size: int
    name: EngineName = "transformers"
    kv: KVPlace = "ram"

    @classmethod
    def of(
        cls,
        engine: TransformersEngine | VLLMEngine,
        label: str | None = None,
        directory: Path | None = None,
        kv: KVPlace = "ram",
    ) -> Workbench:
        """Return the workbench of an open engine."""
        label = label or engine.fingerprint.name
        if isinstance(engine, TransformersEngine):
            runner, vocab_size = engine.runner, engine.subject().vocab_size
            return cls(engine, label, directory, runner.device, runner.dtype, vocab_size, kv=kv)
        vocab_size = engine.llm.model_config.get_vocab_size()
        return cls(engine, label, directory, engine.device, engine.dtype, vocab_size, "vllm", kv)

    @property
    def model(self) -> Any:
        """Return the transformers model itself, to run without this library; None for other engines."""
        return self.engine.runner.model if isinstance(self.engine, TransformersEngine) else None

    def head(self, settings: Any, **more: Any) -> dict[str, Any]:
        """Return the beginning of every result: engine, model, settings and machine.

        Args:
            settings: Settings of the measurement, a dataclass; a ``ratio`` or ``policy`` of None becomes the model
                profile's.
            more: Further settings, which replace settings of the same name.
        """
        given = asdict(settings)
        for name in ("ratio", "policy"):
            if name in given and given[name] is None:
                given[name] = getattr(self.engine.profile, name)
        placed = {"kv": self.kv, "device": str(self.device), "dtype": str(self.dtype).removeprefix("torch.")}
        return {
            "engine": self.name,
            "model": self.label,
            "settings": {**given, **more, **placed},
            "machine": describe_machine(self.device),
        }

    def files(self) -> list[Path]:
        """Return the files of all stored entries."""
        return [] if self.directory is None else sorted(self.directory.rglob("*.safetensors"))

    def forget(self) -> None:
        """Empty the engine's prefix cache, so that only the store helps the next prompt."""
        self.engine.reset_prefix_cache()

    def random_chunks(self, count: int, tokens: int, seed: int) -> list[Chunk]:
        """Return ``count`` different chunks of ``tokens`` random token ids."""
        ids = self.random_ids(count * tokens, seed)
        return [
            Chunk(f"random-{seed}-{i}", "", ids[i * tokens : (i + 1) * tokens], {"source": "random tokens"})
            for i in range(count)
        ]

    def prompt(
        self, chunks: Sequence[Chunk], question_tokens: int, seed: int, front: Sequence[int] = ()
    ) -> TokenizedPrompt:
        """Return the header, or the tokens of another ``front``, then chunks and a question of random token ids."""
        ids = list(front or self.engine.header_ids)
        spans = []
        for chunk in chunks:
            spans.append(ChunkSpan(chunk, len(ids), len(ids) + len(chunk.token_ids)))
            ids += chunk.token_ids
        return TokenizedPrompt((*ids, *self.random_ids(question_tokens, seed + 1)), tuple(spans))

    def random_ids(self, count: int, seed: int) -> tuple[int, ...]:
        """Return ``count`` random token ids."""
        generator = torch.Generator().manual_seed(seed)
        return tuple(torch.randint(0, self.vocab_size, (count,), generator=generator).tolist())


@contextmanager
def own_attention(model: Any) -> Iterator[None]:
    """Run a model with the attention implementation that transformers would have chosen."""
    ours = model.config.get_text_config()._attn_implementation
    if ours == "eager":
        yield
        return
    model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        model.set_attn_implementation(ours)
