"""Implements the connector's half in vLLM's workers, which runs blends between steps and saves precomputed prompts."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from cacheblend_rag.blending.costs import Computed
from cacheblend_rag.blending.gate import GateReport, run_gate
from cacheblend_rag.blending.rope import Rope
from cacheblend_rag.engines.entries import Entries
from cacheblend_rag.engines.models import why_not_blendable
from cacheblend_rag.engines.vllm.attention import Kernels
from cacheblend_rag.engines.vllm.blends import BlendQueue, ChunkWriter
from cacheblend_rag.engines.vllm.messages import Save, StepMeta, WorkerMeta
from cacheblend_rag.engines.vllm.pace import LEAST_PREFILL, PREFILL, Allowance, StepClock, Stopwatch
from cacheblend_rag.engines.vllm.paged import PagedModel
from cacheblend_rag.engines.vllm.pages import page_groups, unknown_kinds
from cacheblend_rag.engines.vllm.saving import Saver
from cacheblend_rag.engines.vllm.target import PagedSubject, all_ranks
from cacheblend_rag.engines.vllm.writing import writing_on
from cacheblend_rag.store import MemoryStore, TieredStore
from cacheblend_rag.store.kv import KVKey

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig

_log = logging.getLogger(__name__)


class RAMLog:
    """Records which entries come into the RAM of the first rank's worker and which leave, until the next report."""

    def __init__(self, store: TieredStore):
        """Record the changes in the RAM tiers of ``store``."""
        self._lock = threading.Lock()
        self._changes: dict[KVKey, int] = {}
        for tier in store.tiers:
            if isinstance(tier, MemoryStore):
                tier.tell_changes(self._note)

    def _note(self, key: KVKey, nbytes: int) -> None:
        with self._lock:
            self._changes[key] = nbytes

    def take(self) -> dict[KVKey, int]:
        """Return the bytes in RAM of every key that has changed since the last call, 0 for a key that has left."""
        with self._lock:
            changes, self._changes = self._changes, {}
        return changes


class WorkerSide:
    """Runs the blends and saves of one worker; only the worker's thread calls this class."""

    def __init__(
        self,
        entries: Entries,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        step_tokens: float,
        ram: RAMLog | None = None,
    ):
        """Prepare for :meth:`bind`; while requests stream, blends take per step the time of ``step_tokens`` of prefill.

        ``ram`` records the changes to report; only the first rank has one.
        """
        self.kv_caches: dict[str, torch.Tensor] = {}
        self._entries, self._step_tokens, self._ram = entries, step_tokens, ram
        self._vllm_config, self._kv_cache_config = vllm_config, kv_cache_config
        self.gate = GateReport(False, "the parity gate has not run")
        self._paged: PagedModel | None = None
        self._rope: Rope | None = None
        self._page_lock: Callable[[], None] | None = None
        self._step = StepMeta()
        self._prefill: tuple[int, float, Any] | None = None
        self._blends, self.saver = BlendQueue(entries), Saver(entries)

    def bind(self, model: Any, device: torch.device) -> None:
        """Set the model and run the parity gate. Any error refuses the model: vLLM then prefills all prompts."""
        refusal = _refusal(partial(self._wrap, model, device))
        if refusal is None:
            refusal = _refusal(self._pass_gate)
        if refusal is None:
            refusal = _refusal(partial(self._begin, device))
        if refusal is not None:
            self.gate = replace(self.gate, passed=False, reason=refusal)
            self._paged = None

    def _wrap(self, model: Any, device: torch.device) -> str | None:
        """Wrap the model; return why it cannot be blended."""
        if (refusal := why_not_in_vllm(self._vllm_config, self._kv_cache_config)) is not None:
            return refusal
        if self.kv_caches.keys() - {name for g in self._kv_cache_config.kv_cache_groups for name in g.layer_names}:
            return "some of its layers use the KV of others"
        paged = PagedModel(model, device, self._vllm_config, self._kv_cache_config, self.kv_caches)
        if paged.kernel_block_size != paged.block_size:
            return (
                f"its attention kernel has pages of {paged.kernel_block_size} tokens, vLLM's scheduler blocks of "
                f"{paged.block_size}: start it with --block-size {paged.kernel_block_size}"
            )
        self._paged = paged
        return None if paged.layout_is_known() else "this attention backend lays its KV cache out in an unknown way"

    def _pass_gate(self) -> str | None:
        assert self._paged is not None
        begin = time.monotonic()
        self.gate, self._rope = _gate(self._paged, self._entries.store.codecs)
        _log.info("The parity gate took %.1f s.", time.monotonic() - begin)
        return None if self.gate.passed else self.gate.reason

    def _begin(self, device: torch.device) -> None:
        assert self._paged is not None and self._rope is not None
        self._paged.graphs = self._paged.find_graphs(all_ranks)
        self.saver.bind(self._paged, self._rope)
        self._page_lock = partial(self._entries.store.page_lock_for, device)
        chunk_writer, writer = None, self._entries.writer
        if writer is not None:
            writing = writing_on(self._paged.model, writer, self._paged.dtype, device)
            chunk_writer = ChunkWriter(writing, partial(self.saver.save, refusal=""))
        self._blends.bind(self._paged, self._rope, StepClock(device), chunk_writer)

    def attention_begins(self, layer_name: str) -> None:
        """See :meth:`PagedModel.attention_begins`."""
        if self._paged is not None:
            self._paged.attention_begins(layer_name)

    def take(self, step: StepMeta) -> None:
        """Queue the new blends of ``step``; :meth:`blend` runs them once the step has been computed."""
        self._step = step
        if self._page_lock is not None:  # page-locking during vLLM's graph captures breaks the captures
            page_lock, self._page_lock = self._page_lock, None
            page_lock()
        for load in step.loads:
            if self.gate.passed:
                self._blends.add(load)
            else:
                self._blends.refuse(load.request_id, f"this model is not blended: {self.gate.reason}")

    def step_begins(self, output: SchedulerOutput) -> None:
        """Start to measure the next step if the step has enough tokens to measure ordinary prefill."""
        tokens, self._prefill = output.total_num_scheduled_tokens, None
        if self.gate.passed and tokens >= min(LEAST_PREFILL, self._step_tokens):
            self._prefill = tokens, _context(output), self._blends.clock.mark()

    def step_ended(self) -> None:
        """End the measurement of a step, whose tokens are already sampled, and advance the blends."""
        if self._prefill is not None:
            (tokens, context, begin), watch = self._prefill, Stopwatch()
            self._blends.clock.add(PREFILL, tokens, begin, watch)
            self._blends.clock.complete(watch, Computed(tokens, context, 0.0))
            self._prefill = None
        self.blend()

    def blend(self) -> None:
        """Advance the blends, for the time of a prefill step while requests stream, else until one blend completes."""
        allowance = None if self._step.idle else Allowance(self._step.pace, self._step_tokens)
        self._blends.advance(allowance, self._step.held)

    def take_finished(self, aborted: set[str]) -> tuple[set[str], set[str]]:
        """Return the requests whose blends ended since the last call, and the requests whose blends failed.

        The blends of ``aborted`` requests end at once.
        """
        for request_id in aborted:
            self.saver.drop(request_id)
        self._blends.abort(aborted)
        return self._blends.take_ended()

    def take_results(self) -> WorkerMeta | None:
        """Return the results of blends that ended since the last call, and the changes in RAM; None without results."""
        results = self._blends.take_results()
        if self._ram is not None:
            results.held = self._ram.take()
        return results if results else None

    def save(self, saves: Sequence[Save]) -> None:
        """See :meth:`Saver.save`."""
        self.saver.save(saves, "" if self.gate.passed else self.gate.reason)

    def measured(self) -> dict[str, tuple[float, float]]:
        """Return tokens and seconds of each kind of work since the start."""
        return self._blends.clock.totals

    def close(self) -> None:
        """Wait until ended blends are finished and pending entries are written."""
        self._blends.close()
        self.saver.close()


def _context(output: SchedulerOutput) -> float:
    """Return the mean context of a step's tokens, as :class:`~cacheblend_rag.blending.costs.Computed` defines it.

    Tokens from ``begin`` to ``end`` attend to ``(begin + end) / 2`` tokens on average, tokens of a whole prompt to half
    the prompt's length.
    """
    begins = {request.req_id: request.num_computed_tokens for request in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    begins.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    counts = output.num_scheduled_tokens
    pairs = sum(count * (2 * begins.get(name, 0) + count) for name, count in counts.items())
    return pairs / max(1, sum(counts.values()))


def why_not_in_vllm(config: VllmConfig, kv_cache_config: KVCacheConfig) -> str | None:
    """Return, in words for a user, why this model in this configuration cannot be blended; None without a reason."""
    model, parallel = config.model_config, config.parallel_config
    text = model.hf_text_config
    kinds = unknown_kinds(kv_cache_config)
    sizes = {group.block_size for group in page_groups(kv_cache_config)} if not kinds else set()
    reasons = {
        "pipeline parallelism is on": parallel.pipeline_parallel_size > 1,
        "context parallelism is on": getattr(parallel, "decode_context_parallel_size", 1) > 1
        or getattr(parallel, "prefill_context_parallel_size", 1) > 1,
        # All ranks of a mixture of experts must run every pass; a blend runs on one rank.
        "it is a mixture of experts and data parallelism is on": parallel.data_parallel_size > 1 and bool(model.is_moe),
        "LoRA adapters are enabled": config.lora_config is not None,
        "speculative decoding is on": config.speculative_config is not None,
        "it uses multi-dimensional RoPE": bool(getattr(model, "uses_mrope", False)),
        "its multi-head latent attention (MLA) keeps no per-head keys": bool(model.use_mla),
        "its KV cache is quantised": config.cache_config.cache_dtype not in {"auto", str(model.dtype).split(".")[-1]},
        "its weights come to the device layer by layer (--offload-group-size; --cpu-offload-gb without UVA)": _moves(),
        "it has no KV cache": not kv_cache_config.kv_cache_groups,
        f"its KV cache is of a kind that is not blended ({', '.join(kinds)})": bool(kinds),
        "the groups of its KV cache have blocks of different sizes": bool(sizes - {config.cache_config.block_size}),
    }
    return next((reason for reason, holds in reasons.items() if holds), None) or why_not_blendable(text)


def _moves() -> bool:
    """Return whether the model's forward moves weights: a pass that stops early leaves wrong weights behind."""
    from vllm.model_executor.offloader import NoopOffloader, UVAOffloader, get_offloader

    offloader = get_offloader()
    if isinstance(offloader, UVAOffloader):
        return bool(offloader.cpu_offload_bytes) and not offloader.uva_offloading
    return not isinstance(offloader, NoopOffloader)


def _refusal(step: Callable[[], str | None]) -> str | None:
    """Run one step of binding, as all ranks do; return why this rank or another rank failed, or None."""
    try:
        refusal = step()
    except Exception as error:  # of a foreign model, vLLM's metadata or a driver; no error may end the engine
        refusal = f"it cannot be prepared for blending ({type(error).__name__}: {error})"
        _log.warning("This model is not blended: %s", refusal, exc_info=_log.isEnabledFor(logging.DEBUG))
    return refusal if all_ranks(refusal is None) or refusal is not None else "another rank cannot blend it"


def _gate(paged: PagedModel, codecs: Sequence[str]) -> tuple[GateReport, Rope | None]:
    """Run the parity gate with the kernels if every rank has kernels; if the gate fails, run it without the kernels."""
    kernels = _kernels(paged)
    for chosen in (kernels, None) if all_ranks(kernels is not None) else (None,):
        paged.kernels = chosen
        report, rope = run_gate(PagedSubject(paged), codecs)
        if all_ranks(report.passed):
            break
        report = GateReport(False, report.reason or "another rank failed it")
        if chosen is not None:
            _log.warning(
                "Blends do without the kernels for the GPU: the parity gate fails with them (%s)", report.reason
            )
    return report, rope


def _kernels(paged: PagedModel) -> Kernels | None:
    try:
        return paged.find_kernels()
    except Exception as error:  # an error of a compiler or a driver
        _log.warning("Blends do without the kernels for the GPU: %s: %s", type(error).__name__, error)
        return None
