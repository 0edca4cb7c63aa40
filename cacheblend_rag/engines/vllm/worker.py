"""vLLM's own worker, which also shows its model to the connector. Loaded by vLLM as ``worker_cls``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.platforms import current_platform

from cacheblend_rag.engines.vllm.connector import BlendConnector

if TYPE_CHECKING or not current_platform.is_cpu():
    from vllm.v1.worker.gpu_worker import Worker as BaseWorker
else:
    from vllm.v1.worker.cpu_worker import CPUWorker as BaseWorker


class BlendWorker(BaseWorker):
    """The platform's worker with a blend connector."""

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Allocate the KV cache as ever, then let the connector see the model and run its parity gate."""
        super().initialize_from_config(kv_cache_config)
        if (connector := _connector()) is not None:
            connector.bind_worker(self)

    # Reached from the client by `collective_rpc`.

    def cacheblend_gate(self) -> dict[str, Any]:
        """Return what the parity gate found."""
        connector = _connector()
        assert connector is not None
        gate = connector.worker.gate
        return {
            "passed": gate.passed,
            "reason": gate.reason,
            "errors": gate.errors,
            "first_token_kl": gate.first_token_kl,
        }

    def cacheblend_written(self) -> dict[str, str]:
        """Return the entries written since the last call, with why one is not in the store."""
        connector = _connector()
        assert connector is not None
        return connector.worker.saver.take_written()


def _connector() -> BlendConnector | None:
    if not has_kv_transfer_group():
        return None
    group = get_kv_transfer_group()
    return group if isinstance(group, BlendConnector) else None
