"""Compare vLLM's Triton attention over our metadata, in the interpreter, with a dense mask; test_runner_v2.py runs it."""

from __future__ import annotations

import pytest
import torch
from vllm.triton_utils import HAS_TRITON
from vllm.v1.attention.ops.triton_unified_attention import unified_attention

from tests.engines.kernels.pages import scattered
from tests.engines.kernels.test_attention import dense
from tests.engines.vllm.gpu_cache import DIM, HEADS, LAYOUTS, described, paged_model
from tests.engines.vllm.test_gpu_cache import TABLE, random_kv


def test_vllms_triton_attention_sees_the_exact_mask_in_our_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    assert HAS_TRITON
    for layout in LAYOUTS[:2]:
        model = paged_model(monkeypatch, "TRITON_ATTN", layout)
        kv, positions = random_kv(60, 0), scattered(60, 20)
        model.write(0, kv, model.slots(0, [TABLE], torch.arange(60)))
        common = described(model, TABLE, positions)
        assert common.num_reqs > 5
        query = torch.randn(len(positions), HEADS, DIM, generator=torch.Generator().manual_seed(1))
        out = torch.empty_like(query)
        # The call is that of TritonAttentionImpl.forward.
        keys, values = model.attention[0].kv_cache.transpose(1, 2).split(DIM, dim=-1)
        unified_attention(
            q=query,
            k=keys,
            v=values,
            out=out,
            cu_seqlens_q=common.query_start_loc,
            max_seqlen_q=common.max_query_len,
            seqused_k=common.seq_lens,
            max_seqlen_k=common.max_seq_len,
            softmax_scale=0.2,
            causal=common.causal,
            window_size=(-1, -1),
            block_table=common.block_table_tensor,
            softcap=0,
            q_descale=None,
            k_descale=None,
            v_descale=None,
        )
        assert (out - dense(query, *kv, positions, 0.2)).abs().max() < 1e-5
