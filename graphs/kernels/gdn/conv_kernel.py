"""Causal conv and silu of prefill rows, laid out chunk by chunk for the kernels that follow."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def conv_tile(
    row_ptr,
    conv_weight_ptr,
    ring_ptr,
    projected_stride,
    num_rows,
    num_past,
    position,
    channels,
    is_channel,
    NUM_CHANNELS: tl.constexpr,
    NUM_TAPS: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """silu(conv) of BLOCK_T rows, fp32 [BLOCK_T, channels], zero from num_rows on.

    row_ptr is the first row, at `position`; the num_past rows before it are the request's own.
    What lies further back is in the ring, or zero before position 0.
    """
    rows = tl.arange(0, BLOCK_T)
    total = tl.zeros([BLOCK_T, channels.shape[0]], tl.float32)
    for tap in tl.static_range(NUM_TAPS):
        sources = rows - (NUM_TAPS - 1) + tap
        is_row = (sources >= -num_past) & (rows < num_rows)
        x = tl.load(
            row_ptr + sources[:, None] * projected_stride + channels[None, :],
            mask=is_row[:, None] & is_channel[None, :],
            other=0.0,
        )
        weight = tl.load(conv_weight_ptr + channels * NUM_TAPS + tap, mask=is_channel, other=0.0)
        total += x.to(tl.float32) * weight.to(tl.float32)[None, :]
    if num_past < NUM_TAPS - 1:
        for tap in tl.static_range(NUM_TAPS - 1):
            sources = rows - (NUM_TAPS - 1) + tap
            is_past = (sources < -num_past) & (rows < num_rows) & (position + sources >= 0)
            ring_rows = (position + sources + NUM_TAPS) % NUM_TAPS
            x = tl.load(
                ring_ptr + ring_rows[:, None] * NUM_CHANNELS + channels[None, :],
                mask=is_past[:, None] & is_channel[None, :],
                other=0.0,
            )
            weight = tl.load(
                conv_weight_ptr + channels * NUM_TAPS + tap, mask=is_channel, other=0.0
            )
            total += x.to(tl.float32) * weight.to(tl.float32)[None, :]
    return total * tl.sigmoid(total)


@triton.jit
def store_key_products(k, products_ptr, lengths_ptr, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """Inverse lengths of the keys k [CHUNK, K], and the products of the unit keys, fp32."""
    rows = tl.arange(0, CHUNK)
    k_f32 = k.to(tl.float32)
    length = tl.rsqrt(tl.sum(k_f32 * k_f32, axis=1) + 1e-6)
    products = tl.dot(k, tl.trans(k), input_precision=PRECISION)
    products *= length[:, None] * length[None, :]
    tl.store(products_ptr + rows[:, None] * CHUNK + rows[None, :], products)
    tl.store(lengths_ptr + rows, length)


@triton.jit
def gdn_prefill_conv_kernel(
    projected_ptr,
    positions_ptr,
    row_starts_ptr,
    chunks_ptr,
    state_slots_ptr,
    conv_weight_ptr,
    conv_pool_ptr,
    queries_keys_ptr,
    values_ptr,
    products_ptr,
    lengths_ptr,
    projected_stride,
    conv_slot_stride,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    NUM_TAPS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (chunk, head of q, k or v).

    Writes queries_keys [NC, 2H, CHUNK, BLOCK_K] and values [NC, HV, BLOCK_V, CHUNK] in the model
    dtype, not normalised, zeros where a chunk or a head is shorter than its block. Of the keys
    also lengths [NC, H, CHUNK], inverse, and the products of unit keys [NC, H, CHUNK, CHUNK].
    """
    NUM_HEADS: tl.constexpr = 2 * H + HV
    NUM_CHANNELS: tl.constexpr = 2 * H * K + HV * V
    head = tl.program_id(0) % NUM_HEADS
    chunk = (tl.program_id(0) // NUM_HEADS).to(tl.int64)
    request = tl.load(chunks_ptr + 2 * chunk)
    first_row = tl.load(chunks_ptr + 2 * chunk + 1)
    request_row = tl.load(row_starts_ptr + request)
    num_rows = (tl.load(row_starts_ptr + request + 1) - first_row).to(tl.int32)
    if num_rows <= 0:
        return
    num_past = tl.minimum(first_row - request_row, NUM_TAPS).to(tl.int32)
    position = (tl.load(positions_ptr + request_row) + first_row - request_row).to(tl.int32)
    row_ptr = projected_ptr + first_row * projected_stride
    ring_ptr = conv_pool_ptr + tl.load(state_slots_ptr + request) * conv_slot_stride
    rows = tl.arange(0, CHUNK)
    dtype = values_ptr.dtype.element_ty
    if head < 2 * H:
        dims = tl.arange(0, BLOCK_K)
        mixed = conv_tile(
            row_ptr,
            conv_weight_ptr,
            ring_ptr,
            projected_stride,
            num_rows,
            num_past,
            position,
            head * K + dims,
            dims < K,
            NUM_CHANNELS,
            NUM_TAPS,
            CHUNK,
        ).to(dtype)
        tile_ptr = queries_keys_ptr + (chunk * (2 * H) + head) * (CHUNK * BLOCK_K)
        tl.store(tile_ptr + rows[:, None] * BLOCK_K + dims[None, :], mixed)
        if head >= H:
            k_tile = chunk * H + head - H
            products_ptr += k_tile * (CHUNK * CHUNK)
            store_key_products(mixed, products_ptr, lengths_ptr + k_tile * CHUNK, CHUNK, PRECISION)
    else:
        v_dims = tl.arange(0, BLOCK_V)
        v_head = head - 2 * H
        v = conv_tile(
            row_ptr,
            conv_weight_ptr,
            ring_ptr,
            projected_stride,
            num_rows,
            num_past,
            position,
            2 * H * K + v_head * V + v_dims,
            v_dims < V,
            NUM_CHANNELS,
            NUM_TAPS,
            CHUNK,
        ).to(dtype)
        value_ptr = values_ptr + (chunk * HV + v_head) * (BLOCK_V * CHUNK)
        tl.store(value_ptr + v_dims[:, None] * CHUNK + rows[None, :], tl.trans(v))
