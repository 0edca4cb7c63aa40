"""Saves precomputed prompts from a worker's paged cache into the store, without holding up an engine step."""

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
from cacheblend_rag.engines.vllm.messages import BUSY, Save, receipt
from cacheblend_rag.engines.vllm.paged import PagedModel
from cacheblend_rag.engines.vllm.target import all_ranks, sum_over_ranks
from cacheblend_rag.errors import StoreError
from cacheblend_rag.store.base import room_in
from cacheblend_rag.store.kv import ChunkKV, LayerKV, join_tokens, read_whole

_log = logging.getLogger(__name__)

# Entries that may wait for the disk: no fewer than one client has on the way (`Precompute`), so that it is never refused.
UNWRITTEN = 64
# Without page-locked memory to copy to, entries wait on the device, which has little to spare.
_UNCOPIED_BYTES = 256 << 20


class Saver:
    """Saves entries, each with a receipt: empty, or why it is not stored. Steps wait for neither copy nor disk.

    Called from the worker's thread alone; one more thread writes.
    """

    def __init__(self, entries: Entries, paged: PagedModel | None = None, rope: Rope | None = None):
        """Save what ``paged`` holds; None for a model that is not blended, whose saves are refused."""
        self._entries, self._paged, self._rope = entries, paged, rope
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="cacheblend-store")
        self._lock = Lock()
        self._unwritten = self._uncopied_bytes = 0
        self._written: dict[str, str] = {}
        self._parts: dict[str, list[tuple[Save, list[LayerKV]]]] = {}

    def bind(self, paged: PagedModel, rope: Rope) -> None:
        """Take the model, once it has passed the parity gate."""
        self._paged, self._rope = paged, rope

    def save(self, saves: Sequence[Save], refusal: str) -> None:
        """Begin to copy prompts, or parts of them, out of the paged cache; hand those to the writer whose last part it is.

        ``refusal`` says why this model's KV is not stored; it is empty if it is.
        """
        for save in saves:
            tokens = save.token_ids[save.job.start :] if save.job.start or not self._entries.header_ids else ()
            name = receipt(self._hand(save).own_key(tokens), save.job.ranking)
            if refusal or self._paged is None:
                self._written[name] = f"not blended: {refusal}"
                continue
            room = not save.complete or (self._unwritten < UNWRITTEN and self._uncopied_bytes < _UNCOPIED_BYTES)
            # A ranking is added up over the ranks, so that all do it or none.
            if not (all_ranks(room) if save.job.ranking else room):
                self._written[name] = BUSY
                self.drop(save.request_id)
                continue
            try:
                if not save.complete:
                    self._parts.setdefault(save.request_id, []).append((save, self._part(save)))
                    continue
                kv = self._ranked(tokens, save) if save.job.ranking else self._copied(save)
            except Exception as error:  # the engine and the other saves go on
                _log.exception("KV cannot be copied out")
                self._written[name] = f"it cannot be copied out ({type(error).__name__}: {error})"
                continue
            if kv is None:
                self._written[name] = "its stored KV is gone or damaged"
                continue
            with self._lock:
                self._unwritten += 1
            self._writer.submit(self._write, name, tokens, kv, save)

    def _hand(self, save: Save) -> Entries:
        """Return the entries of who has computed a prompt: the KV writer, if there is one, or the model itself."""
        entries = self._entries.within(save.job.namespace)
        return entries if save.job.written else entries.by(None)

    def drop(self, request_id: str) -> None:
        """Forget the parts of a prompt that will not be complete."""
        self._parts.pop(request_id, None)

    def _part(self, save: Save) -> list[LayerKV]:
        assert self._paged is not None
        positions = torch.arange(save.begin, save.end)
        groups, device = range(len(save.pages)), self._paged.device
        slots = [sent(self._paged.slots(group, save.pages, positions), device) for group in groups]
        return [self._paged.read(layer, slots[group]) for layer, group in enumerate(self._paged.group_of)]

    def _layers(self, save: Save) -> list[LayerKV]:
        """Return the KV of a complete prompt from ``start`` on, with the parts that earlier steps copied out."""
        parts = [*self._parts.pop(save.request_id, ()), (save, self._part(save))]
        edges = [save.job.start, *(part.end for part, _ in parts)]
        if [part.begin for part, _ in parts] != edges[:-1]:
            raise RuntimeError(f"not all tokens from {save.job.start} to {save.end} were copied out")
        return [join_tokens(layer) for layer in zip(*(layers for _, layers in parts), strict=True)]

    def _copied(self, save: Save) -> Callable[[], ChunkKV]:
        """Begin to copy a prompt out; return what waits for it, in the writer."""
        uncopied = 0

        def room(nbytes: int) -> torch.Tensor | None:
            nonlocal uncopied
            found = room_in(self._entries.store, nbytes)
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
        """Return a chunk's stored KV with its static deviation; None where a rank has not all of it."""
        assert self._paged is not None
        assert self._rope is not None
        alone, parts = None, None
        try:
            stored = self._hand(save).get(tokens, self._paged.num_layers, self._paged.kv_heads)
            alone = None if stored is None else read_whole(stored)
            if alone is not None:
                parts = static_parts(alone, self._layers(save), save.job.start, self._rope)
        except Exception:  # the other ranks wait for this one's vote
            _log.exception("A chunk's tokens cannot be ranked")
        if not all_ranks(parts is not None):
            return None
        assert alone is not None
        assert parts is not None
        found = alone.ranked(mean_deviation(sum_over_ranks(parts)))
        return lambda: found

    def _write(self, name: str, tokens: tuple[int, ...], kv: Callable[[], ChunkKV], save: Save) -> None:
        try:
            stored = self._hand(save).put(tokens, kv(), replace=save.job.ranking)
            self._written[name] = "" if stored else "it does not fit the store's budget"
        except StoreError as error:
            self._written[name] = str(error)
        except Exception as error:  # a chunk without a receipt would be waited for in vain
            _log.exception("Stored KV cannot be written")
            self._written[name] = f"it cannot be written ({type(error).__name__}: {error})"
        finally:
            with self._lock:
                self._unwritten -= 1

    def take_written(self) -> dict[str, str]:
        """Return the receipts since the last call."""
        return {name: self._written.pop(name) for name in list(self._written)}

    def close(self) -> None:
        """Finish what is being written."""
        self._writer.shutdown(wait=True)
