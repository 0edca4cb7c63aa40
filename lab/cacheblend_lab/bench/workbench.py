"""Opens a model, or random weights, in front of an empty store, for measurements."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from cacheblend_lab.bench.random_models import random_config, random_model
from cacheblend_lab.workbench import KVPlace, Workbench
from cacheblend_rag.blending.policies import SelectionPolicy
from cacheblend_rag.blending.settings import BLEND, FULL_RECOMPUTE, FULL_REUSE, PREFIX_CACHING, BlendSettings, Ratio
from cacheblend_rag.engines.models import dtype_named
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.engines.transformers.owner import device_named
from cacheblend_rag.errors import InputError, ModelError
from cacheblend_rag.store import DiskStore, KVStore, MemoryStore
from cacheblend_rag.store.codec import LOSSY, RAW
from cacheblend_rag.store.kvfile import EntryFormat
from cacheblend_rag.store.opening import record_tiers

if TYPE_CHECKING:
    from cacheblend_rag.frameworks.sharing import EngineName


@dataclass(frozen=True)
class BenchModel:
    """Holds the model to measure, and the settings that it runs with.

    Attributes:
        model: Name or directory as for an engine; None for the bundled model.
        random_weights: Shape of a random model, in place of ``model``; see :func:`random_model`.
        dtype: Name of a torch dtype; None for the engine's choice (fp32 for random weights on a CPU, else bf16).
    """

    model: str | None = None
    random_weights: str | None = None
    device: str | None = None
    dtype: str | None = None
    threads: int | None = None
    engine: EngineName = "transformers"
    writer: str | Path | None = None

    def __post_init__(self) -> None:
        """Raise InputError for conflicting models, an unknown dtype, or fewer than one thread."""
        if self.model is not None and self.random_weights is not None:
            raise InputError("Give a model or random weights, not both.")
        if self.writer is not None and self.random_weights is not None:
            raise InputError("A KV writer was made for a model; leave it out, or the random weights.")
        if self.dtype is not None:
            dtype_named(self.dtype)
        if self.threads is not None and self.threads < 1:
            raise InputError(f"threads is {self.threads}; give at least 1.")


@contextmanager
def open_workbench(
    model: BenchModel,
    kv: KVPlace = "ram",
    directory: Path | None = None,
    context: int = 8192,
) -> Iterator[Workbench]:
    """Load the model in front of an empty store.

    Args:
        model: The model to load.
        kv: Place that the chunks' KV is read from: RAM, RAM with the int8 codec, or a disk without a RAM tier in front.
        directory: Parent of the temporary directory of a disk store, which determines the measured disk.
        context: Maximum number of tokens of a prompt, for engines that must know it beforehand.

    Raises:
        ModelError: The model cannot be loaded or may not be blended.
    """
    with tempfile.TemporaryDirectory(prefix="cacheblend-bench-", dir=directory) as name:
        root = Path(name)
        on_vllm = model.engine == "vllm"
        opened = _on_vllm(model, kv, root, context) if on_vllm else _on_transformers(model, kv, root)
        with opened.engine as engine:
            if not engine.gate.passed:
                raise ModelError(f"This model is not blended, so there is nothing to measure: {engine.gate.reason}.")
            engine.profile = replace(engine.profile, always=True)  # measure blends only
            yield opened


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


def _on_vllm(model: BenchModel, kv: KVPlace, root: Path, context: int) -> Workbench:
    # vLLM binds its threads when its worker starts, and uses all memory it is given for its paged cache.
    if model.threads is not None:
        cores = sorted(os.sched_getaffinity(0))[: model.threads]
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from cacheblend_rag.engines.vllm import VLLMEngine

    if kv == "int8":
        record_tiers(root / "store", f"ram://?codec={LOSSY},file://")
    options: dict[str, Any] = {"store": root / "store", "dtype": model.dtype, "ram_budget": 0 if kv == "disk" else None}
    if model.random_weights is None:
        engine = VLLMEngine(model.model, writer=model.writer, **options)
    else:
        from cacheblend_lab.bench.vllm_weights import LOAD_FORMAT, RandomWeights

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
    """Return a blend with the given options; without any option return :data:`BLEND`."""
    given = BlendSettings(ratio, policy, check_layers)
    return given if given.named else BLEND


def name_methods(blend: BlendSettings) -> dict[str, BlendSettings]:
    """Return every timed way to treat stored KV, by its name in results; ``blend`` has the given settings."""
    return {"full": FULL_RECOMPUTE, "prefix": PREFIX_CACHING, "reuse": FULL_REUSE, "blend": blend}
