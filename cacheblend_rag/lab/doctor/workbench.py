"""Sets up the model, the store and the random chunks that a measurement runs on."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from cacheblend_rag.blending.policies import SelectionPolicy
from cacheblend_rag.blending.settings import BLEND, FULL_RECOMPUTE, FULL_REUSE, PREFIX_CACHING, BlendSettings, Ratio
from cacheblend_rag.engines.models import dtype_named
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.engines.transformers.owner import device_named
from cacheblend_rag.errors import InputError, ModelError
from cacheblend_rag.lab.doctor.measure import describe_machine
from cacheblend_rag.lab.doctor.random_models import random_config, random_model
from cacheblend_rag.prompts.chunk import Chunk
from cacheblend_rag.prompts.prompt import ChunkSpan, TokenizedPrompt
from cacheblend_rag.store import DiskStore, KVStore, MemoryStore
from cacheblend_rag.store.codec import LOSSY, RAW
from cacheblend_rag.store.kvfile import EntryFormat
from cacheblend_rag.store.opening import record_tiers

if TYPE_CHECKING:
    from cacheblend_rag.engines.vllm import VLLMEngine

KVPlace = Literal["ram", "int8", "disk"]
EngineName = Literal["transformers", "vllm"]


@dataclass(frozen=True)
class BenchModel:
    """Says which model to measure.

    Attributes:
        model: As of an engine; None for the bundled one.
        random_weights: Shape of a random model instead; see :func:`random_model`.
        device: As torch names it; None takes CUDA if there is one.
        dtype: Name of a torch dtype; None for the engine's choice (fp32 for random weights on a CPU, else bf16).
        threads: CPU threads of torch; None leaves torch's own.
        engine: Which engine runs it.
        writer: The KV writer that writes the chunks' KV, as an engine takes it.
    """

    model: str | None = None
    random_weights: str | None = None
    device: str | None = None
    dtype: str | None = None
    threads: int | None = None
    engine: EngineName = "transformers"
    writer: str | Path | None = None

    def __post_init__(self) -> None:
        """Refuse two models at once, and names torch does not know."""
        if self.model is not None and self.random_weights is not None:
            raise InputError("Give a model or random weights, not both.")
        if self.writer is not None and self.random_weights is not None:
            raise InputError("A KV writer was made for a model; leave it out, or the random weights.")
        if self.dtype is not None:
            dtype_named(self.dtype)
        if self.threads is not None and self.threads < 1:
            raise InputError(f"threads is {self.threads}; give at least 1.")


@dataclass(frozen=True)
class Workbench:
    """Gives measurements a model and a store.

    Attributes:
        engine: The engine; its parity gate has passed.
        label: What the model is called in results.
        directory: The directory whose disk is measured; None if the KV is in RAM.
        device: Where the model is.
        dtype: What it computes in.
        vocab_size: Its vocabulary.
        name: Of the engine.
        kv: Where stored KV lies.
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
        """Return an open engine as measurements use it."""
        label = label or engine.fingerprint.name
        if isinstance(engine, TransformersEngine):
            runner, vocab_size = engine.runner, engine.subject().vocab_size
            return cls(engine, label, directory, runner.device, runner.dtype, vocab_size, kv=kv)
        vocab_size = engine.llm.model_config.get_vocab_size()
        return cls(engine, label, directory, engine.device, engine.dtype, vocab_size, "vllm", kv)

    @property
    def model(self) -> Any:
        """Return the transformers model itself, to run without this library; None in other engines."""
        return self.engine.runner.model if isinstance(self.engine, TransformersEngine) else None

    def head(self, settings: Any, **more: Any) -> dict[str, Any]:
        """Return what every result begins with: what was measured, with which settings, on which machine.

        Args:
            settings: Of the measurement, a dataclass; a ``ratio`` or ``policy`` of None is given as the model profile's.
            more: Further settings, or other values of them.
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
        """Let nothing of earlier prompts help the next one, but what is in the store."""
        self.engine.reset_prefix_cache()

    @staticmethod
    @contextmanager
    def open(
        model: BenchModel,
        kv: KVPlace = "ram",
        directory: Path | None = None,
        context: int = 8192,
        pages: int | None = None,
    ) -> Iterator[Workbench]:
        """Load the model in front of an empty store.

        Args:
            model: What to load.
            kv: Where the chunks' KV is read from: RAM, RAM that holds it by that codec, or a disk without a RAM tier in front.
            directory: Where to make the temporary directory of a disk store: it decides which disk is measured.
            context: Most tokens of a prompt, for engines that must know it beforehand.
            pages: Blocks of vLLM's paged cache; None for as many as fit in the memory it takes.

        Raises:
            ModelError: The model cannot be loaded or may not be blended.
        """
        with tempfile.TemporaryDirectory(prefix="cacheblend-bench-", dir=directory) as name:
            root = Path(name)
            on_vllm = model.engine == "vllm"
            opened = _on_vllm(model, kv, root, context, pages) if on_vllm else _on_transformers(model, kv, root)
            with opened.engine as engine:
                if not engine.gate.passed:
                    raise ModelError(
                        f"This model is not blended, so there is nothing to measure: {engine.gate.reason}."
                    )
                engine.profile = replace(engine.profile, always=True)  # what is measured is the blend
                yield opened

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


def _on_transformers(model: BenchModel, kv: KVPlace, root: Path) -> Workbench:
    if model.threads is not None:
        torch.set_num_threads(model.threads)
    store: KVStore = (
        DiskStore(root) if kv == "disk" else MemoryStore(format=EntryFormat(LOSSY if kv == "int8" else RAW))
    )
    dtype = dtype_named(model.dtype) if model.dtype else None
    if model.random_weights is None:
        engine = TransformersEngine(model.model, store=store, device=model.device, dtype=dtype, writer=model.writer)
    else:
        device = device_named(model.device)
        dtype = dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16)
        engine = TransformersEngine(random_model(model.random_weights, device, dtype), store=store, device=device)
    return Workbench.of(engine, model.random_weights, root if kv == "disk" else None, kv)


def _on_vllm(model: BenchModel, kv: KVPlace, root: Path, context: int, pages: int | None) -> Workbench:
    # vLLM binds its threads when its worker starts, and takes what memory it is given for its paged cache.
    if model.threads is not None:
        cores = sorted(os.sched_getaffinity(0))[: model.threads]
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from cacheblend_rag.engines.vllm import VLLMEngine

    if kv == "int8":
        record_tiers(root / "store", f"ram://?codec={LOSSY},file://")
    options: dict[str, Any] = {"store": root / "store", "dtype": model.dtype, "ram_budget": 0 if kv == "disk" else None}
    options["num_gpu_blocks_override"] = pages
    if model.random_weights is None:
        engine = VLLMEngine(model.model, writer=model.writer, **options)
    else:
        from cacheblend_rag.lab.doctor.vllm_weights import LOAD_FORMAT, RandomWeights

        random_config(model.random_weights).save_pretrained(root / "model")
        options |= {"load_format": LOAD_FORMAT, "skip_tokenizer_init": True, "max_model_len": context}
        extension = f"{RandomWeights.__module__}.{RandomWeights.__qualname__}"
        engine = VLLMEngine(root / "model", worker_extension_cls=extension, **options)
    return Workbench.of(engine, model.random_weights, root if kv == "disk" else None, kv)


def blend_by(
    ratio: Ratio | None = None,
    policy: str | SelectionPolicy | None = None,
    check_layers: tuple[int, ...] | None = None,
) -> BlendSettings:
    """Return a blend by what is given; with nothing given it is :data:`BLEND`."""
    given = BlendSettings(ratio, policy, check_layers)
    return given if given.named else BLEND


def name_methods(blend: BlendSettings) -> dict[str, BlendSettings]:
    """Return every way to treat stored KV that is timed, by its name in results; ``blend`` with the given settings."""
    return {"full": FULL_RECOMPUTE, "prefix": PREFIX_CACHING, "reuse": FULL_REUSE, "blend": blend}


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
