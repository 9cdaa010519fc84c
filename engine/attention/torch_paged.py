"""Paged attention from the torch references."""

from __future__ import annotations

from torch import Tensor

from engine.attention.protocol import RowCapabilities
from engine.cache.pools import KvLayer
from graphs.inputs import ForwardInputs, Kind
from graphs.kernels.attention import reference


class TorchPagedAttention:
    """Runs anywhere torch does; on CUDA it is for tests, not for speed."""

    capabilities = RowCapabilities(max_rows_per_request=1, can_capture=False)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, kv: KvLayer, inputs: ForwardInputs) -> Tensor:
        """See `AttentionBackend.attend`."""
        reference.write_kv(kv.k_pool, kv.v_pool, inputs.kv_slots, k, v)
        if inputs.kind is Kind.DECODE:
            return reference.paged_decode_attention(
                q, kv.k_pool, kv.v_pool, inputs.page_table, inputs.context_lens
            )
        assert inputs.kind is Kind.PREFILL
        attended: Tensor = reference.paged_prefill_attention(
            q, kv.k_pool, kv.v_pool, inputs.page_table, inputs.context_lens, inputs.row_starts
        )
        return attended
