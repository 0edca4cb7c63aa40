"""Computes the KV of chunks at indexing time, in batches of ``[header] + chunk``, and the chunks' static deviations."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from cacheblend_rag.blending.rope import Rope
from cacheblend_rag.blending.static import static_deviation
from cacheblend_rag.blending.transfer import Arrival, fetch
from cacheblend_rag.engines.entries import Entries
from cacheblend_rag.engines.precompute import plan_precompute, report_of
from cacheblend_rag.engines.results import NotStored, PrecomputeReport
from cacheblend_rag.engines.transformers.cache import PositionedCache
from cacheblend_rag.engines.transformers.target import ModelRunner
from cacheblend_rag.prompts.chunk import Chunk
from cacheblend_rag.store import KVStore
from cacheblend_rag.store.kv import ChunkKV, LayerKV, StoredKV, read_whole

Computed = tuple[tuple[int, ...], tuple[ChunkKV, Arrival]]
"""An entry's token ids, its KV on the device that computed it, and a function that returns the KV in host memory."""
Compute = Callable[[tuple[int, ...], Sequence[tuple[int, ...]]], Iterator[Computed]]
"""Computes the entry of each row of token ids behind a header; ``()`` is the row of the header's own entry."""

# Tokens per forward: enough to keep the device busy, few enough not to double the memory that a prompt takes.
_BATCH_TOKENS = {"cpu": 2048, "cuda": 16384}


class Ranker:
    """Computes chunks behind header and probe, and static deviations; see :mod:`cacheblend_rag.blending.static`."""

    def __init__(
        self,
        runner: ModelRunner,
        rope: Rope,
        prefix: tuple[int, ...],
        writing: AbstractContextManager[None] = nullcontext(),  # noqa: B008 - the default has no state
    ):
        """Prepare; the prefix's KV is computed when it is first needed. A KV writer is active within ``writing``."""
        self._runner, self._rope, self._writing, self.prefix = runner, rope, writing, prefix
        self._prefix_kv: list[LayerKV] = []

    def rank(self, batch: Sequence[tuple[int, ...]], alone: Sequence[StoredKV]) -> list[torch.Tensor]:
        """Return the static deviation ``[tokens]`` of each chunk of a batch, whose KV without probe is ``alone``."""
        start, behind = len(self.prefix), self.compute(batch)
        return [static_deviation(kv, layers, start, self._rope) for kv, layers in zip(alone, behind, strict=True)]

    def compute(self, batch: Sequence[tuple[int, ...]]) -> Iterator[list[LayerKV]]:
        """Yield each chunk's KV behind the prefix, one item per layer."""
        start = len(self.prefix)
        if self.prefix and not self._prefix_kv:
            self._prefix_kv = _run(self._runner, [self.prefix], self._writing).copied(0, start)
        cache = _run(self._runner, batch, self._writing, self._prefix_kv)
        for index, row in enumerate(batch):
            yield [cache.read(i, index, start, start + len(row)) for i in range(self._runner.num_layers)]


def _run(
    runner: ModelRunner,
    rows: Sequence[tuple[int, ...]],
    writing: AbstractContextManager[None],
    prefix: Sequence[LayerKV] = (),
) -> PositionedCache:
    """Run rows of token ids within ``writing``, each behind the KV of a ``prefix``; return the cache with their KV."""
    width, start = max(map(len, rows)), prefix[0].k.shape[1] if prefix else 0
    # Padding stands behind each row, so no token of the row attends to it, and no mask is needed.
    ids = torch.tensor([row + (0,) * (width - len(row)) for row in rows], device=runner.device)
    cache = runner.new_cache(start + width, room=0)
    if prefix:
        cache.begin(prefix, len(rows))
    with writing:
        runner.append(ids, cache)
    return cache


def precompute(
    runner: ModelRunner,
    entries: Entries,
    chunks: Sequence[Chunk],
    context_window: int,
    progress: Callable[[int], None] | None = None,
    ranker: Ranker | None = None,
    compute: Compute | None = None,
    turn: AbstractContextManager[Any] = nullcontext(),  # noqa: B008 - the default has no state
    writing: AbstractContextManager[None] = nullcontext(),  # noqa: B008 - the default has no state
    behind: Ranker | None = None,
) -> PrecomputeReport:
    """Compute and store missing entries of chunks, with static deviations if there is a ranker.

    ``compute`` computes the entries; None computes plain KV, with the KV writer's context ``writing`` or behind the
    prefix of the ranker ``behind``. The context ``turn`` is entered for computations, not for waiting for the disk. See
    :meth:`BlendEngine.precompute`.
    """
    begin = time.perf_counter()
    probe_tokens = None if ranker is None else len(ranker.prefix) - len(entries.header_ids)
    written_behind = 0 if behind is None else len(behind.prefix) - len(entries.header_ids)
    plan = plan_precompute(chunks, entries, context_window, progress, probe_tokens, written_behind)
    failed, rank_s = dict(plan.failed), 0.0
    by = (nullcontext(), None) if entries.writer is None else (writing, behind)
    make = compute or partial(_compute, runner, entries.store, *by)

    def stored(token_ids: tuple[int, ...], future: Future[bool]) -> None:
        if not future.result() and token_ids:
            failed[plan.chunks[token_ids]] = NotStored.NO_ROOM

    # One thread writes while the next batch is computed; the error of a failed write is raised one batch later.
    with ThreadPoolExecutor(1, thread_name_prefix="cacheblend-store") as writer:
        waiting: list[tuple[tuple[int, ...], Future[bool]]] = []
        for batch in _batches(plan.token_ids, len(entries.header_ids), runner.device):
            with turn:
                computed = dict(make(entries.header_ids, batch))
                begin_rank = time.perf_counter()
                alone = {token_ids: kv for token_ids, (kv, _) in computed.items()}
                static = {} if ranker is None else _ranks(ranker, alone, plan.most_ranked)
            rank_s += time.perf_counter() - begin_rank
            for each in waiting:
                stored(*each)
            waiting = [
                (ids, writer.submit(_put, entries, ids, kv.start, arrive, static.get(ids)))
                for ids, (kv, arrive) in computed.items()
            ]
            del computed, alone  # also frees the batch's cache
            if progress is not None and (finished := sum(map(bool, batch))):
                progress(finished)
        for each in waiting:
            stored(*each)
    if ranker is not None:
        begin_rank = time.perf_counter()
        _rank_stored(runner, entries, ranker, plan.unranked, turn)
        rank_s += time.perf_counter() - begin_rank
    return report_of(plan, failed, time.perf_counter() - begin, rank_s)


def _rank_stored(
    runner: ModelRunner,
    entries: Entries,
    ranker: Ranker,
    unranked: Sequence[tuple[int, ...]],
    turn: AbstractContextManager[Any],
) -> None:
    """Add static deviations to entries that were stored without static deviations."""
    for batch in _batches(unranked, len(ranker.prefix), runner.device):
        found = {token_ids: entries.get(token_ids, runner.num_layers) for token_ids in batch}
        whole = {token_ids: read_whole(kv) for token_ids, kv in found.items() if kv is not None}
        stored = {token_ids: kv for token_ids, kv in whole.items() if kv is not None}
        with turn:
            static = _ranks(ranker, stored, max(map(len, batch)))
        for token_ids, row in static.items():
            entries.put(token_ids, stored[token_ids].ranked(row), replace=True)


def _ranks(ranker: Ranker, alone: Mapping[tuple[int, ...], ChunkKV], most: int) -> dict[tuple[int, ...], torch.Tensor]:
    """Return the static deviation of each entry, except the header's own and entries of more than ``most`` tokens."""
    wanted = [token_ids for token_ids in alone if 0 < len(token_ids) <= most]
    if not wanted:
        return {}
    return dict(zip(wanted, ranker.rank(wanted, [alone[token_ids] for token_ids in wanted]), strict=True))


def rows_per_batch(device: torch.device, width: int) -> int:
    """Return the number of rows of ``width`` tokens in one forward."""
    return max(1, _BATCH_TOKENS["cuda" if device.type == "cuda" else "cpu"] // width)


def _batches(wanted: Sequence[tuple[int, ...]], header: int, device: torch.device) -> Iterator[list[tuple[int, ...]]]:
    """Yield batches of entries of similar length, so that little padding is needed."""
    batch: list[tuple[int, ...]] = []
    for token_ids in sorted(wanted, key=len, reverse=True):
        if batch and len(batch) == rows_per_batch(device, header + len(batch[0])):
            yield batch
            batch = []
        batch.append(token_ids)
    if batch:
        yield batch


def _compute(
    runner: ModelRunner,
    store: KVStore,
    writing: AbstractContextManager[None],
    behind: Ranker | None,
    header: tuple[int, ...],
    batch: Sequence[tuple[int, ...]],
) -> Iterator[Computed]:
    arrive = partial(store.room, wait=True)
    if () in batch and len(batch) > 1:  # the model itself, without KV writer, computes the header's own KV
        for part in ([()], [token_ids for token_ids in batch if token_ids]):
            yield from _compute(runner, store, writing, behind, header, part)
        return
    if behind is not None and any(batch):
        for token_ids, layers in zip(batch, behind.compute(batch), strict=True):
            yield token_ids, (ChunkKV(layers, len(behind.prefix)), fetch(layers, arrive))
        return
    rows = [header + token_ids for token_ids in batch]
    cache = _run(runner, rows, writing if any(batch) else nullcontext())
    for index, (token_ids, row) in enumerate(zip(batch, rows, strict=True)):
        start = len(header) if token_ids else 0
        layers = [cache.view(layer, index, start, len(row)) for layer in range(runner.num_layers)]
        yield token_ids, (ChunkKV(layers, start), fetch(layers, arrive))


def _put(
    entries: Entries, token_ids: tuple[int, ...], start: int, arrive: Arrival, static: torch.Tensor | None
) -> bool:
    return entries.put(token_ids, ChunkKV(arrive(), start, static=static))
