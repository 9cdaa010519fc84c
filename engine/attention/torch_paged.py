"""Paged attention from the torch references."""

from __future__ import annotations

from torch import Tensor

from engine.attention.protocol import HeadParameters, RowCapabilities
from engine.cache.pools import KvLayer
from graphs.inputs import ForwardInputs, Kind
from graphs.kernels.attention import reference


class TorchPagedAttention:
    """Runs anywhere torch does; on CUDA it is for tests, not for speed."""

    capabilities = RowCapabilities(max_rows_per_request=1, can_capture=False)

    def attend(
        self, qkv: Tensor, heads: HeadParameters, kv: KvLayer, inputs: ForwardInputs
    ) -> Tensor:
        """See `AttentionBackend.attend`."""
        q = reference.prepare_qkv(
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
        if inputs.kind is Kind.DECODE:
            return reference.paged_decode_attention(
                q, qkv, kv.k_pool, kv.v_pool, inputs.page_table, inputs.context_lens, 1
            )
        assert inputs.kind is Kind.PREFILL
        attended: Tensor = reference.paged_prefill_attention(
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
