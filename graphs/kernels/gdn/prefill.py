"""The chunked prefill as an op that torch.compile sees through: four kernels.

conv (rows to q, k, v) -> solve (gates, chunk systems) -> scan (states, new values) -> output.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from graphs.kernels.gdn.chunk_output_kernel import gdn_prefill_output_kernel
from graphs.kernels.gdn.chunk_scan_kernel import gdn_prefill_scan_kernel
from graphs.kernels.gdn.chunk_solve_kernel import gdn_prefill_solve_kernel
from graphs.kernels.gdn.conv_kernel import gdn_prefill_conv_kernel
from graphs.kernels.gdn.layout import check_layout
from graphs.kernels.launch import launch

CHUNK = 64
NUM_FACTORS = 6


@dataclass(frozen=True)
class PrefillConfig:
    """Tile sizes and warps of the four kernels, and how fp32 numbers are multiplied."""

    conv_warps: int
    conv_precision: str
    solve_warps: int
    solve_precision: str
    scan_block_v: int
    scan_warps: int
    scan_stages: int
    output_rows: int
    output_block_k: int
    output_warps: int
    output_stages: int


@dataclass(frozen=True)
class PrefillInputs:
    """The tensors of one call (see `gdn_prefill`), their sizes, and what the kernels hand on.

    Per chunk, in the working dtype: queries_keys [NC, 2H, 64, KP] raw, values [NC, HV, VP, 64]
    raw (replaced by the new values), inverses [NC, HV, 64, 64]; factors [NC, HV, 6, 64] fp32.
    products [NC, H, 64, 64] and lengths [NC, H, 64] of the keys are fp32.
    KP and VP are the head dims, padded with zeros to powers of two.
    """

    projected: Tensor
    positions: Tensor
    row_starts: Tensor
    chunks: Tensor
    chunk_starts: Tensor
    state_slots: Tensor
    conv_weight: Tensor
    a_log: Tensor
    dt_bias: Tensor
    norm_weight: Tensor
    conv_pool: Tensor
    state_pool: Tensor
    num_k_heads: int
    queries_keys: Tensor
    values: Tensor
    products: Tensor
    lengths: Tensor
    inverses: Tensor
    factors: Tensor
    boundary_states: Tensor

    @property
    def sizes(self) -> dict[str, int]:
        """What all four kernels are compiled for."""
        num_v_heads, head_v_dim, head_k_dim = self.state_pool.shape[1:]
        return {
            "H": self.num_k_heads,
            "HV": num_v_heads,
            "K": head_k_dim,
            "V": head_v_dim,
            "CHUNK": CHUNK,
        }


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """What a model's kernels hand on to each other: its own dtype, but never fp16.

    Unit keys are kept as raw keys and inverse lengths, up to 1000, which fp16 products overflow.
    So fp16 models take the fp32 path, at its speed.
    """
    return torch.float32 if dtype is torch.float16 else dtype


def choose_config(dtype: torch.dtype, head_k_dim: int, head_v_dim: int) -> PrefillConfig:
    """The configuration for a working dtype and head dims."""
    padded_k, padded_v = triton.next_power_of_2(head_k_dim), triton.next_power_of_2(head_v_dim)
    conv_warps = 8 if max(padded_k, padded_v) <= 128 else 16
    # Of fp32 products. Both are exact enough; one takes more registers, one more shared memory.
    conv_precision = "tf32x3" if padded_k <= 128 else "ieee"
    if dtype is torch.float32:
        return PrefillConfig(
            conv_warps=conv_warps,
            conv_precision=conv_precision,
            solve_warps=4,
            solve_precision="ieee",
            scan_block_v=min(padded_v, 16),
            scan_warps=4,
            scan_stages=1,
            output_rows=32,
            output_block_k=min(padded_k, 16),
            output_warps=8,
            output_stages=1,
        )
    return PrefillConfig(
        conv_warps=conv_warps,
        conv_precision=conv_precision,
        solve_warps=2,
        solve_precision="tf32",  # the inverse is rounded to fewer bits
        scan_block_v=min(padded_v, 64),
        scan_warps=4,
        scan_stages=4 if padded_k <= 128 else 2,
        output_rows=CHUNK,
        output_block_k=min(padded_k, 64),
        output_warps=8,
        output_stages=1,  # never 2: on Hopper, Triton 3.6, it gave results off by 3e-2
    )


@torch.library.triton_op("deltaloom::gdn_prefill", mutates_args={"conv_pool", "state_pool"})
def gdn_prefill(
    projected: Tensor,
    positions: Tensor,
    row_starts: Tensor,
    chunks: Tensor,
    chunk_starts: Tensor,
    state_slots: Tensor,
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    conv_pool: Tensor,
    state_pool: Tensor,
    num_k_heads: int,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """`graphs.kernels.gdn.reference.gdn_prefill`, shapes and effects as there.

    projected may have any row stride, the pools any slot stride. Requests without rows, or with
    the padding slot 0, change no pool. The outputs of rows past row_starts[-1] are zero; the
    boundary states of chunks without rows are left as they are.
    """
    check_layout(projected, conv_weight, conv_pool, state_pool)
    assert chunks.is_contiguous(), chunks.stride()
    config = choose_config(working_dtype(projected.dtype), state_pool.shape[3], state_pool.shape[2])
    inputs = prepare_inputs(
        projected,
        positions,
        row_starts,
        chunks,
        chunk_starts,
        state_slots,
        conv_weight,
        a_log,
        dt_bias,
        norm_weight,
        conv_pool,
        state_pool,
        num_k_heads,
    )
    launch_conv(inputs, config)
    launch_solve(inputs, config)
    launch_scan(inputs, config)
    out = projected.new_empty(projected.shape[0], state_pool.shape[1] * state_pool.shape[2])
    launch_output(inputs, config, out, eps)
    return out, inputs.boundary_states


def prepare_inputs(
    projected: Tensor,
    positions: Tensor,
    row_starts: Tensor,
    chunks: Tensor,
    chunk_starts: Tensor,
    state_slots: Tensor,
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    conv_pool: Tensor,
    state_pool: Tensor,
    num_k_heads: int,
) -> PrefillInputs:
    """The arguments of `gdn_prefill` with memory for all that the kernels hand on."""
    num_chunks, (num_v_heads, head_v_dim, head_k_dim) = chunks.shape[0], state_pool.shape[1:]
    padded_k, padded_v = triton.next_power_of_2(head_k_dim), triton.next_power_of_2(head_v_dim)
    fp32, working = torch.float32, working_dtype(projected.dtype)
    return PrefillInputs(
        projected=projected,
        positions=positions,
        row_starts=row_starts,
        chunks=chunks,
        chunk_starts=chunk_starts,
        state_slots=state_slots,
        conv_weight=conv_weight,
        a_log=a_log,
        dt_bias=dt_bias,
        norm_weight=norm_weight,
        conv_pool=conv_pool,
        state_pool=state_pool,
        num_k_heads=num_k_heads,
        queries_keys=projected.new_empty(
            num_chunks, 2 * num_k_heads, CHUNK, padded_k, dtype=working
        ),
        values=projected.new_empty(num_chunks, num_v_heads, padded_v, CHUNK, dtype=working),
        products=projected.new_empty(num_chunks, num_k_heads, CHUNK, CHUNK, dtype=fp32),
        lengths=projected.new_empty(num_chunks, num_k_heads, CHUNK, dtype=fp32),
        inverses=projected.new_empty(num_chunks, num_v_heads, CHUNK, CHUNK, dtype=working),
        factors=projected.new_empty(num_chunks, num_v_heads, NUM_FACTORS, CHUNK, dtype=fp32),
        boundary_states=state_pool.new_empty((num_chunks, *state_pool.shape[1:]), dtype=fp32),
    )


def launch_conv(inputs: PrefillInputs, config: PrefillConfig) -> None:
    """Fill queries_keys and values."""
    num_heads = 2 * inputs.num_k_heads + inputs.values.shape[1]
    launch(gdn_prefill_conv_kernel)[(inputs.chunks.shape[0] * num_heads,)](
        inputs.projected,
        inputs.positions,
        inputs.row_starts,
        inputs.chunks,
        inputs.state_slots,
        inputs.conv_weight,
        inputs.conv_pool,
        inputs.queries_keys,
        inputs.values,
        inputs.products,
        inputs.lengths,
        inputs.projected.stride(0),
        inputs.conv_pool.stride(0),
        **inputs.sizes,
        NUM_TAPS=inputs.conv_weight.shape[1],
        BLOCK_K=inputs.queries_keys.shape[3],
        BLOCK_V=inputs.values.shape[2],
        PRECISION=config.conv_precision,
        num_warps=config.conv_warps,
    )


def launch_solve(inputs: PrefillInputs, config: PrefillConfig) -> None:
    """Fill inverses and factors from the keys and the gates."""
    num_pairs = inputs.chunks.shape[0] * inputs.values.shape[1]
    scratch = inputs.factors.new_empty(num_pairs, CHUNK, CHUNK)
    launch(gdn_prefill_solve_kernel)[(num_pairs,)](
        inputs.projected,
        inputs.row_starts,
        inputs.chunks,
        inputs.a_log,
        inputs.dt_bias,
        inputs.products,
        inputs.lengths,
        inputs.inverses,
        inputs.factors,
        scratch,
        inputs.projected.stride(0),
        **inputs.sizes,
        PRECISION=config.solve_precision,
        NUM_FACTORS=NUM_FACTORS,
        num_warps=config.solve_warps,
    )


def launch_scan(inputs: PrefillInputs, config: PrefillConfig) -> None:
    """Fill boundary_states, turn values into new values, store final states and conv ring."""
    num_channels, num_taps = inputs.conv_weight.shape
    num_v_heads, padded_v = inputs.values.shape[1:3]
    num_v_blocks = padded_v // config.scan_block_v
    num_blocks = num_v_heads * num_v_blocks
    launch(gdn_prefill_scan_kernel)[(inputs.state_slots.shape[0] * num_blocks,)](
        inputs.projected,
        inputs.positions,
        inputs.row_starts,
        inputs.chunk_starts,
        inputs.state_slots,
        inputs.conv_pool,
        inputs.state_pool,
        inputs.queries_keys,
        inputs.values,
        inputs.inverses,
        inputs.factors,
        inputs.boundary_states,
        inputs.projected.stride(0),
        inputs.conv_pool.stride(0),
        inputs.state_pool.stride(0),
        **inputs.sizes,
        NUM_TAPS=num_taps,
        BLOCK_K=inputs.queries_keys.shape[3],
        BLOCK_V=config.scan_block_v,
        NUM_V_BLOCKS=num_v_blocks,
        BLOCK_C=triton.next_power_of_2(triton.cdiv(num_channels, num_blocks)),
        NUM_FACTORS=NUM_FACTORS,
        NUM_STAGES=config.scan_stages,
        num_warps=config.scan_warps,
    )


def launch_output(inputs: PrefillInputs, config: PrefillConfig, out: Tensor, eps: float) -> None:
    """Fill out [T, HV * V]."""
    num_chunks, num_v_heads, padded_v, _ = inputs.values.shape
    launch(gdn_prefill_output_kernel)[(num_chunks * num_v_heads * (CHUNK // config.output_rows),)](
        inputs.projected,
        inputs.row_starts,
        inputs.chunks,
        inputs.norm_weight,
        inputs.queries_keys,
        inputs.values,
        inputs.factors,
        inputs.boundary_states,
        out,
        out.shape[0],
        inputs.state_slots.shape[0],
        inputs.projected.stride(0),
        EPS=eps,
        Q_SCALE=inputs.state_pool.shape[3] ** -0.5,
        **inputs.sizes,
        BLOCK_T=config.output_rows,
        ROW_K=inputs.queries_keys.shape[3],
        BLOCK_K=config.output_block_k,
        BLOCK_V=padded_v,
        NUM_FACTORS=NUM_FACTORS,
        NUM_STAGES=config.output_stages,
        num_warps=config.output_warps,
    )
