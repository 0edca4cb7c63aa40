"""Saves precomputed prompts from a worker's paged cache into the store, without delaying engine steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock

import torch

from cacheblend_rag.blending.rope import Rope
from cacheblend_rag.blending.static import mean_deviation, static_parts
from cacheblend_rag.blending.transfer import Arrival, fetch, sent
from cacheblend_rag.engines.entries import Entries
from cacheblend_rag.engines.results import NotStored
from cacheblend_rag.engines.vllm.messages import BUSY, Save, receipt
from cacheblend_rag.engines.vllm.paged import PagedModel
from cacheblend_rag.engines.vllm.target import all_ranks, sum_over_ranks
from cacheblend_rag.errors import StoreError
from cacheblend_rag.store.kv import ChunkKV, LayerKV, join_tokens, read_whole

_log = logging.getLogger(__name__)

# Most entries that wait for the disk: no fewer than one client has in flight (`Precompute`), so that a single client is
# never refused.
UNWRITTEN = 64
# Most bytes of entries that wait on the device, where memory is scarce, if page-locked memory is full.
_UNCOPIED_BYTES = 256 << 20


class Saver:
    """Saves entries and issues a receipt for each: an empty string, or the reason why the entry is not stored.

    Engine steps wait for neither copies nor the disk. Only the worker's thread calls this class; a thread writes.
    """

    def __init__(self, entries: Entries, paged: PagedModel | None = None, rope: Rope | None = None):
        """Save KV from the cache of ``paged``; None for a model that is not blended, whose saves are refused."""
        self._entries, self._paged, self._rope = entries, paged, rope
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="cacheblend-store")
        self._lock = Lock()
        self._unwritten = self._uncopied_bytes = 0
        self._written: dict[str, str] = {}
        self._parts: dict[str, list[tuple[Save, list[LayerKV]]]] = {}

    def bind(self, paged: PagedModel, rope: Rope) -> None:
        """Set the model, once it has passed the parity gate."""
        self._paged, self._rope = paged, rope

    def save(self, saves: Sequence[Save], refusal: str) -> None:
        """Start to copy prompts, or parts of prompts, out of the paged cache; queue complete prompts for writing.

        ``refusal`` is the reason why this model's KV is not stored, or an empty string.
        """
        for save in saves:
            tokens = save.token_ids[save.job.start :] if save.job.start or not self._entries.header_ids else ()
            name = receipt(self._entries_of(save).own_key(tokens), save.job.ranking)
            if refusal or self._paged is None:
                self._written[name] = f"not blended: {refusal}"
                continue
            room = not save.complete or (self._unwritten < UNWRITTEN and self._uncopied_bytes < _UNCOPIED_BYTES)
            # A ranking is summed over the ranks, so either all ranks compute it or none.
            if not (all_ranks(room) if save.job.ranking else room):
                self._written[name] = BUSY
                self.drop(save.request_id)
                continue
            try:
                if not save.complete:
                    self._parts.setdefault(save.request_id, []).append((save, self._part(save)))
                    continue
                kv = self._ranked(tokens, save) if save.job.ranking else self._copied(save)
            except Exception as error:  # must not end the engine or the other saves
                _log.exception("KV cannot be copied out")
                self._written[name] = f"it cannot be copied out ({type(error).__name__}: {error})"
                continue
            if kv is None:
                self._written[name] = "its stored KV is gone or damaged"
                continue
            with self._lock:
                self._unwritten += 1
            self._writer.submit(self._write, name, tokens, kv, save)

    def _entries_of(self, save: Save) -> Entries:
        """Return the KV writer's entries if the KV writer has computed the prompt, else the model's own entries."""
        entries = self._entries.within(save.job.namespace)
        return entries if save.job.written else entries.by(None)

    def drop(self, request_id: str) -> None:
        """Drop the copied parts of a prompt that will not be completed."""
        self._parts.pop(request_id, None)

    def _part(self, save: Save) -> list[LayerKV]:
        assert self._paged is not None
        positions = torch.arange(save.begin, save.end)
        groups, device = range(len(save.pages)), self._paged.device
        slots = [sent(self._paged.slots(group, save.pages, positions), device) for group in groups]
        return [self._paged.read(layer, slots[group]) for layer, group in enumerate(self._paged.group_of)]

    def _layers(self, save: Save) -> list[LayerKV]:
        """Return the KV of a complete prompt from the job's ``start`` on, with the parts that earlier steps copied."""
        parts = [*self._parts.pop(save.request_id, ()), (save, self._part(save))]
        edges = [save.job.start, *(part.end for part, _ in parts)]
        if [part.begin for part, _ in parts] != edges[:-1]:
            raise RuntimeError(f"not all tokens from {save.job.start} to {save.end} were copied out")
        return [join_tokens(layer) for layer in zip(*(layers for _, layers in parts), strict=True)]

    def _copied(self, save: Save) -> Callable[[], ChunkKV]:
        """Start to copy a prompt out; return a function that waits for the copy, for the writing thread."""
        uncopied = 0

        def room(nbytes: int) -> torch.Tensor | None:
            nonlocal uncopied
            found = self._entries.store.room(nbytes)
            uncopied = 0 if found is not None else nbytes
            return found

        arrive: Arrival = fetch(self._layers(save), room)
        with self._lock:
            self._uncopied_bytes += uncopied

        def kv() -> ChunkKV:
            try:
                return ChunkKV(arrive(), save.job.start)
            finally:
                with self._lock:
                    self._uncopied_bytes -= uncopied

        return kv

    def _ranked(self, tokens: tuple[int, ...], save: Save) -> Callable[[], ChunkKV] | None:
        """Return a function that returns a chunk's stored KV with static deviation; None if a rank lacks some KV."""
        assert self._paged is not None
        assert self._rope is not None
        alone, parts = None, None
        try:
            stored = self._entries_of(save).get(tokens, self._paged.num_layers, self._paged.kv_heads)
            alone = None if stored is None else read_whole(stored)
            if alone is not None:
                parts = static_parts(alone, self._layers(save), save.job.start, self._rope)
        except Exception:  # not raised, since the other ranks wait for this rank's vote
            _log.exception("A chunk's tokens cannot be ranked")
        if not all_ranks(parts is not None):
            return None
        assert alone is not None
        assert parts is not None
        found = alone.ranked(mean_deviation(sum_over_ranks(parts)))
        return lambda: found

    def _write(self, name: str, tokens: tuple[int, ...], kv: Callable[[], ChunkKV], save: Save) -> None:
        try:
            stored = self._entries_of(save).put(tokens, kv(), replace=save.job.ranking)
            self._written[name] = "" if stored else NotStored.NO_ROOM
        except StoreError as error:
            self._written[name] = str(error)
        except Exception as error:  # without a receipt, the client would wait in vain
            _log.exception("Stored KV cannot be written")
            self._written[name] = f"it cannot be written ({type(error).__name__}: {error})"
        finally:
            with self._lock:
                self._unwritten -= 1

    def take_written(self) -> dict[str, str]:
        """Return the receipts since the last call."""
        return {name: self._written.pop(name) for name in list(self._written)}

    def close(self) -> None:
        """Wait until pending entries are written."""
        self._writer.shutdown(wait=True)
