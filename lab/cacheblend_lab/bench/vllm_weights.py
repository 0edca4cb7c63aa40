"""Generates a random model's weights in vLLM's workers, which import this module for :class:`RandomWeights`."""

from __future__ import annotations

from typing import Any

from vllm.config import ModelConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.model_loader import BaseModelLoader, register_model_loader

from cacheblend_lab.bench.random_models import spread

LOAD_FORMAT = "cacheblend-random"


class RandomWeights:
    """Serves as a worker extension: importing the class adds :data:`LOAD_FORMAT` to this worker's vLLM."""


@register_model_loader(LOAD_FORMAT)
class _Loader(BaseModelLoader):
    def download_model(self, model_config: ModelConfig) -> None:
        """Do nothing: there are no files, which would take longer to write than to measure."""

    def load_weights(self, model: Any, model_config: ModelConfig) -> None:
        """Fill the weights in place; each rank has different weights, as each rank has its part of a real model."""
        spread(model.named_parameters(), seed=get_tensor_model_parallel_rank())
