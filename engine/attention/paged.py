"""Attention over the paged cache, on the torch references or on our Triton kernels."""

from __future__ import annotations

from torch import Tensor

from engine.attention.protocol import MAX_VERIFY_ROWS, HeadParameters, RowCapabilities
from engine.cache.pools import KvLayer
from graphs.inputs import ForwardInputs, Kind
from graphs.kernels.kernel_set import TORCH_ATTENTION, TRITON_ATTENTION, AttentionKernels


class PagedAttention:
    """An `AttentionBackend` of one set of kernels."""

    def __init__(self, kernels: AttentionKernels, capabilities: RowCapabilities) -> None:
        self.kernels, self.capabilities = kernels, capabilities

    def attend(
        self, qkv: Tensor, heads: HeadParameters, kv: KvLayer, inputs: ForwardInputs
    ) -> Tensor:
        """See `AttentionBackend.attend`."""
        q = self.kernels.prepare_qkv(
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
        cache = (kv.k_pool, kv.v_pool, inputs.page_table, inputs.context_lens)
        # The Triton kernels skip no tokens yet: the plan refuses who would need it of them.
        skipped = () if kv.first_token == 0 else (kv.first_token,)
        if inputs.kind in (Kind.DECODE, Kind.VERIFY):
            return self.kernels.paged_decode_attention(
                q, qkv, *cache, inputs.rows_per_request, *skipped
            )
        return self.kernels.paged_prefill_attention(
            q, qkv, *cache, inputs.row_starts, inputs.chunks, *skipped
        )


# Anywhere torch runs; on CUDA for tests, not for speed: it asks the device for row counts.
TORCH_PAGED = PagedAttention(
    TORCH_ATTENTION, RowCapabilities(max_rows_per_request=MAX_VERIFY_ROWS, can_capture=False)
)
TRITON_PAGED = PagedAttention(
    TRITON_ATTENTION, RowCapabilities(max_rows_per_request=MAX_VERIFY_ROWS, can_capture=True)
)
PAGED_BACKENDS = {"torch": TORCH_PAGED, "triton": TRITON_PAGED}
