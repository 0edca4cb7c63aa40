"""Extends vLLM's worker by calls of the connector; vLLM loads the class as ``worker_cls``."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.platforms import current_platform

from cacheblend_rag.engines.vllm.connector import BlendConnector
from cacheblend_rag.engines.vllm.fairness import FAIR
from cacheblend_rag.engines.vllm.starting import end_with
from cacheblend_rag.engines.vllm.versions import installed_version
from cacheblend_rag.engines.vllm.worker_side import WorkerSide

if TYPE_CHECKING:
    from vllm.config import VllmConfig

if TYPE_CHECKING or not current_platform.is_cpu():
    from vllm.v1.worker.gpu_worker import Worker as BaseWorker
else:
    from vllm.v1.worker.cpu_worker import CPUWorker as BaseWorker


class BlendWorker(BaseWorker):
    """Extends the platform's worker, and calls the blend connector before and after each step."""

    def __init__(self, vllm_config: VllmConfig, *given: Any, **named: Any):
        assert vllm_config.kv_transfer_config is not None
        end_with(vllm_config.kv_transfer_config.get_from_extra_config("starter", None))
        super().__init__(vllm_config, *given, **named)

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Allocate the KV cache, then pass the model to the connector, which runs the parity gate."""
        super().initialize_from_config(kv_cache_config)
        if (connector := _connector()) is not None:
            connector.bind_worker(self)

    def compile_or_warm_up_model(self) -> Any:
        """Warm up; if namespaces share steps, also compile log-probabilities, whose first use would delay all namespaces."""
        gather = getattr(getattr(self.model_runner, "sampler", None), "gather_logprobs", None)
        if gather is not None and self.vllm_config.scheduler_config.scheduler_cls == FAIR:
            with torch.inference_mode():
                rows = torch.zeros(2, self.model_config.get_vocab_size(), device=self.device)
                gather(rows, 1, torch.zeros(2, dtype=torch.int64, device=self.device))
        return super().compile_or_warm_up_model()

    def execute_model(self, scheduler_output: Any) -> Any:
        """Compute a step; if the step ends here, without tokens to sample, advance the blends."""
        if (connector := _connector()) is None:
            return super().execute_model(scheduler_output)
        connector.step_begins(scheduler_output)
        output = super().execute_model(scheduler_output)
        return output if output is None else connector.step_ended(output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample a step's tokens, then advance the blends."""
        output = super().sample_tokens(grammar_output)
        return output if (connector := _connector()) is None else connector.step_ended(output)

    # Methods that the client calls by `collective_rpc`.

    def cacheblend_gate(self) -> dict[str, Any]:
        """Return the report of the parity gate."""
        return asdict(_worker_side().gate)

    def cacheblend_backend(self) -> dict[str, str]:
        """Return the names of vLLM's version, model runner and attention backends on this worker."""
        layers = self.vllm_config.compilation_config.static_forward_context.values()
        backends = {layer.get_attn_backend().get_name() for layer in layers if hasattr(layer, "get_attn_backend")}
        return {
            "vllm": str(installed_version()),
            "runner": "V2" if self.vllm_config.use_v2_model_runner else "V1",
            "attention": ", ".join(sorted(backends)),
        }

    def cacheblend_passes(self) -> dict[str, tuple[float, float]]:
        """Return tokens and seconds of each kind of work measured so far."""
        return _worker_side().measured()

    def cacheblend_written(self) -> dict[str, str]:
        """Return the receipts since the last call: an empty string, or why the entry is not in the store."""
        return _worker_side().saver.take_written()


def _connector() -> BlendConnector | None:
    if not has_kv_transfer_group():
        return None
    group = get_kv_transfer_group()
    return group if isinstance(group, BlendConnector) else None


def _worker_side() -> WorkerSide:
    connector = _connector()
    assert connector is not None
    return connector.worker
