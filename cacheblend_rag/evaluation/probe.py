"""Looking inside one prompt: KV deviation of its tokens, and the question's attention under any way to treat stored KV."""

from __future__ import annotations

import torch

from cacheblend_rag.calibrate.case import Case
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.engines.transformers.attention import watched
from cacheblend_rag.engines.transformers.target import TransformersTarget
from cacheblend_rag.errors import ModelError
from cacheblend_rag.evaluation.samples import EvalCase
from cacheblend_rag.fusor import BlendSchedule, fuse
from cacheblend_rag.kv import kv_key
from cacheblend_rag.plan import make_plan
from cacheblend_rag.prompt import tokenize
from cacheblend_rag.selection import SelectionPolicy


class Probe:
    """One prompt of an engine, whose chunks are precomputed.

    Attributes:
        tokens: The tokenised prompt.
    """

    def __init__(self, engine: TransformersEngine, case: EvalCase):
        """Precompute the case's chunks and plan its prompt.

        Raises:
            ModelError: The model is not blended, or the prompt has no token with stale KV.
        """
        if engine.rope is None or not engine.gate.passed:
            raise ModelError(f"This model is not blended, so there is nothing to look into: {engine.gate.reason}.")
        self._engine, self._rope = engine, engine.rope
        engine.precompute(case.chunks)
        self.tokens = tokenize(case.prompt, engine.tokenizer, engine.registry)
        self._plan = make_plan(
            self.tokens,
            engine.header_ids,
            lambda ids: engine.store.get(kv_key(engine.fingerprint, engine.header_ids, ids)),
        )
        if not self._plan.stale:
            raise ModelError("This prompt has no chunk behind the first, so no KV of it is stale; use more chunks.")

    @property
    def question(self) -> torch.Tensor:
        """Positions behind the last chunk."""
        return torch.arange(self.tokens.spans[-1].end, len(self.tokens.token_ids), device=self._engine.runner.device)

    def deviation(self) -> torch.Tensor:
        """Return the KV deviation ``[layers, tokens with stale KV]`` of full KV reuse against the full prefill."""
        return Case(self._engine.subject(), self._rope, self._engine.header_ids, self.tokens, None).deviation

    def attention(self, policy: SelectionPolicy, ratio: float, schedule: BlendSchedule) -> torch.Tensor:
        """Return the question's attention ``[layers, heads, question, tokens]`` after a blend, in fp32 on the CPU.

        Raises:
            ModelError: The model's attention cannot be watched (it needs eager attention).
        """
        target = TransformersTarget(self._engine.runner, self._rope, self.tokens.token_ids)
        fuse(self._plan, target, policy, ratio, schedule)
        found: dict[int, torch.Tensor] = {}
        # The question's KV is written once more, with the same values.
        with watched(lambda layer, weights: found.__setitem__(layer, weights.cpu())):
            target.forward(self.question, lambda layer: None)
        if len(found) != self._engine.runner.num_layers:
            raise ModelError("The attention of this model cannot be watched: it runs eager attention of its own.")
        return torch.stack([found[layer] for layer in sorted(found)])


def attention_deviation(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Return ``[layers]``: the L2 norm of the difference of two attentions ``[layers, heads, question, tokens]``.

    The norm is taken over a head's whole matrix, and averaged over heads (paper section 4.2).
    """
    norms: torch.Tensor = torch.linalg.vector_norm((got - want).flatten(2), dim=2)
    return norms.mean(1)
