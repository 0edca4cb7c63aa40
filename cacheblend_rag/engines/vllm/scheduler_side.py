"""Decides in vLLM's scheduler which requests are blended, and how many tokens each blend provides."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cacheblend_rag.blending.controller import Choice, choose, needs_static
from cacheblend_rag.blending.costs import Computed
from cacheblend_rag.blending.outcome import PromptOutcome
from cacheblend_rag.blending.plan import BlendPlan, Origin
from cacheblend_rag.blending.trace import Trace
from cacheblend_rag.engines.entries import Entries, SideBySide
from cacheblend_rag.engines.vllm.messages import (
    PARAMS,
    BlendJob,
    FinishReport,
    LoadOrder,
    Save,
    SaveJob,
    StepMeta,
    WorkerMeta,
    read_params,
    to_params,
)
from cacheblend_rag.engines.vllm.pace import Pace
from cacheblend_rag.engines.vllm.pages import PageGroup, PageLender
from cacheblend_rag.engines.vllm.versions import key_blocks
from cacheblend_rag.errors import InputError
from cacheblend_rag.store.base import EntryInfo
from cacheblend_rag.store.kv import ChunkKV, KVKey, StoredKV

if TYPE_CHECKING:
    import torch
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

_log = logging.getLogger(__name__)
_PRESENT = ChunkKV((), 0)  # placeholder for an entry that only the workers read
# Most checks of a request, about one in each engine step, while the request waits for pages.
_PATIENCE = 1000
# Most static deviations that the scheduler caches.
_MOST_STATIC = 4096
# Most measured computations that wait for the report of a finished request; the oldest are dropped first.
_MEASURED = 64


class Whereabouts:
    """Finds, in the scheduler, an entry's tier and size as the first rank's worker would, without reading the entry.

    An entry in a worker's RAM is known from the worker's next report on. If the entry has left the RAM meanwhile, the
    worker reads another tier.
    """

    def __init__(self) -> None:
        self._held: dict[KVKey, int] = {}
        self._lock = threading.Lock()  # look-ups run beside the engine's steps
        self._static: OrderedDict[tuple[KVKey, int], torch.Tensor] = OrderedDict()

    def take(self, changes: Mapping[KVKey, int]) -> None:
        """Apply the changes that :meth:`RAMLog.take` reported."""
        self._held |= changes
        for key in [key for key, nbytes in changes.items() if not nbytes]:
            del self._held[key]

    def find(self, entries: Entries, token_ids: Sequence[int], static: bool = False) -> StoredKV | None:
        """Return a placeholder for one of ``entries``, with size and tier but without layers; their store has no RAM.

        With ``static``, the placeholder has the entry's static deviation. Return None if a rank would find no entry.
        """
        found = entries.entry(token_ids)
        if found is None:
            return None
        held = next((n for key in entries.read_keys(token_ids) if (n := self._held.get(key))), 0)
        deviation = self._static_of(found, entries, token_ids) if static else None
        kv = ChunkKV((), 0, "ram" if held else found.tier, deviation)
        kv.num_tokens, kv.stored_nbytes = len(token_ids) or len(entries.header_ids), held or found.nbytes
        return kv

    def _static_of(self, found: EntryInfo, entries: Entries, token_ids: Sequence[int]) -> torch.Tensor | None:
        """Return the static deviation of the entry ``found``, from a cache of the most recently used if possible."""
        key = found.key, found.nbytes  # an entry without static deviation is smaller
        with self._lock:
            known = self._static.pop(key, None)
        if known is None and token_ids:
            known = entries.static_deviation(token_ids)
        if known is not None:
            with self._lock:
                self._static[key] = known
                while len(self._static) > _MOST_STATIC:
                    self._static.popitem(last=False)
        return known


class _Tracked:
    """Holds the state of a request that asked for a blend or a save, until the request ends."""

    def __init__(self, job: BlendJob | SaveJob | None, reason: str = ""):
        self.job, self.reason = job, reason
        self.trace = Trace() if isinstance(job, BlendJob) and job.trace else None
        self.looking: Future[BlendPlan] | None = None
        self.found: BlendPlan | None = None
        self.plan: BlendPlan | None = None
        self.choice: Choice | None = None
        self.chosen_behind, self.blend_s = -1, 0.0
        self.blended_from: int | None = None  # first position whose KV may be approximate, in vLLM's prefix cache, too
        self.failed = False
        self.blended: PromptOutcome | None = None
        self.end = 0
        self.waited = 0
        self.saved = job.start if isinstance(job, SaveJob) else 0  # end of the part copied out

    def exact_behind(self, kept: int) -> bool:
        """Return whether vLLM's prefix cache holds exact KV of the first ``kept`` tokens."""
        return self.blended_from is None or kept <= self.blended_from

    def outcome(self, prompt_tokens: int) -> PromptOutcome:
        """Return the prompt's outcome at its end, without the tokens that vLLM's prefix cache held behind the plan."""
        plan = self.plan or BlendPlan(prompt_tokens, (), (), self.reason)
        if self.failed:
            plan = plan.without(plan.spans, self.reason)
        # Without a plan, all tokens that vLLM finds in its prefix cache count as prefix cache tokens, however many.
        kept = self.chosen_behind if self.chosen_behind >= 0 else prompt_tokens
        found = self.blended or plan.behind_kept(kept, self.exact_behind(kept)).outcome()
        decided = self.choice if not self.failed else None
        return replace(
            found,
            mode="blend" if plan.uses_stored_kv else "prefill",
            reason=self.reason,
            usage=replace(found.usage, kept_tokens=kept),
            expected_s=None if decided is None else decided.expected_s,
        )


class SchedulerSide:
    """Implements the scheduler's half of the connector. Runs in the scheduler's thread, and reads no KV."""

    def __init__(
        self,
        entries: Entries,
        groups: Sequence[PageGroup],
        longest: int | None = None,
        hash_block_size: Callable[[], int | None] = lambda: None,
    ):
        """Look up chunks in ``entries`` for a KV cache of ``groups``; prompts longer than ``longest`` are not blended.

        ``hash_block_size`` returns the tokens per block hash of a request, or None if this vLLM reports no number.
        """
        self._entries, self._longest, self._hash_block_size = entries, longest, hash_block_size
        self._lender = PageLender(groups)
        self._loses_pages = any(group.window for group in groups)
        self._tracked: dict[str, _Tracked] = {}
        self._loads: list[LoadOrder] = []
        self._saving: dict[str, tuple[Request, SaveJob]] = {}
        self._pace = Pace()
        self._where = Whereabouts()
        self._computed: deque[Computed] = deque(maxlen=_MEASURED)
        self._under_way: dict[str, float] = {}
        self._uncached: list[Request] = []
        self._deferred = Counter[str]()
        self.held: Collection[str] = ()  # namespaces whose blends pause while other namespaces' requests are computed
        self.shared = False  # whether another namespace may send a request at any moment
        # A look-up on another machine takes a round trip, or until a deadline; the engine's steps go on meanwhile.
        remote = entries.store.remote
        self._lookups = ThreadPoolExecutor(1, thread_name_prefix="cacheblend-lookup") if remote else None

    def bind(self, pool: BlockPool) -> None:
        """Set vLLM's block pool, to lend pages from."""
        self._lender.bind(pool)

    def new_request(self, request: Request) -> None:
        """Read the job of a request; a request with a malformed job is served by ordinary prefill."""
        try:
            job = read_params(request.kv_transfer_params, request.num_prompt_tokens)
        except InputError as error:
            _log.warning("Request %s is served by ordinary prefill: %s", request.request_id, error)
            self._tracked[request.request_id] = _Tracked(None, str(error))
            return
        if job is None:
            return
        found: tuple[Origin, ...] = ()
        if isinstance(job, BlendJob):
            # Blended KV is approximate: vLLM's prefix cache may serve it only to prompts that are blended alike so far.
            found = job.origins(tuple(request.prompt_token_ids or ()), len(self._entries.header_ids))
            if not key_blocks(request, [(origin.start, origin.key) for origin in found], self._hash_block_size()):
                self._tracked[request.request_id] = _Tracked(
                    None, "this vLLM's prefix cache cannot hold blended KV apart"
                )
                return
        tracked = self._tracked[request.request_id] = _Tracked(job)
        tracked.blended_from = found[0].start if found else None
        if isinstance(job, SaveJob) and job.written:
            # A KV writer's KV must serve no prompt from vLLM's prefix cache. Where layers lose pages, the KV must serve
            # no other request at all: some pages would be missing.
            own = request.request_id if self._loses_pages else "written by the KV writer"
            if not key_blocks(request, [(0, own)], self._hash_block_size()):
                tracked.failed, tracked.reason = True, "this vLLM's prefix cache cannot hold what is written apart"

    def matched_tokens(self, request: Request, computed: int) -> tuple[int | None, bool]:
        """Return how many tokens behind the first ``computed`` a blend provides, and if the blend runs between steps.

        A count of None makes vLLM ask again in its next step.
        """
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.failed:
            return 0, False
        if isinstance(tracked.job, SaveJob):
            tracked.end = request.num_prompt_tokens - 1 if tracked.job.written else computed
            if not self._lender.keeps(tracked.saved, computed):
                # The prefix cache lacks pages that must be copied out: vLLM computes this prompt again.
                self._uncached.append(request)
                return None, False
            return self._behind(tracked, computed, request.num_prompt_tokens)
        if tracked.job is None:
            return 0, False
        if tracked.found is None:
            tracked.found = self._planned(request, tracked, tracked.job)
            if tracked.found is None:
                return None, False
        if tracked.chosen_behind != computed:
            self._choose(tracked, tracked.found, tracked.job, computed)
        assert tracked.plan is not None
        # vLLM computes the last token itself, also in front of an answer to be scored, since vLLM needs its logits.
        asked = request.num_prompt_tokens - tracked.job.unasked
        tracked.end = min(max((span.end for span in tracked.plan.spans), default=0), asked - 1)
        return self._behind(tracked, computed, request.num_prompt_tokens)

    def _behind(self, tracked: _Tracked, computed: int, prompt_tokens: int) -> tuple[int | None, bool]:
        """Return the result of :meth:`matched_tokens`; the worker's part of the prompt ends at ``tracked.end``."""
        count = max(0, tracked.end - computed)
        if count and (waits := self._without_pages(tracked, computed, prompt_tokens)) is not None:
            return (None if waits else 0), False
        return count, count > 0

    def _choose(self, tracked: _Tracked, found: BlendPlan, job: BlendJob, computed: int) -> None:
        """Let the loading controller, if requested, decide about the stored KV behind the first ``computed`` tokens."""
        tracked.plan, tracked.choice, tracked.chosen_behind = found, None, computed
        rest = found.within(computed, found.num_tokens)
        if job.costs is not None and rest.uses_stored_kv:
            waits_s = sum(self._under_way.values())
            tracked.choice = choose(rest, job.costs, job.options, waits_s)
            tracked.blend_s = tracked.choice.expected_s - waits_s
            tracked.plan = tracked.choice.applied_to(found)
        tracked.reason = tracked.plan.reason

    def _without_pages(self, tracked: _Tracked, start: int, prompt_tokens: int) -> bool | None:
        """Return True to wait for pages of a blend from ``start`` on, False not to blend, None if pages are free."""
        if not self._lender.sees_back(start, tracked.end):
            tracked.reason = (
                "the beginning of the prompt was in vLLM's prefix cache; the rest was computed, behind its windows"
            )
            if (plan := tracked.plan) is not None:
                behind = [span for span in plan.spans if span.end > start]
                tracked.plan = plan.without(behind, tracked.reason)
            return False
        reason = self._lender.never(start, tracked.end, prompt_tokens)
        if reason is None:
            if self._lender.ready(start, tracked.end, prompt_tokens):
                return None
            # A blend soon returns its borrowed pages; the time when other requests free pages is unknown.
            tracked.waited += not self._lender.lends
            if tracked.waited < _PATIENCE:
                return True
            reason = "vLLM's KV cache was too full for the layers with a window to be blended"
        tracked.failed, tracked.reason = True, reason
        return False

    def _planned(self, request: Request, tracked: _Tracked, job: BlendJob) -> BlendPlan | None:
        """Return the plan of a request; None while a thread makes the plan beside the engine's steps."""
        if self._lookups is None:
            return self._plan(request, job, tracked.trace)
        if tracked.looking is None:
            tracked.looking = self._lookups.submit(self._plan, request, job, tracked.trace)
        return tracked.looking.result() if tracked.looking.done() else None

    def _plan(self, request: Request, job: BlendJob, trace: Trace | None) -> BlendPlan:
        begin = time.perf_counter()
        entries = self._entries.within(job.namespace)

        def lookup(source: Entries, token_ids: Sequence[int]) -> StoredKV | None:
            if job.costs is not None:
                return self._where.find(source, token_ids, needs_static(job.options))
            return _PRESENT if source.contains(token_ids) else None

        prompt = job.prompt(tuple(request.prompt_token_ids or ()))
        look = SideBySide(lookup, entries.wanted(prompt), entries.store.remote)
        plan = entries.plan(prompt, look, job.options.reuse, self._longest)
        if trace is not None:
            plan.record(trace, begin)
        return plan

    def allocated(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        """Record the blocks that a blend fills, or that a precomputed prompt is read from."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return
        if isinstance(tracked.job, SaveJob) and not tracked.job.written:
            self._saving[request.request_id] = request, tracked.job
        elif external > 0 and tracked.job is not None:
            ids, start = tuple(request.prompt_token_ids or ()), tracked.end - external
            pages = self._lender.complete(request.request_id, blocks.get_block_ids(), start)
            exact, name = tracked.exact_behind(start), request.request_id
            self._loads.append(LoadOrder(name, ids, start, tracked.end, pages, tracked.job, tracked.choice, exact))
            self._deferred[tracked.job.namespace.name] += external
            if tracked.choice is not None:
                self._under_way[request.request_id] = tracked.blend_s

    def step(self, output: SchedulerOutput, blocks: KVCacheManager) -> StepMeta:
        """Return the workers' tasks: new blends, and prompts to copy that this step completes or whose pages may go."""
        idle = output.total_num_scheduled_tokens == 0 and not self.shared
        held = {name for name, each in self._tracked.items() if each.job and each.job.namespace.name in self.held}
        meta = StepMeta(self._loads, idle=idle, pace=self._pace.seconds_per_token, held=held)
        self._loads = []
        computed = {r.req_id: r.num_computed_tokens for r in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id, (request, job) in list(self._saving.items()):
            if request_id not in computed:
                continue
            ids, begin = tuple(request.prompt_token_ids or ()), self._tracked[request_id].saved
            end = min(computed[request_id] + output.num_scheduled_tokens.get(request_id, 0), len(ids))
            # Layers with a window lose pages while vLLM computes the prompt: each step's part is then copied out.
            if begin < end and (end == len(ids) or self._loses_pages):
                pages = tuple(map(tuple, blocks.get_block_ids(request_id)))
                meta.saves.append(Save(request_id, ids, pages, begin, end, job))
                self._tracked[request_id].saved = end
            if end == len(ids):
                del self._saving[request_id]
        for request in self._uncached:
            request.skip_reading_prefix_cache = True
        self._uncached = []
        return meta

    def worker_output(self, output: KVConnectorOutput) -> None:
        """Process the workers' results. A failed blend is not tried again: vLLM prefills the request."""
        self._lender.take_back(output.finished_recving or ())
        for request_id in output.finished_recving or ():
            self._under_way.pop(request_id, None)
        meta = output.kv_connector_worker_meta
        if not isinstance(meta, WorkerMeta):
            return
        self._pace.take(meta.times)
        self._where.take(meta.held)
        self._computed.extend(meta.computed)
        for request_id, blended in meta.done.items():
            if tracked := self._tracked.get(request_id):
                tracked.blended, tracked.reason = blended, blended.reason
                if tracked.trace is not None and request_id in meta.traces:
                    tracked.trace.merge(meta.traces[request_id])
        for request_id, reason in meta.failed.items():
            if tracked := self._tracked.get(request_id):
                tracked.failed, tracked.reason = True, reason

    def take_promised(self) -> Counter[str]:
        """Return, by namespace, how many deferred tokens the blends ordered since the last call will provide."""
        deferred, self._deferred = self._deferred, Counter()
        return deferred

    def close(self) -> None:
        """Stop looking up entries."""
        if self._lookups is not None:
            self._lookups.shutdown(wait=False, cancel_futures=True)

    def finished(self, request: Request) -> dict[str, Any] | None:
        """Drop the state of a request; return the ``kv_transfer_params`` of its output."""
        self._saving.pop(request.request_id, None)
        self._under_way.pop(request.request_id, None)
        if any(load.request_id == request.request_id for load in self._loads):
            self._loads = [load for load in self._loads if load.request_id != request.request_id]
            self._lender.take_back([request.request_id])
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return None
        if isinstance(tracked.job, SaveJob):
            # If vLLM itself computed the KV writer's tokens, no KV was saved.
            refused = tracked.job.written and tracked.blended is None
            return (
                {PARAMS: {"refused": tracked.reason or "vLLM did not leave it to the KV writer"}} if refused else None
            )
        measured = tuple(self._computed)
        self._computed.clear()
        report = FinishReport(tracked.outcome(request.num_prompt_tokens), measured, self._entries.store.out())
        if tracked.trace is not None:
            report = replace(report, trace=tracked.trace.events())
        return to_params(report)
