"""Zero-centred RMSNorm, alone and fused with the residual sum before it."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from graphs.kernels.launch import launch
from graphs.kernels.norm.rms_norm_kernel import add_rms_norm_kernel, rms_norm_kernel

MIN_BLOCK = 1024


@torch.library.triton_op("deltaloom::rms_norm", mutates_args={})
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x * rsqrt(mean(x^2) + eps) * (1 + weight) over the last dim of x [..., D], fp32 inside.

    The result is contiguous. x is copied first unless its rows are evenly spaced.
    """
    rows = x.reshape(-1, x.shape[-1])
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if rows.shape[0] > 0:
        launch_rms_norm(rows, weight, out.view(rows.shape), eps)
    return out


@torch.library.triton_op("deltaloom::add_rms_norm", mutates_args={})
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of residual + x, and that sum, rounded to the input dtype before the norm.

    x, residual, both results: [T, D]. Rows may be any number of elements apart.
    """
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    new_residual = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.shape[0] > 0:
        launch_add_rms_norm(x, residual, weight, normed, new_residual, eps)
    return normed, new_residual


def block_shape(width: int) -> tuple[int, int, int]:
    """Rows and columns of a program's block, and its warps: a function of the width alone.

    So a row's bits do not depend on how many rows there are.
    """
    columns = triton.next_power_of_2(width)
    num_rows = max(1, MIN_BLOCK // columns)
    return num_rows, columns, min(16, max(4, num_rows * columns // MIN_BLOCK))


def launch_rms_norm(x: Tensor, weight: Tensor, out: Tensor, eps: float) -> None:
    """The kernel on x [N, D] with rows of unit stride, into a contiguous out [N, D]."""
    num_rows, width = x.shape
    block_m, block_d, num_warps = block_shape(width)
    launch(rms_norm_kernel)[(triton.cdiv(num_rows, block_m),)](
        x,
        weight,
        out,
        num_rows,
        width,
        x.stride(0),
        EPS=eps,
        BLOCK_M=block_m,
        BLOCK_D=block_d,
        num_warps=num_warps,
    )


def launch_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, normed: Tensor, new_residual: Tensor, eps: float
) -> None:
    """The kernel on x and residual [T, D], rows of unit stride, into contiguous results."""
    num_rows, width = x.shape
    assert x.stride(1) == 1 and residual.stride(1) == 1
    block_m, block_d, num_warps = block_shape(width)
    launch(add_rms_norm_kernel)[(triton.cdiv(num_rows, block_m),)](
        x,
        residual,
        weight,
        normed,
        new_residual,
        num_rows,
        width,
        x.stride(0),
        residual.stride(0),
        EPS=eps,
        BLOCK_M=block_m,
        BLOCK_D=block_d,
        num_warps=num_warps,
    )
