"""The connector's half in vLLM's scheduler: which requests are blended, and how many of their tokens that provides."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from cacheblend_rag.blending.plan import BlendPlan, make_plan
from cacheblend_rag.engines.entries import Entries
from cacheblend_rag.engines.vllm.messages import (
    PARAMS,
    Blended,
    BlendJob,
    Load,
    Save,
    SaveJob,
    StepMeta,
    WorkerMeta,
    read_params,
)
from cacheblend_rag.engines.vllm.pace import Pace
from cacheblend_rag.errors import InputError
from cacheblend_rag.store.kv import ChunkKV, StoredKV

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

_log = logging.getLogger(__name__)
_PRESENT = ChunkKV((), 0)  # stands for an entry that only the workers will read


class _Tracked:
    """A request of ours until it ends."""

    def __init__(self, job: BlendJob | SaveJob | None, reason: str = ""):
        self.job, self.reason = job, reason
        self.plan: BlendPlan | None = None
        self.failed = False
        self.blended: Blended | None = None
        self.end = 0


class SchedulerSide:
    """Runs in the scheduler's thread; reads no KV."""

    def __init__(self, entries: Entries):
        """Look for chunks in ``entries``."""
        self._entries = entries
        self._tracked: dict[str, _Tracked] = {}
        self._loads: list[Load] = []
        self._saving: dict[str, tuple[Request, SaveJob]] = {}
        self._pace = Pace()

    def new_request(self, request: Request) -> None:
        """Note what the client wants. Malformed options make an ordinary prefill."""
        try:
            job = read_params(request.kv_transfer_params, request.num_prompt_tokens)
        except InputError as error:
            _log.warning("Request %s is served by ordinary prefill: %s", request.request_id, error)
            self._tracked[request.request_id] = _Tracked(None, str(error))
            return
        if job is not None:
            self._tracked[request.request_id] = _Tracked(job)

    def matched_tokens(self, request: Request, computed: int) -> tuple[int, bool]:
        """Return how many tokens behind the first ``computed`` a blend provides, and that it runs between steps."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or not isinstance(tracked.job, BlendJob) or tracked.failed:
            return 0, False
        if tracked.plan is None:
            tracked.plan = self._plan(request, tracked.job)
            tracked.reason = tracked.plan.reason
        spans = (*tracked.plan.exact, *tracked.plan.stale)
        # vLLM computes the last token itself: it wants its logits.
        tracked.end = min(max((span.end for span in spans), default=0), request.num_prompt_tokens - 1)
        count = max(0, tracked.end - computed)
        return count, count > 0

    def _plan(self, request: Request, job: BlendJob) -> BlendPlan:
        def lookup(token_ids: Any) -> StoredKV | None:
            return _PRESENT if self._entries.contains(token_ids) else None

        prompt = job.prompt(tuple(request.prompt_token_ids or ()))
        return make_plan(prompt, self._entries.header_ids, lookup, job.settings.reuse)

    def allocated(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        """Take note of the blocks that a blend is to fill, or that a precompute will be read from."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return
        if isinstance(tracked.job, SaveJob):
            self._saving[request.request_id] = request, tracked.job
        elif external > 0 and tracked.job is not None:
            ids = tuple(request.prompt_token_ids or ())
            self._loads.append(
                Load(
                    request.request_id,
                    ids,
                    tracked.end - external,
                    tracked.end,
                    tuple(blocks.get_block_ids()[0]),
                    tracked.job,
                )
            )

    def step(self, output: SchedulerOutput, blocks: KVCacheManager) -> StepMeta:
        """Return the workers' tasks: new blends, and precomputed prompts that this step completes."""
        idle = output.total_num_scheduled_tokens == 0
        meta = StepMeta(loads=self._loads, idle=idle, pace=self._pace.seconds_per_token)
        self._loads = []
        computed = {r.req_id: r.num_computed_tokens for r in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id, (request, job) in list(self._saving.items()):
            scheduled = output.num_scheduled_tokens.get(request_id, 0)
            if request_id in computed and computed[request_id] + scheduled >= request.num_prompt_tokens:
                ids = tuple(request.prompt_token_ids or ())
                meta.saves.append(Save(ids, job.start, tuple(blocks.get_block_ids(request_id)[0]), job.rank))
                del self._saving[request_id]
        return meta

    def worker_output(self, output: KVConnectorOutput) -> None:
        """Take the workers' results. A blend that failed is not tried again: vLLM prefills that request itself."""
        meta = output.kv_connector_worker_meta
        if not isinstance(meta, WorkerMeta):
            return
        self._pace.take(meta.times)
        for request_id, blended in meta.done.items():
            if tracked := self._tracked.get(request_id):
                tracked.blended, tracked.reason = blended, blended.reason
        for request_id, reason in meta.failed.items():
            if tracked := self._tracked.get(request_id):
                tracked.failed, tracked.reason = True, reason

    def finished(self, request: Request) -> dict[str, Any] | None:
        """Forget a request; return what its output shall say."""
        self._saving.pop(request.request_id, None)
        self._loads = [load for load in self._loads if load.request_id != request.request_id]
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None or isinstance(tracked.job, SaveJob):
            return None
        outcome: dict[str, Any] = {"reason": tracked.reason, "end": 0}
        if tracked.plan is not None:
            outcome["missing"] = [chunk.id for chunk in tracked.plan.missing]
            if tracked.plan.uses_stored_kv and not tracked.failed:
                outcome["end"] = tracked.end
        if tracked.blended is not None:
            b = tracked.blended
            outcome |= {
                "computed": b.computed,
                "recomputed": b.recomputed,
                "selection": b.selection,
                "policy": b.policy,
                "ratio": b.ratio,
                "load_s": b.load_s,
                "loaded_bytes": b.loaded_bytes,
                "blend_s": b.blend_s,
                "missing": list(b.missing),
                "unranked": list(b.unranked),
            }
        return {PARAMS: outcome}
