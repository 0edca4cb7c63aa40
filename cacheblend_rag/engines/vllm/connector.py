"""Defines the KV connector that vLLM loads by name; `SchedulerSide` and `WorkerSide` implement the two halves."""

from __future__ import annotations

from copy import copy
from multiprocessing import parent_process
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from cacheblend_rag.engines.entries import Entries
from cacheblend_rag.engines.models import longest_blendable
from cacheblend_rag.engines.vllm.messages import StepMeta, WorkerMeta
from cacheblend_rag.engines.vllm.pages import page_groups
from cacheblend_rag.engines.vllm.scheduler_side import SchedulerSide
from cacheblend_rag.engines.vllm.starting import end_at_once, end_with, log_as_vllm
from cacheblend_rag.engines.vllm.versions import connector_output
from cacheblend_rag.engines.vllm.worker_side import RAMLog, WorkerSide
from cacheblend_rag.store import open_store
from cacheblend_rag.store.kv import ModelFingerprint, WrittenBy

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request
    from vllm.v1.worker.gpu_worker import Worker


class BlendConnector(KVConnectorBase_V1, SupportsHMA):
    """Blends chunks' stored KV into vLLM's paged cache. See docs/internals/vllm.md.

    Attributes:
        scheduler: The scheduler's half; only set in the scheduler.
        worker: The worker's half; only set in a worker.
    """

    scheduler: SchedulerSide
    worker: WorkerSide

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig):
        """Open the store named in the connector's configuration, for the scheduler or for a worker."""
        super().__init__(vllm_config, role, kv_cache_config)
        if parent_process() is not None:
            log_as_vllm()
            end_at_once()
        extra = self._kv_transfer_config.get_from_extra_config
        ranks = vllm_config.parallel_config.tensor_parallel_size
        where = str(extra("store", None))
        fingerprint = ModelFingerprint(str(extra("fingerprint", None)), "")
        header, writer = tuple(extra("header_ids", ())), extra("writer", None)
        written_by = None if writer is None else WrittenBy(**writer)
        self._worker_steps = False
        if role is KVConnectorRole.SCHEDULER:
            end_with(extra("starter", None))
            self._store = open_store(where, ram_budget=0)
            self.scheduler = SchedulerSide(
                Entries(self._store, fingerprint, header, 0, ranks, writer=written_by),
                page_groups(kv_cache_config),
                longest_blendable(vllm_config.model_config.hf_text_config),
                lambda: getattr(kv_cache_config, "hash_block_size", None),  # vLLM sets the attribute later
            )
        else:
            from vllm.distributed import get_tensor_model_parallel_rank

            # Each rank holds its own heads; all ranks share the machine's memory.
            self._store = open_store(where, extra("ram_budget", None), extra("disk_budget", None), processes=ranks)
            rank = get_tensor_model_parallel_rank()
            steps = vllm_config.scheduler_config
            step_tokens = extra("step_tokens", 0) or steps.long_prefill_token_threshold or steps.max_num_batched_tokens
            self.worker = WorkerSide(
                Entries(self._store, fingerprint, header, rank, ranks, writer=written_by),
                vllm_config,
                kv_cache_config,
                float(step_tokens),
                None if rank else RAMLog(self._store),
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """Return False: no request waits for KV that this connector saves, and a lost save is a later miss."""
        return False

    # Methods that vLLM calls in the scheduler.

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """See :meth:`SchedulerSide.bind`."""
        self.scheduler.bind(gpu_block_pool)

    def on_new_request(self, request: Request) -> None:
        """See :meth:`SchedulerSide.new_request`."""
        self.scheduler.new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """See :meth:`SchedulerSide.matched_tokens`."""
        return self.scheduler.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """See :meth:`SchedulerSide.allocated`."""
        self.scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMeta:
        """See :meth:`SchedulerSide.step`."""
        assert self._kv_cache_manager is not None
        return self.scheduler.step(scheduler_output, self._kv_cache_manager)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """See :meth:`SchedulerSide.worker_output`."""
        self.scheduler.worker_output(connector_output)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See :meth:`SchedulerSide.finished`; vLLM may free the blocks at once."""
        return False, self.scheduler.finished(request)

    # Methods that vLLM and :class:`BlendWorker` call in the workers.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Store the paged caches, by layer name."""
        self.worker.kv_caches = kv_caches

    def bind_worker(self, worker: Worker) -> None:
        """Take the loaded model and run the parity gate; called by :class:`BlendWorker` before the first step."""
        assert worker.device is not None
        self.bind_connector_metadata(StepMeta())  # without metadata, vLLM's attention does not call this connector
        try:
            self.worker.bind(worker.get_model(), worker.device)
        finally:
            self.clear_connector_metadata()

    def step_begins(self, output: SchedulerOutput) -> None:
        """Start to measure a step; :class:`BlendWorker` calls this method before computing the step."""
        self._worker_steps = True
        self.worker.step_begins(output)

    def step_ended(self, output: Any) -> Any:
        """Advance the blends after a step; :class:`BlendWorker` calls this method with the step's ``output``.

        Blends that run here delay no token of the step; in runner V1 the blends would otherwise run before sampling.

        Returns:
            ``output``, with the requests whose blends ended.
        """
        self.bind_connector_metadata(StepMeta())  # without metadata, vLLM's attention does not call this connector
        try:
            self.worker.step_ended()
        finally:
            self.clear_connector_metadata()
        report = connector_output(output)
        if report is None:
            if not isinstance(output, ModelRunnerOutput):
                return output  # no place for a report; the next step reports
            output = copy(output)  # vLLM uses one object for all empty steps
            output.kv_connector_output = report = KVConnectorOutput()
        done, failed = self.worker.take_finished(set())
        report.finished_recving = (report.finished_recving or set()) | done
        report.failed_recving = report.failed_recving | failed
        if (results := self.worker.take_results()) is not None:
            before = report.kv_connector_worker_meta
            report.kv_connector_worker_meta = results if before is None else results.aggregate(before)
        return output

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Queue new blends, which run after the step, or here if vLLM does not run its steps through the worker."""
        meta = self._get_connector_metadata()
        assert isinstance(meta, StepMeta)
        self.worker.take(meta)
        if not self._worker_steps:  # Ray's executor calls the model runner itself
            self.worker.blend()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Report to a running blend pass which layer the pass has reached; an ordinary step waits for nothing."""
        self.worker.attention_begins(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: :meth:`wait_for_save` saves all layers of a prompt together."""

    def wait_for_save(self) -> None:
        """Copy the prompts completed in this step out of the paged cache; a thread writes the copies."""
        meta = self._get_connector_metadata()
        assert isinstance(meta, StepMeta)
        self.worker.save(meta.saves)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Report which blends ended, and which of them failed; :meth:`step_ended` has already reported most of them."""
        done, failed = self.worker.take_finished(finished_req_ids)
        return KVConnectorTransferResults(finished_recving=done, failed_recving=failed)

    def build_connector_worker_meta(self) -> WorkerMeta | None:
        """Return the results of the ended blends, if any."""
        return self.worker.take_results()

    def shutdown(self) -> None:
        """Finish writing and close the store."""
        side = self.scheduler if self.role is KVConnectorRole.SCHEDULER else self.worker
        side.close()
        self._store.close()
