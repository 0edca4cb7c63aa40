"""Computing chunk KV at indexing time: ``[header] + chunk``, batched, the chunk's slice kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from cacheblend_rag.engines.results import PrecomputeReport
from cacheblend_rag.engines.transformers.cache import PositionedCache
from cacheblend_rag.engines.transformers.target import ModelRunner
from cacheblend_rag.prompts.chunk import Chunk
from cacheblend_rag.store import KVStore
from cacheblend_rag.store.kv import ChunkKV, KVKey, ModelFingerprint, kv_key

# Tokens per forward: enough rows to keep the device busy, few enough not to double the memory a prompt takes.
_BATCH_TOKENS = {"cpu": 2048, "cuda": 16384}


def precompute(
    runner: ModelRunner,
    store: KVStore,
    fingerprint: ModelFingerprint,
    header: Sequence[int],
    chunks: Sequence[Chunk],
    progress: Callable[[int], None] | None = None,
) -> PrecomputeReport:
    """Compute and store what is missing; see :meth:`BlendEngine.precompute`."""
    begin = time.perf_counter()
    wanted: dict[KVKey, tuple[int, ...]] = {}
    ids: dict[KVKey, str] = {}
    failed = {c.id: "it has no tokens" for c in chunks if not c.token_ids}
    present = 0
    for chunk in chunks:
        key = kv_key(fingerprint, header, chunk.token_ids)
        if not chunk.token_ids or key in wanted:
            continue
        if store.contains(key):
            present += 1
        else:
            wanted[key], ids[key] = chunk.token_ids, chunk.id
    header_key = kv_key(fingerprint, header, ())
    if progress is not None and len(chunks) > len(wanted):
        progress(len(chunks) - len(wanted))
    if header and chunks and not store.contains(header_key):
        wanted[header_key] = ()
    tokens = 0

    def stored(key: KVKey, future: Future[bool]) -> None:
        if not future.result() and key in ids:
            failed[ids[key]] = "it does not fit the store's budget"

    # One writer: the disk works while the next batch is computed; a failed write surfaces before the next but one.
    with ThreadPoolExecutor(1, thread_name_prefix="cacheblend-store") as writer:
        waiting: list[tuple[KVKey, Future[bool]]] = []
        for batch in _batches(wanted, len(header), runner.device):
            entries = list(_compute(runner, tuple(header), batch))
            for key, future in waiting:
                stored(key, future)
            waiting = [(key, writer.submit(store.put, key, kv)) for key, kv in entries]
            tokens += sum(len(t) for _, t in batch)
            if progress is not None and (finished := sum(key in ids for key, _ in batch)):
                progress(finished)
        for key, future in waiting:
            stored(key, future)
    computed = len(ids) - sum(i in failed for i in ids.values())
    return PrecomputeReport(computed, present, tokens, time.perf_counter() - begin, failed)


def rows_per_batch(device: torch.device, width: int) -> int:
    """Return how many rows of ``width`` tokens one forward takes."""
    return max(1, _BATCH_TOKENS["cuda" if device.type == "cuda" else "cpu"] // width)


def _batches(
    wanted: dict[KVKey, tuple[int, ...]], header: int, device: torch.device
) -> Iterator[list[tuple[KVKey, tuple[int, ...]]]]:
    """Group entries of like length, so that padding stays small."""
    batch: list[tuple[KVKey, tuple[int, ...]]] = []
    for key, token_ids in sorted(wanted.items(), key=lambda item: -len(item[1])):
        if batch and len(batch) == rows_per_batch(device, header + len(batch[0][1])):
            yield batch
            batch = []
        batch.append((key, token_ids))
    if batch:
        yield batch


def _compute(
    runner: ModelRunner, header: tuple[int, ...], batch: Sequence[tuple[KVKey, tuple[int, ...]]]
) -> Iterator[tuple[KVKey, ChunkKV]]:
    rows = [header + token_ids for _, token_ids in batch]
    width = max(map(len, rows))
    # Padding stands behind each row, where causal attention never looks from: no mask is needed.
    ids = torch.tensor([row + (0,) * (width - len(row)) for row in rows], device=runner.device)
    cache = PositionedCache(runner.num_layers, width)
    runner.append(ids, cache)
    for index, ((key, token_ids), row) in enumerate(zip(batch, rows, strict=True)):
        start = len(header) if token_ids else 0
        layers = [cache.read(layer, index, start, len(row)) for layer in range(runner.num_layers)]
        yield key, ChunkKV([type(x)(x.k.cpu(), x.v.cpu()) for x in layers], start)
