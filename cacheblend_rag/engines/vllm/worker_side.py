"""The connector's half in vLLM's workers: blends go on between engine steps, precomputed prompts are stored."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from cacheblend_rag.blending.fusor import FuseResult, fuse_stepwise
from cacheblend_rag.blending.gate import GateReport, run_gate
from cacheblend_rag.blending.loader import DamagedSpanError
from cacheblend_rag.blending.plan import BlendPlan, make_plan
from cacheblend_rag.blending.policies import policy
from cacheblend_rag.blending.rope import Rope
from cacheblend_rag.blending.static import Distances, static_parts
from cacheblend_rag.engines.entries import Entries
from cacheblend_rag.engines.vllm.blendable import why_not_in_vllm
from cacheblend_rag.engines.vllm.messages import Blended, Load, Save, WorkerMeta, receipt
from cacheblend_rag.engines.vllm.paged import PagedModel
from cacheblend_rag.engines.vllm.subject import PagedSubject
from cacheblend_rag.engines.vllm.target import PagedTarget, all_ranks, sum_over_ranks
from cacheblend_rag.errors import StoreError
from cacheblend_rag.store.kv import ChunkKV, LayerKV, StoredKV, join_tokens, read_whole

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_log = logging.getLogger(__name__)
# Precomputed entries that may wait in memory for the disk.
_UNWRITTEN = 16


class WorkerSide:
    """Owned by the connector of one worker; called from its thread alone."""

    def __init__(self, entries: Entries, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, step_tokens: float):
        """Wait for :meth:`bind`. A step in which streams run takes about ``step_tokens`` tokens of blending."""
        self.kv_caches: dict[str, torch.Tensor] = {}
        self._entries, self._step_tokens = entries, step_tokens
        self._vllm_config, self._kv_cache_config = vllm_config, kv_cache_config
        self.gate = GateReport(False, "the parity gate has not run")
        self._paged: PagedModel | None = None
        self._rope: Rope | None = None
        self._queue: deque[_Blend] = deque()
        self._ended: set[str] = set()
        self._results = WorkerMeta()
        self._failed: set[str] = set()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="cacheblend-store")
        self._unwritten: deque[Future[None]] = deque()
        self._written: dict[str, str] = {}
        self._parts: dict[str, list[list[LayerKV]]] = {}

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
        report, self._rope = run_gate(PagedSubject(paged))
        self.gate = report if all_ranks(report.passed) else GateReport(False, report.reason or "another rank failed it")

    def attention_begins(self, layer_name: str) -> None:
        """See :meth:`PagedModel.attention_begins`."""
        if self._paged is not None:
            self._paged.attention_begins(layer_name)

    def blend(self, loads: Sequence[Load], idle: bool) -> None:
        """Go on with the waiting blends: while streams run by a step's share, else until one is complete."""
        for load in loads:
            if self.gate.passed and self._paged is not None and self._rope is not None:
                self._queue.append(_Blend(load, self._paged, self._rope, self._entries))
            else:
                self._end(load.request_id, f"this model is not blended: {self.gate.reason}")
        budget = math.inf if idle else self._step_tokens
        while self._queue and budget > 0:
            blend = self._queue[0]
            try:
                cost = blend.advance()
            except Exception as error:
                # Whatever went wrong, the engine must live on: vLLM prefills this prompt as any other.
                _log.exception("The blend of request %s failed", blend.load.request_id)
                self._queue.popleft().close()
                self._end(blend.load.request_id, f"the blend failed ({type(error).__name__}: {error})")
                continue
            if cost is not None:
                budget -= cost
                continue
            self._queue.popleft().close()
            assert blend.result is not None
            self._results.done[blend.load.request_id] = blend.result
            self._ended.add(blend.load.request_id)
            if idle:
                break

    def _end(self, request_id: str, reason: str) -> None:
        self._results.failed[request_id] = reason
        self._ended.add(request_id)
        self._failed.add(request_id)

    def take_finished(self, aborted: set[str]) -> tuple[set[str], set[str]]:
        """Return the requests whose blends ended since the last call, and those of them that failed.

        A blend whose request was aborted ends at once: vLLM waits for it to free the blocks.
        """
        for request_id in aborted:
            self._parts.pop(request_id, None)
        for blend in [b for b in self._queue if b.load.request_id in aborted]:
            self._queue.remove(blend)
            blend.close()
            self._ended.add(blend.load.request_id)
        ended, failed = self._ended, self._failed
        self._ended, self._failed = set(), set()
        return ended, failed

    def take_results(self) -> WorkerMeta | None:
        """Return what the ended blends did, once."""
        results, self._results = self._results, WorkerMeta()
        return results if results.done or results.failed else None

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
                    self._parts.setdefault(save.request_id, []).append(self._part(save))
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
        parts = [*self._parts.pop(save.request_id, ()), self._part(save)]
        layers = [join_tokens(layer) for layer in zip(*parts, strict=True)]
        if (found := layers[0].k.shape[1]) != (wanted := len(save.token_ids) - save.start):
            raise RuntimeError(f"{found} of {wanted} tokens were copied out")
        return layers

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

    def take_written(self) -> dict[str, str]:
        """Return the receipts since the last call: an empty string, or why an entry is not in the store."""
        written: dict[str, str] = {}
        for name in list(self._written):
            written[name] = self._written.pop(name)
        return written

    def close(self) -> None:
        """Finish what is being written."""
        self._writer.shutdown(wait=True)


class _Blend:
    """One request's blend, advanced segment by segment."""

    def __init__(self, load: Load, paged: PagedModel, rope: Rope, entries: Entries):
        self.load = load
        self._paged, self._rope, self._entries = paged, rope, entries
        self.result: Blended | None = None
        self._begin = time.perf_counter()
        self._spans: list[StoredKV] = []
        self._steps = self._run()

    def advance(self) -> float | None:
        """Run one segment and return its cost in tokens; None once the blend is complete."""
        with torch.inference_mode():
            return next(self._steps, None)

    def close(self) -> None:
        """Let go of the stored KV."""
        self._steps.close()
        for kv in self._spans:
            kv.finish()

    def _run(self) -> Generator[float, None, None]:
        while True:
            plan = self._plan()
            try:
                fused = yield from self._fuse(plan)
            except DamagedSpanError as error:
                # Damaged is missing: the next plan computes it in place.
                if error.token_ids is not None:
                    self._entries.delete(error.token_ids)
                continue
            self.result = Blended(
                fused.computed_tokens,
                len(fused.recomputed),
                fused.selection_tokens,
                fused.policy,
                fused.ratio,
                fused.load_wait_s,
                fused.loaded_bytes,
                time.perf_counter() - self._begin,
                tuple(chunk.id for chunk in plan.missing),
                tuple(s.chunk.id for s in plan.stale if s.chunk is not None) if fused.unranked else (),
                plan.reason,
            )
            return

    def _fuse(self, plan: BlendPlan) -> Generator[float, None, FuseResult]:
        load, job = self.load, self.load.job
        self._paged.check_pages(load.pages, load.start, load.end)
        target = PagedTarget(self._paged, self._rope, load.token_ids, load.pages)
        part = plan.within(load.start, load.end)
        return fuse_stepwise(part, target, policy(job.settings.policy), job.ratio, job.schedule)

    def _plan(self) -> BlendPlan:
        def lookup(token_ids: Sequence[int]) -> StoredKV | None:
            try:
                kv = self._entries.get(token_ids, self._paged.num_layers, self._paged.kv_heads)
            except Exception:  # the other ranks wait for this one's vote
                _log.exception("Stored KV cannot be looked up; its chunk is computed in place")
                kv = None
            if kv is not None:
                self._spans.append(kv)
            return kv if all_ranks(kv is not None) else None

        prompt = self.load.job.prompt(self.load.token_ids)
        return make_plan(prompt, self._entries.header_ids, lookup, self.load.job.settings.reuse)
