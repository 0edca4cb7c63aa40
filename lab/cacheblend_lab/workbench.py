"""Provides measurements with an open engine, random chunks and prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from cacheblend_rag.calibrate.measure import describe_machine, prompt_of, random_chunks, random_ids, vocab_size
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.prompts.chunk import Chunk
from cacheblend_rag.prompts.prompt import TokenizedPrompt

if TYPE_CHECKING:
    from cacheblend_rag.engines.vllm import VLLMEngine
    from cacheblend_rag.frameworks.sharing import EngineName

KVPlace = Literal["ram", "int8", "disk"]


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
        assert engine.device is not None
        name: EngineName = "transformers" if isinstance(engine, TransformersEngine) else "vllm"
        label = label or engine.fingerprint.name
        return cls(engine, label, directory, engine.device, engine.dtype, vocab_size(engine), name, kv)

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
        return random_chunks(self.vocab_size, count, tokens, seed)

    def prompt(
        self, chunks: Sequence[Chunk], question_tokens: int, seed: int, front: Sequence[int] = ()
    ) -> TokenizedPrompt:
        """Return the header, or the tokens of another ``front``, then chunks and a question of random token ids."""
        return prompt_of(front or self.engine.header_ids, chunks, self.random_ids(question_tokens, seed + 1))

    def random_ids(self, count: int, seed: int) -> tuple[int, ...]:
        """Return ``count`` random token ids."""
        return random_ids(self.vocab_size, count, seed)
