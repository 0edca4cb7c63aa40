"""The model, the store and the random chunks that a measurement runs on."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from cacheblend_rag.chunking import Chunk
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.engines.transformers.loading import device_named, dtype_named, random_model
from cacheblend_rag.errors import InputError, ModelError
from cacheblend_rag.prompt import ChunkSpan, TokenizedPrompt
from cacheblend_rag.store import DiskStore, KVStore, MemoryStore

KVPlace = Literal["ram", "disk"]


@dataclass(frozen=True)
class BenchModel:
    """Which model to measure.

    Attributes:
        model: Directory or hub name; None for the bundled one.
        random_weights: Shape of a random model instead; see :func:`random_model`.
        device: As torch names it; None takes CUDA if there is one.
        dtype: Name of a torch dtype; None for the engine's choice (fp32 for random weights on a CPU, else bf16).
        threads: CPU threads of torch; None leaves torch's own.
    """

    model: str | None = None
    random_weights: str | None = None
    device: str | None = None
    dtype: str | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        """Refuse two models at once, and names torch does not know."""
        if self.model is not None and self.random_weights is not None:
            raise InputError("Give a model or random weights, not both.")
        if self.dtype is not None:
            dtype_named(self.dtype)
        if self.threads is not None and self.threads < 1:
            raise InputError(f"threads is {self.threads}; give at least 1.")


@dataclass(frozen=True)
class Workbench:
    """A model and a store to measure on.

    Attributes:
        engine: The engine; its parity gate has passed.
        label: What the model is called in results.
        directory: The disk store's directory; None if the KV is in RAM.
    """

    engine: TransformersEngine
    label: str
    directory: Path | None

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.engine.runner.device

    @property
    def kv(self) -> KVPlace:
        """Where stored KV lies."""
        return "ram" if self.directory is None else "disk"

    def files(self) -> list[Path]:
        """Return the files of all stored entries."""
        return [] if self.directory is None else sorted(self.directory.rglob("*.safetensors"))

    @staticmethod
    @contextmanager
    def open(model: BenchModel, kv: KVPlace = "ram", directory: Path | None = None) -> Iterator[Workbench]:
        """Load the model in front of an empty store.

        Args:
            model: What to load.
            kv: Where the chunks' KV is kept: in RAM without a disk, or on disk without a RAM tier.
            directory: Where to make the temporary directory of a disk store: it decides which disk is measured.

        Raises:
            ModelError: The model cannot be loaded or may not be blended.
        """
        if model.threads is not None:
            torch.set_num_threads(model.threads)
        with tempfile.TemporaryDirectory(prefix="cacheblend-bench-", dir=directory) as root:
            store: KVStore = DiskStore(root) if kv == "disk" else MemoryStore()
            with _engine(model, store) as engine:
                if not engine.gate.passed:
                    raise ModelError(
                        f"This model is not blended, so there is nothing to measure: {engine.gate.reason}."
                    )
                label = model.random_weights or engine.fingerprint.name
                yield Workbench(engine, label, Path(root) if kv == "disk" else None)

    def random_chunks(self, count: int, tokens: int, seed: int) -> list[Chunk]:
        """Return ``count`` different chunks of ``tokens`` random token ids."""
        ids = self._random_ids(count * tokens, seed)
        return [
            Chunk(f"random-{seed}-{i}", "", tuple(ids[i * tokens : (i + 1) * tokens]), {"source": "random tokens"})
            for i in range(count)
        ]

    def prompt(self, chunks: list[Chunk], question_tokens: int, seed: int) -> TokenizedPrompt:
        """Return header, chunks and a question of random token ids."""
        ids = list(self.engine.header_ids)
        spans = []
        for chunk in chunks:
            spans.append(ChunkSpan(chunk, len(ids), len(ids) + len(chunk.token_ids)))
            ids += chunk.token_ids
        return TokenizedPrompt((*ids, *self._random_ids(question_tokens, seed + 1)), tuple(spans))

    def _random_ids(self, count: int, seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        ids: list[int] = torch.randint(0, self.engine.subject().vocab_size, (count,), generator=generator).tolist()
        return ids


def _engine(model: BenchModel, store: KVStore) -> TransformersEngine:
    dtype = dtype_named(model.dtype) if model.dtype else None
    if model.random_weights is None:
        return TransformersEngine(model.model, store=store, device=model.device, dtype=dtype)
    device = device_named(model.device)
    dtype = dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16)
    return TransformersEngine(random_model(model.random_weights, device, dtype), store=store, device=device)


@contextmanager
def own_attention(model: Any) -> Iterator[None]:
    """Run a model with the attention that transformers itself would have chosen."""
    ours = model.config.get_text_config()._attn_implementation
    if ours == "eager":
        yield
        return
    model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        model.set_attn_implementation(ours)
