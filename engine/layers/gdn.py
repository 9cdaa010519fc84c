"""The GatedDeltaNet token mixer: projections around the recurrent core."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.attention.protocol import MAX_VERIFY_ROWS, RowCapabilities
from engine.cache.pools import GdnLayer
from engine.layers.parameter import empty_weight
from engine.model_config import ModelConfig
from graphs.inputs import ForwardInputs, Kind
from graphs.kernels.kernel_set import KernelSet


class GdnMixer(nn.Module):
    """Conv window and recurrent state live in the pool slots of `cache`, nowhere else.

    `in_proj` is one matrix with the rows [q | k | v | z | b | a]: conv_dim, value_dim, HV, HV.
    """

    capabilities = RowCapabilities(max_rows_per_request=MAX_VERIFY_ROWS, can_capture=True)

    def __init__(
        self,
        config: ModelConfig,
        cache: GdnLayer,
        kernels: KernelSet,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.kernels = kernels
        num_heads = config.num_v_heads_gdn
        self.sizes = [config.conv_dim, config.value_dim, num_heads, num_heads]
        self.num_k_heads = config.num_k_heads_gdn
        self.eps = config.rms_norm_eps
        self.conv_pool, self.state_pool = cache.conv_pool, cache.state_pool
        self.stash = cache.stash
        hidden = config.hidden_size
        self.in_proj = empty_weight(sum(self.sizes), hidden, dtype=dtype, device=device)
        self.conv = empty_weight(config.conv_dim, config.conv_kernel, dtype=dtype, device=device)
        self.a_log = empty_weight(num_heads, dtype=torch.float32, device=device)
        self.dt_bias = empty_weight(num_heads, dtype=torch.float32, device=device)
        self.norm = empty_weight(config.head_v_dim_gdn, dtype=dtype, device=device)
        self.out_proj = empty_weight(hidden, config.value_dim, dtype=dtype, device=device)

    def forward(self, x: Tensor, inputs: ForwardInputs) -> Tensor:
        """x [T, hidden] -> [T, hidden]; advances the state of every request in `inputs`.

        But for a verify step: that only reads it, and leaves its rows in the stash.
        """
        projected = self.kernels.linear(x, self.in_proj)
        if inputs.kind is Kind.DECODE:
            y = self.kernels.gdn_decode(
                projected,
                inputs.positions,
                inputs.state_slots,
                self.conv,
                self.a_log,
                self.dt_bias,
                self.norm,
                self.conv_pool,
                self.state_pool,
                self.num_k_heads,
                self.eps,
            )
        elif inputs.kind is Kind.VERIFY:
            assert self.stash is not None
            y = self.kernels.gdn_verify(
                projected,
                inputs.positions,
                inputs.state_slots,
                self.conv,
                self.a_log,
                self.dt_bias,
                self.norm,
                self.conv_pool,
                self.state_pool,
                *self.stash,
                self.num_k_heads,
                self.eps,
                inputs.rows_per_request,
            )
        else:
            assert inputs.kind is Kind.PREFILL
            y, _ = self.kernels.gdn_prefill(
                projected,
                inputs.positions,
                inputs.row_starts,
                inputs.chunks,
                inputs.chunk_starts,
                inputs.state_slots,
                self.conv,
                self.a_log,
                self.dt_bias,
                self.norm,
                self.conv_pool,
                self.state_pool,
                self.num_k_heads,
                self.eps,
            )
        return self.kernels.linear(y, self.out_proj)
