# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator,attr-defined"
"""Norm, rotate and store: what stands between the qkv product and attention.

One program per (block of rows, query or key/value head). Arithmetic is fp32, rounded once.
"""

from __future__ import annotations

import triton
import triton.language as tl

# pi / 2 in three parts: a multiple of up to 2^13 of the first two is exact in fp32, so the
# reduced angle is good to the last bit even where a * b + c rounds twice.
TWO_OVER_PI = tl.constexpr(0.6366197723675814)
HALF_PI_HIGH = tl.constexpr(1.5703125)
HALF_PI_MIDDLE = tl.constexpr(0.00048375129699707031)
HALF_PI_LOW = tl.constexpr(7.5497899548918822e-08)


@triton.jit
def sine_cosine(angle):
    """sin and cos in fp32 for 0 <= angle < 2^20, Taylor series on [-pi/4, pi/4].

    tl.sin and tl.cos reserve local memory for angles far beyond any position.
    """
    quarters = tl.floor(angle * TWO_OVER_PI + 0.5)
    x = tl.fma(-quarters, HALF_PI_HIGH, angle)
    x = tl.fma(-quarters, HALF_PI_MIDDLE, x)
    x = tl.fma(-quarters, HALF_PI_LOW, x)
    z = x * x
    sine = x + x * z * (-1 / 6 + z * (1 / 120 + z * (-1 / 5040 + z * (1 / 362880))))
    cosine = 1.0 + z * (-0.5 + z * (1 / 24 + z * (-1 / 720 + z * (1 / 40320))))
    quadrant = quarters.to(tl.int32) & 3
    is_swapped = (quadrant & 1) == 1
    turned_sine = tl.where(is_swapped, cosine, sine)
    turned_cosine = tl.where(is_swapped, sine, cosine)
    return (
        tl.where(quadrant >= 2, -turned_sine, turned_sine),
        tl.where((quadrant == 1) | (quadrant == 2), -turned_cosine, turned_cosine),
    )


@triton.jit
def norm_rotate_store(
    source_ptr,
    o_source,
    weight_ptr,
    inv_freq_ptr,
    b_position,
    target_ptr,
    o_target,
    m_load,
    m_store,
    EPS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
):
    """One head of a block of rows. o_source and o_target are the offsets of the rows' heads."""
    o_d = tl.arange(0, D_PAD)
    p_source = source_ptr + o_source[:, None]
    p_target = target_ptr + o_target[:, None]
    m_d = o_d < D
    b_x = tl.load(p_source + o_d, mask=m_load[:, None] & m_d, other=0.0).to(tl.float32)
    b_w = 1.0 + tl.load(weight_ptr + o_d, mask=m_d, other=0.0).to(tl.float32)
    # The turned dims again, as two tiles that pair up: they are still in L1.
    o_h = tl.arange(0, HALF_PAD)
    m_h = o_h < HALF
    m_half = m_load[:, None] & m_h
    b_first = tl.load(p_source + o_h, mask=m_half, other=0.0).to(tl.float32)
    b_second = tl.load(p_source + HALF + o_h, mask=m_half, other=0.0).to(tl.float32)
    b_w_first = 1.0 + tl.load(weight_ptr + o_h, mask=m_h, other=0.0).to(tl.float32)
    b_w_second = 1.0 + tl.load(weight_ptr + HALF + o_h, mask=m_h, other=0.0).to(tl.float32)
    b_inv_freq = tl.load(inv_freq_ptr + o_h, mask=m_h, other=0.0)
    b_sine, b_cosine = sine_cosine(b_position.to(tl.float32)[:, None] * b_inv_freq)

    b_scale = tl.rsqrt(tl.sum(b_x * b_x, axis=1) / D + EPS)[:, None]
    b_rest = b_x * b_scale * b_w
    m_rest = m_store[:, None] & m_d & (o_d >= 2 * HALF)
    tl.store(p_target + o_d, b_rest.to(target_ptr.dtype.element_ty), mask=m_rest)
    b_first = b_first * b_scale * b_w_first
    b_second = b_second * b_scale * b_w_second
    b_turned = b_first * b_cosine - b_second * b_sine
    m_half = m_store[:, None] & m_h
    tl.store(p_target + o_h, b_turned.to(target_ptr.dtype.element_ty), mask=m_half)
    b_turned = b_second * b_cosine + b_first * b_sine
    tl.store(p_target + HALF + o_h, b_turned.to(target_ptr.dtype.element_ty), mask=m_half)


@triton.jit(do_not_specialize=["num_rows"])
def prepare_qkv_kernel(
    qkv_ptr,
    q_norm_ptr,
    k_norm_ptr,
    inv_freq_ptr,
    positions_ptr,
    kv_slots_ptr,
    k_pool_ptr,
    v_pool_ptr,
    q_ptr,
    num_rows,
    qkv_stride,
    EPS: tl.constexpr,
    HQ: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    i_head = tl.program_id(0) % (HQ + H)
    i_block = tl.program_id(0) // (HQ + H)
    o_t = i_block.to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    m_t = o_t < num_rows
    b_position = tl.load(positions_ptr + o_t, mask=m_t, other=0)
    o_qkv = o_t * qkv_stride
    if i_head < HQ:
        norm_rotate_store(
            qkv_ptr, o_qkv + i_head * 2 * D,
            q_norm_ptr, inv_freq_ptr, b_position,
            q_ptr, (o_t * HQ + i_head) * D,
            m_t, m_t, EPS,
            D, D_PAD, HALF, HALF_PAD,
        )  # fmt: skip
    else:
        i_h = i_head - HQ
        b_slot = tl.load(kv_slots_ptr + o_t, mask=m_t, other=0)
        m_slot = b_slot >= PAGE_SIZE  # page 0 is padding
        o_pool = (b_slot * H + i_h) * D
        o_d = tl.arange(0, D_PAD)
        m_d = o_d < D
        p_v = qkv_ptr + (o_qkv + (2 * HQ + H + i_h) * D)[:, None] + o_d
        b_v = tl.load(p_v, mask=m_t[:, None] & m_d, other=0.0)
        norm_rotate_store(
            qkv_ptr, o_qkv + (2 * HQ + i_h) * D,
            k_norm_ptr, inv_freq_ptr, b_position,
            k_pool_ptr, o_pool,
            m_t, m_slot, EPS,
            D, D_PAD, HALF, HALF_PAD,
        )  # fmt: skip
        tl.store(v_pool_ptr + o_pool[:, None] + o_d, b_v, mask=m_slot[:, None] & m_d)
