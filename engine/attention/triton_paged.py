"""Paged attention from the Triton kernels."""

from __future__ import annotations

from torch import Tensor

from engine.attention.protocol import HeadParameters, RowCapabilities
from engine.cache.pools import KvLayer
from graphs.inputs import ForwardInputs, Kind
from graphs.kernels.attention import ops


class TritonPagedAttention:
    """For CUDA."""

    capabilities = RowCapabilities(max_rows_per_request=1, can_capture=True)

    def attend(
        self, qkv: Tensor, heads: HeadParameters, kv: KvLayer, inputs: ForwardInputs
    ) -> Tensor:
        """See `AttentionBackend.attend`."""
        q = ops.prepare_qkv(
            qkv,
            heads.q_norm,
            heads.k_norm,
            heads.inv_freq,
            inputs.positions,
            inputs.kv_slots,
            kv.k_pool,
            kv.v_pool,
            heads.num_q_heads,
            heads.eps,
        )
        attended: Tensor
        if inputs.kind is Kind.DECODE:
            attended = ops.paged_decode_attention(
                q, qkv, kv.k_pool, kv.v_pool, inputs.page_table, inputs.context_lens, 1
            )
            return attended
        assert inputs.kind is Kind.PREFILL
        attended = ops.paged_prefill_attention(
            q,
            qkv,
            kv.k_pool,
            kv.v_pool,
            inputs.page_table,
            inputs.context_lens,
            inputs.row_starts,
            inputs.chunks,
        )
        return attended
