"""Products of rows with a weight: few rows by our own kernels, many by torch.

Each op is bound by reading the weight as long as rows are few. A row's bits do not depend on the
rows beside it as long as the same kernel takes them: one row alone, from 2 (gated: 1) to
`max_matvec_rows` rows, and from there up to `max_own_rows`. Between these, bits may differ: a
single row of a plain product has a kernel of its own, which sums in another order.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from graphs.kernels.launch import launch
from graphs.kernels.linear.configs import (
    MAX_FEW_ROWS,
    MAX_MATVEC_ROWS,
    MIN_MATRIX_ROWS,
    ONE_ROW_WARPS,
    FewRowsConfig,
    MatvecConfig,
    OneRowConfig,
    few_rows_config,
    matvec_config,
    max_matvec_rows,
    max_own_rows,
    one_row_block_k,
    one_row_config,
    pad_rows,
)
from graphs.kernels.linear.few_rows_kernel import few_rows_kernel
from graphs.kernels.linear.matvec_kernel import matvec_kernel
from graphs.kernels.linear.one_row_kernel import one_row_kernel
from graphs.kernels.linear.swiglu_kernel import swiglu_kernel

SWIGLU_BLOCK = 1024


@torch.library.triton_op("deltaloom::linear", mutates_args={})
def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [M, K] times weight [N, K] transposed, [M, N] in x's dtype, sums in fp32.

    Rows of x may be any number of elements apart; the weight is contiguous.
    """
    if not use_own_kernels(x, weight):
        return F.linear(x, weight)
    out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    multiply_few_rows(x, weight, out, is_gated=False)
    return out


@torch.library.triton_op("deltaloom::gated_linear", mutates_args={})
def gated_linear(x: Tensor, gate_up: Tensor) -> Tensor:
    """silu(x W_gate^T) * (x W_up^T), [M, I] in x's dtype; gate_up [2 * I, K] = [W_gate | W_up].

    With few rows all of it is fp32 and rounded once; with many, the products are rounded too.
    """
    width = gate_up.shape[0] // 2
    out = torch.empty(x.shape[0], width, dtype=x.dtype, device=x.device)
    if use_own_kernels(x, gate_up):
        multiply_few_rows(x, gate_up, out, is_gated=True)
    elif x.shape[0] > 0:
        launch_swiglu(F.linear(x, gate_up), out)
    return out


@torch.library.triton_op("deltaloom::swiglu", mutates_args={})
def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of the halves of gate_up [M, 2 * I]: [M, I], fp32 inside, rounded once."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(num_rows, width, dtype=gate_up.dtype, device=gate_up.device)
    if num_rows > 0:
        launch_swiglu(gate_up, out)
    return out


def use_own_kernels(x: Tensor, weight: Tensor) -> bool:
    """Whether the rows are few enough (and there are any)."""
    most = max_own_rows(weight.shape[0], weight.shape[1], x.element_size())
    return 0 < x.shape[0] <= most and x.stride(1) == 1


def multiply_few_rows(x: Tensor, weight: Tensor, out: Tensor, *, is_gated: bool) -> None:
    """Write the product into out [M, N], or with is_gated its swiglu into out [M, N / 2]."""
    num_rows, depth = x.shape
    one_row = None
    if num_rows == 1 and not is_gated:
        one_row = one_row_config(weight.shape[0], depth, x.element_size())
    if one_row is not None:
        launch_one_row(x, weight, out, one_row)
    elif num_rows <= max_matvec_rows(weight.shape[0], depth):
        padded = pad_rows(num_rows, 1, MAX_MATVEC_ROWS)
        config = matvec_config(padded, weight.shape[0], depth)
        launch_matvec(x, weight, out, config, is_gated=is_gated)
    else:
        padded = pad_rows(num_rows, MIN_MATRIX_ROWS, MAX_FEW_ROWS)
        few_rows = few_rows_config(padded, weight.shape[0], is_gated=is_gated)
        launch_few_rows(x, weight, out, few_rows, is_gated=is_gated)


def launch_one_row(x: Tensor, weight: Tensor, out: Tensor, config: OneRowConfig) -> None:
    """The kernel for one row x [1, K], of a dtype that the weight shares, into out [1, N]."""
    num_outputs, depth = weight.shape
    block_k = one_row_block_k(x.element_size())
    num_blocks = triton.cdiv(num_outputs, config.block_n)
    assert weight.is_contiguous() and weight.dtype == x.dtype
    launch(one_row_kernel)[(min(num_blocks, config.max_programs),)](
        x,
        weight,
        out,
        num_outputs,
        depth,
        num_blocks,
        PIECES=triton.cdiv(depth, block_k),
        EVEN_K=depth % block_k == 0,
        BLOCK_N=config.block_n,
        BLOCK_K=block_k,
        WORD_LEN=4 // x.element_size(),
        num_warps=ONE_ROW_WARPS,
    )


def launch_matvec(
    x: Tensor, weight: Tensor, out: Tensor, config: MatvecConfig, *, is_gated: bool
) -> None:
    """The matrix-vector kernel for up to MAX_MATVEC_ROWS rows."""
    num_rows, depth = x.shape
    block_k = config.block_k(x.element_size())
    assert weight.is_contiguous() and not (is_gated and config.block_n == 1)
    launch(matvec_kernel)[(triton.cdiv(weight.shape[0], config.block_n),)](
        x,
        weight,
        out,
        num_rows,
        out.shape[1],
        depth,
        x.stride(0),
        MROWS=pad_rows(num_rows, 1, MAX_MATVEC_ROWS),
        GATED=is_gated,
        EVEN_K=depth % block_k == 0,
        BLOCK_N=config.block_n,
        BLOCK_K=block_k,
        STAGES=config.num_stages,
        num_warps=config.num_warps,
    )


def launch_few_rows(
    x: Tensor, weight: Tensor, out: Tensor, config: FewRowsConfig, *, is_gated: bool
) -> None:
    """The matrix-unit kernel for up to MAX_FEW_ROWS rows."""
    num_rows, depth = x.shape
    padded_rows = pad_rows(num_rows, MIN_MATRIX_ROWS, MAX_FEW_ROWS)
    assert weight.is_contiguous()
    launch(few_rows_kernel)[(triton.cdiv(weight.shape[0], config.block_n),)](
        x,
        weight,
        out,
        num_rows,
        out.shape[1],
        depth,
        x.stride(0),
        GATED=is_gated,
        EVEN_K=depth % config.block_k == 0,
        MASKED=padded_rows == MIN_MATRIX_ROWS,
        BLOCK_M=padded_rows,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        STAGES=config.num_stages,
        num_warps=config.num_warps,
    )


def launch_swiglu(gate_up: Tensor, out: Tensor) -> None:
    """swiglu of gate_up [M, 2 * I], rows of unit stride, into a contiguous out [M, I]."""
    num_rows, width = out.shape
    assert gate_up.stride(1) == 1
    launch(swiglu_kernel)[(num_rows, triton.cdiv(width, SWIGLU_BLOCK))](
        gate_up, out, width, gate_up.stride(0), BLOCK=SWIGLU_BLOCK, num_warps=4
    )
