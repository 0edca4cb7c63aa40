"""The connector's half in vLLM's workers: blends go on between engine steps, precomputed prompts are stored."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from cacheblend_rag.blending.gate import GateReport, run_gate
from cacheblend_rag.blending.rope import Rope
from cacheblend_rag.blending.static import Distances, static_parts
from cacheblend_rag.engines.entries import Entries
from cacheblend_rag.engines.vllm.blendable import why_not_in_vllm
from cacheblend_rag.engines.vllm.blends import BlendQueue
from cacheblend_rag.engines.vllm.messages import Save, StepMeta, WorkerMeta, receipt
from cacheblend_rag.engines.vllm.pace import LEAST_PREFILL, PREFILL, Allowance, StepClock
from cacheblend_rag.engines.vllm.paged import PagedModel
from cacheblend_rag.engines.vllm.subject import PagedSubject
from cacheblend_rag.engines.vllm.target import all_ranks, sum_over_ranks
from cacheblend_rag.errors import StoreError
from cacheblend_rag.store.kv import ChunkKV, LayerKV, join_tokens, read_whole

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_log = logging.getLogger(__name__)
# Precomputed entries that may wait in memory for the disk.
_UNWRITTEN = 16


class WorkerSide:
    """Owned by the connector of one worker; called from its thread alone."""

    def __init__(self, entries: Entries, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, step_tokens: float):
        """Wait for :meth:`bind`. In a step in which streams run, blends take the time that ``step_tokens`` of prefill take."""
        self.kv_caches: dict[str, torch.Tensor] = {}
        self._entries, self._step_tokens = entries, step_tokens
        self._vllm_config, self._kv_cache_config = vllm_config, kv_cache_config
        self.gate = GateReport(False, "the parity gate has not run")
        self._paged: PagedModel | None = None
        self._rope: Rope | None = None
        self._blends: BlendQueue | None = None
        self._refused: dict[str, str] = {}
        self._step = StepMeta()
        self._prefill: tuple[int, Any] | None = None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="cacheblend-store")
        self._unwritten: deque[Future[None]] = deque()
        self._written: dict[str, str] = {}
        self._parts: dict[str, list[tuple[Save, list[LayerKV]]]] = {}

    def bind(self, model: Any, device: torch.device) -> None:
        """Take the model and run the parity gate."""
        refusal = why_not_in_vllm(self._vllm_config, self._kv_cache_config)
        if refusal is None:
            paged = self._paged = PagedModel(model, device, self._vllm_config, self._kv_cache_config, self.kv_caches)
            if paged.kernel_block_size != paged.block_size:
                refusal = (
                    f"its attention kernel has pages of {paged.kernel_block_size} tokens, vLLM's scheduler blocks of "
                    f"{paged.block_size}: start it with --block-size {paged.kernel_block_size}"
                )
            elif not paged.layout_is_known():
                refusal = "this attention backend lays its KV cache out in an unknown way"
        if refusal is not None:
            self.gate = GateReport(False, refusal)
            return
        self.gate, self._rope = _gate(paged)
        if self.gate.passed and self._rope is not None:
            self._blends = BlendQueue(paged, self._rope, self._entries, StepClock(device))

    def attention_begins(self, layer_name: str) -> None:
        """See :meth:`PagedModel.attention_begins`."""
        if self._paged is not None:
            self._paged.attention_begins(layer_name)

    def take(self, step: StepMeta) -> None:
        """Take in what this step brings: its blends go on when it has been computed (:meth:`blend`)."""
        self._step = step
        for load in step.loads:
            if self._blends is not None:
                self._blends.add(load)
            else:
                self._refused[load.request_id] = f"this model is not blended: {self.gate.reason}"

    def step_begins(self, tokens: int) -> None:
        """Measure the step of ``tokens`` that follows, if it says what ordinary prefill takes."""
        measured = self._blends is not None and tokens >= min(LEAST_PREFILL, self._step_tokens)
        self._prefill = (tokens, self._blends.clock.mark()) if measured and self._blends is not None else None

    def step_ended(self) -> None:
        """Go on with the blends behind a step; its tokens are sampled and on their way."""
        if self._blends is not None and self._prefill is not None:
            self._blends.clock.add(PREFILL, *self._prefill)
        self.blend()

    def blend(self) -> None:
        """Go on with the waiting blends: while streams run as long as a step of prefill takes, else until one is complete."""
        if self._blends is not None:
            self._blends.advance(None if self._step.idle else Allowance(self._step.pace, self._step_tokens))

    def take_finished(self, aborted: set[str]) -> tuple[set[str], set[str]]:
        """Return the requests whose blends ended since the last call, and those of them that failed.

        The blends of ``aborted`` requests end at once.
        """
        for request_id in aborted:
            self._parts.pop(request_id, None)
        refused = set(self._refused)
        if self._blends is None:
            return refused, refused
        self._blends.abort(aborted)
        return self._blends.take_ended()

    def take_results(self) -> WorkerMeta | None:
        """Return what the ended blends did, once."""
        if self._blends is not None:
            return self._blends.take_results()
        refused, self._refused = self._refused, {}
        return WorkerMeta(failed=refused) if refused else None

    def save(self, saves: Sequence[Save]) -> None:
        """Copy prompts out of the paged cache and hand them to the writer."""
        for save in saves:
            tokens = save.token_ids[save.start :] if save.start or not self._entries.header_ids else ()
            name = receipt(self._entries.own_key(tokens), save.rank)
            if not self.gate.passed or self._paged is None:
                self._written[name] = f"not blended: {self.gate.reason}"
                continue
            try:
                if not save.complete:
                    self._parts.setdefault(save.request_id, []).append((save, self._part(save)))
                    continue
                kv = self._ranked(tokens, save) if save.rank else self._copied(save)
            except Exception as error:  # the engine and the other saves go on
                _log.exception("KV cannot be copied out")
                self._written[name] = f"it cannot be copied out ({type(error).__name__}: {error})"
                continue
            if kv is None:
                self._written[name] = "its stored KV is gone or damaged"
                continue
            while len(self._unwritten) >= _UNWRITTEN:
                self._unwritten.popleft().result()
            self._unwritten.append(self._writer.submit(self._write, name, tokens, kv, save.rank))

    def _part(self, save: Save) -> list[LayerKV]:
        assert self._paged is not None
        positions = torch.arange(save.begin, save.end)
        slots = [self._paged.slots(group, save.pages, positions) for group in range(len(save.pages))]
        return [self._paged.read(layer, slots[group]) for layer, group in enumerate(self._paged.group_of)]

    def _layers(self, save: Save) -> list[LayerKV]:
        """Return the KV of a complete prompt from ``start`` on, with the parts that earlier steps copied out."""
        parts = [*self._parts.pop(save.request_id, ()), (save, self._part(save))]
        edges = [save.start, *(part.end for part, _ in parts)]
        if [part.begin for part, _ in parts] != edges[:-1]:
            raise RuntimeError(f"not all tokens from {save.start} to {save.end} were copied out")
        return [join_tokens(layer) for layer in zip(*(layers for _, layers in parts), strict=True)]

    def _copied(self, save: Save) -> ChunkKV:
        return ChunkKV([LayerKV(x.k.cpu(), x.v.cpu()) for x in self._layers(save)], save.start)

    def _ranked(self, tokens: tuple[int, ...], save: Save) -> ChunkKV | None:
        """Return a chunk's stored KV with its static deviation; None where a rank has not all of it."""
        assert self._paged is not None
        assert self._rope is not None
        alone, parts = None, None
        try:
            stored = self._entries.get(tokens, self._paged.num_layers, self._paged.kv_heads)
            alone = None if stored is None else read_whole(stored)
            if alone is not None:
                parts = static_parts(alone, self._layers(save), save.start, self._rope)
        except Exception:  # the other ranks wait for this one's vote
            _log.exception("A chunk's tokens cannot be ranked")
        if not all_ranks(parts is not None):
            return None
        assert alone is not None
        assert parts is not None
        return ChunkKV(alone.layers, alone.start, static=Distances.of(sum_over_ranks(parts)).mean())

    def _write(self, name: str, tokens: tuple[int, ...], kv: ChunkKV, replace: bool) -> None:
        try:
            self._written[name] = "" if self._entries.put(tokens, kv, replace) else "it does not fit the store's budget"
        except StoreError as error:
            self._written[name] = str(error)
        except Exception as error:  # a chunk without a receipt would be waited for in vain
            _log.exception("Stored KV cannot be written")
            self._written[name] = f"it cannot be written ({type(error).__name__}: {error})"

    def measured(self) -> dict[str, tuple[float, float]]:
        """Return tokens and seconds of each kind of work, from the start on."""
        return {} if self._blends is None else self._blends.clock.totals

    def take_written(self) -> dict[str, str]:
        """Return the receipts since the last call: an empty string, or why an entry is not in the store."""
        written: dict[str, str] = {}
        for name in list(self._written):
            written[name] = self._written.pop(name)
        return written

    def close(self) -> None:
        """Finish what is being written."""
        self._writer.shutdown(wait=True)


def _gate(paged: PagedModel) -> tuple[GateReport, Rope | None]:
    """Run the parity gate with the kernels, where every rank has them; without, if the model does not pass it with them."""
    kernels = paged.find_kernels()
    for chosen in (kernels, None) if all_ranks(kernels is not None) else (None,):
        paged.kernels = chosen
        report, rope = run_gate(PagedSubject(paged))
        if all_ranks(report.passed):
            break
        report = GateReport(False, report.reason or "another rank failed it")
        if chosen is not None:
            _log.warning(
                "Blends do without the kernels for the GPU: the parity gate fails with them (%s)", report.reason
            )
    return report, rope
