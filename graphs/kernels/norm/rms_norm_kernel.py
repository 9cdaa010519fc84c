# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
"""Zero-centred RMSNorm, alone and behind the residual sum."""

import triton
import triton.language as tl


@triton.jit
def normalise(b_x, b_weight, width, EPS: tl.constexpr):
    """b_x [rows, D] fp32, zero past the width, times rsqrt(mean square + eps) * (1 + weight)."""
    b_mean = tl.sum(b_x * b_x, axis=1) / width
    return b_x * tl.rsqrt(b_mean + EPS)[:, None] * (1.0 + b_weight.to(tl.float32))


@triton.jit
def rms_norm_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    width,
    stride_x,
    EPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """out [num_rows, width] from x, whose rows are stride_x apart; BLOCK_M rows a program."""
    o_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    o_d = tl.arange(0, BLOCK_D)[None, :]
    m_d = o_d < width
    m_x = (o_m < num_rows) & m_d
    # First of all: after the mean, which no load can pass, it would be waited for.
    b_weight = tl.load(weight_ptr + o_d, mask=m_d, other=0.0)
    b_x = tl.load(x_ptr + o_m * stride_x + o_d, mask=m_x, other=0.0).to(tl.float32)
    b_out = normalise(b_x, b_weight, width, EPS)
    tl.store(out_ptr + o_m * width + o_d, b_out, mask=m_x)


@triton.jit
def add_rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    normed_ptr,
    sum_ptr,
    num_rows,
    width,
    stride_x,
    stride_residual,
    EPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """sum = residual + x, rounded; normed = the norm of the rounded sum. BLOCK_M rows a program."""
    o_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    o_d = tl.arange(0, BLOCK_D)[None, :]
    m_d = o_d < width
    m_x = (o_m < num_rows) & m_d
    b_weight = tl.load(weight_ptr + o_d, mask=m_d, other=0.0)
    b_x = tl.load(x_ptr + o_m * stride_x + o_d, mask=m_x, other=0.0)
    b_residual = tl.load(residual_ptr + o_m * stride_residual + o_d, mask=m_x, other=0.0)
    b_sum = (b_residual.to(tl.float32) + b_x.to(tl.float32)).to(b_residual.dtype)
    tl.store(sum_ptr + o_m * width + o_d, b_sum, mask=m_x)
    b_normed = normalise(b_sum.to(tl.float32), b_weight, width, EPS)
    tl.store(normed_ptr + o_m * width + o_d, b_normed, mask=m_x)
