"""Drive the scheduler's and worker's halves of the connector through steps, by vLLM's connector code of either runner.

This module repeats the order of the runners' calls, as in `execute_model` and `sample_tokens` of
`vllm/v1/worker/gpu_model_runner.py` (V1) and `vllm/v1/worker/gpu/model_runner.py` (V2). Model and blends are stand-ins.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import DeviceConfig, KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.forward_context import set_forward_context
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from cacheblend_rag.blending.gate import GateReport
from cacheblend_rag.blending.outcome import PromptOutcome, Usage
from cacheblend_rag.blending.policies import policy
from cacheblend_rag.blending.settings import FuseOptions
from cacheblend_rag.engines.vllm import blends, connector, worker
from cacheblend_rag.engines.vllm.arguments import _connect
from cacheblend_rag.engines.vllm.messages import BlendJob, SaveJob, read_report, to_params
from cacheblend_rag.engines.vllm.pace import StepClock
from cacheblend_rag.engines.vllm.versions import connector_output
from cacheblend_rag.store import MemoryStore, TieredStore

PROMPT, CHUNK_END = 40, 30


class FakeBlend:
    """A blend of two segments; `events` records its steps in order."""

    loading = False
    trace = None

    events: list[Any]

    def __init__(self, load: Any, *_: Any):
        self.load, self.left, self.result = load, 2, None

    def advance(self, allowance: Any) -> bool:
        if self.load.request_id.startswith("broken"):
            raise RuntimeError("out of memory")
        self.events.append(("blend", "idle" if allowance is None else "streams"))
        self.left -= 2 if allowance is None else 1
        if self.left <= 0:
            self.result = PromptOutcome("blend", "", Usage(1, 0, 1, 1))
        return self.left <= 0

    def close(self) -> list[Any]:
        self.events.append(("closed", self.load.request_id))
        return []


class RunnerV1:
    """Runner V1, which starts loads behind the forward, before tokens are sampled."""

    def __init__(self, config: Any, events: list[Any]):
        self._config, self._events = config, events

    def execute_model(self, output: Any) -> Any:
        if not output.total_num_scheduled_tokens:
            return KVConnectorModelRunnerMixin.kv_connector_no_forward(output, self._config)
        with (
            set_forward_context({"layer": object()}, self._config),
            KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(output) as report,
        ):
            self._events.append("forward")
        self._report = report
        return None

    def sample_tokens(self, _: Any) -> Any:
        self._events.append("sample")
        return ModelRunnerOutput([], {}, kv_connector_output=self._report)


class RunnerV2:
    """Runner V2, which starts loads behind sampling, outside a forward context; saves may wait for a draft model."""

    deferred = False

    def __init__(self, config: Any, events: list[Any]):
        self._events, self._connector = events, ActiveKVConnector(config, {})

    def execute_model(self, output: Any) -> Any:
        self._finished = output.finished_req_ids
        if not output.total_num_scheduled_tokens:
            return self._connector.no_forward(output)
        self._connector.pre_forward(output)
        self._events.append("forward")
        self._connector.finish_forward()
        return None

    def sample_tokens(self, _: Any) -> Any:
        self._events.append("sample")
        output = ModelRunnerOutput([], {})
        # The output's tokens are still being copied; vLLM 0.33 has a method that returns the report.
        on_its_way = SimpleNamespace(model_runner_output=output)
        if self.deferred:
            if "defer_finalize" not in inspect.signature(self._connector.post_forward).parameters:
                pytest.skip("this vLLM does not defer saves")
            output.kv_connector_output = self._connector.post_forward(self._finished, defer_finalize=True)
            self._events.append("draft")
            self._connector.finalize_step()
        else:
            output.kv_connector_output = self._connector.post_forward(self._finished)
        return on_its_way


class Engine:
    """A scheduler's and a worker's connector and a runner; `step` does one step of vLLM's engine core.

    Attributes:
        events: The calls, in order.
    """

    def __init__(self, runner: type, monkeypatch: pytest.MonkeyPatch, through_worker: bool = True):
        self.events: list[Any] = []
        monkeypatch.setattr("vllm.distributed.get_tensor_model_parallel_rank", lambda: 0)
        monkeypatch.setattr(connector, "open_store", lambda *_, **__: TieredStore([MemoryStore()]))
        monkeypatch.setattr(connector.Entries, "contains", lambda *_: True)
        monkeypatch.setattr(blends, "_Blend", type("Blend", (FakeBlend,), {"events": self.events}))
        extra = _connect(store="/nowhere", fingerprint="0" * 32, header_ids=[])
        # A GPU's wheel that is unpacked on a CPU finds no device.
        config = VllmConfig(kv_transfer_config=KVTransferConfig(**extra), device_config=DeviceConfig(device="cpu"))
        config.model_config = SimpleNamespace(hf_text_config=SimpleNamespace())  # type: ignore[assignment]
        self.config = config
        self._scheduler = self.connector(config, KVConnectorRole.SCHEDULER)
        self._scheduler._kv_cache_manager = SimpleNamespace(get_block_ids=lambda _: ([7, 8, 9],))
        self.worker = self.connector(config, KVConnectorRole.WORKER)
        side = self.worker.worker
        side.gate = GateReport(True)
        side._blends.bind(None, None, StepClock(torch.device("cpu")))
        side.save = lambda saves: self.events.append(("save", len(saves)))
        monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", self.worker)
        self._steps: Any = runner(config, self.events)
        if through_worker:
            monkeypatch.setattr(worker.BaseWorker, "execute_model", lambda _, output: runs.execute_model(output))
            monkeypatch.setattr(worker.BaseWorker, "sample_tokens", lambda _, grammar: runs.sample_tokens(grammar))
            runs, self._steps = self._steps, object.__new__(worker.BlendWorker)

    def connector(self, config: Any, role: Any) -> Any:
        """Make a `BlendConnector` for ``role``."""
        spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)
        return connector.BlendConnector(config, role, KVCacheConfig(16, [], [KVCacheGroupSpec(["layer"], spec)]))

    def request(self, name: str, job: BlendJob | SaveJob | None = None) -> Any:
        """Add a request that blends, or has another ``job``."""
        if job is None:
            job = BlendJob(((0, CHUNK_END, "chunk"),), FuseOptions(policy("hkvd"), 0.15))
        made = SimpleNamespace(
            request_id=name,
            num_prompt_tokens=PROMPT,
            prompt_token_ids=list(range(PROMPT)),
            block_hashes=[],  # no prefix cache
            kv_transfer_params=to_params(job),
        )
        self._scheduler.on_new_request(made)
        return made

    def admit(self, request: Any, computed: int = 0) -> tuple[int, bool]:
        """Look for external tokens, as the scheduler does for a waiting request; return the connector's answer."""
        found = self._scheduler.get_num_new_matched_tokens(request, computed)
        assert found[0] is not None
        return found[0], found[1]

    def allocate(self, request: Any, external: int) -> None:
        blocks = SimpleNamespace(get_block_ids=lambda: ([1, 2, 3],))
        self._scheduler.update_state_after_alloc(request, blocks, external)

    def step(self, tokens: int, finished: tuple[str, ...] = (), new: tuple[Any, ...] = ()) -> Any:
        """Schedule, compute and take the results of one step of `tokens`; return the worker's report."""
        output = SchedulerOutput.make_empty()
        output.total_num_scheduled_tokens, output.finished_req_ids = tokens, set(finished)
        output.scheduled_new_reqs = [SimpleNamespace(req_id=r.request_id, num_computed_tokens=0) for r in new]
        output.num_scheduled_tokens = {r.request_id: PROMPT for r in new}
        output.kv_connector_metadata = self._scheduler.build_connector_meta(output)
        done = self._steps.execute_model(output)
        if done is None:
            done = self._steps.sample_tokens(None)
        self.events.append("out")
        report = connector_output(done)
        if report is not None:
            self._scheduler.update_connector_output(report)
        return report

    def finish(self, request: Any) -> dict[str, Any]:
        """End a request; return the outcome of the blend in its output."""
        held, params = self._scheduler.request_finished_all_groups(request, ([],))
        assert not held, "vLLM may free the blocks at once"
        report = read_report(params)
        return {} if report is None else report.outcome.to_params()
