# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator,assignment"
"""A few rows times a weight: every weight read once, products summed by fp32 multiply-adds.

One program owns BLOCK_N rows of the weight. A block is as wide as all its warps' 16-byte loads,
so that each lane meets the same columns of x and of every weight row: the main loop needs no
shared memory and no barrier. The order of a sum is lane by lane along K, then over lanes, then
over warps: it depends on the number of warps alone, so a row has the same bits for any MROWS,
BLOCK_N and STAGES.
"""

import triton
import triton.language as tl


@triton.jit
def load_block(p_block, m_block, IS_WHOLE: tl.constexpr):
    b = tl.load(p_block) if IS_WHOLE else tl.load(p_block, mask=m_block, other=0.0)
    return b.to(tl.float32)


@triton.jit
def start_row(x_ptr, row, num_rows, stride_x, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    # Rows past the last one repeat it: loads stay inside x, and nothing of them is stored.
    p_x = x_ptr + tl.minimum(row, num_rows - 1).to(tl.int64) * stride_x
    return p_x, tl.zeros([BLOCK_N, BLOCK_K], tl.float32)


@triton.jit
def add_block(row, b_w, o_k, m_k, EVEN_K: tl.constexpr):
    p_x, b_sum = row
    b_x = load_block(p_x + o_k, m_k, EVEN_K)
    return p_x, tl.fma(b_w, b_x[None, :], b_sum)


@triton.jit
def matvec_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    num_outputs,
    depth,
    stride_x,
    MROWS: tl.constexpr,
    GATED: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """out [num_rows, num_outputs] = x [num_rows, depth] times weight [.., depth] transposed.

    GATED: the weight holds num_outputs gate rows, then as many up rows; a program's BLOCK_N
    rows are gate and up rows in turn, and silu(gate) * up is stored.
    """
    if MROWS == 1:
        row_ids = (0,)
    elif MROWS == 2:
        row_ids = (0, 1)
    else:
        tl.static_assert(MROWS == 4)
        row_ids = (0, 1, 2, 3)
    o_w = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_w = o_w < (2 * num_outputs if GATED else num_outputs)
    o_row = o_w // 2 + (o_w % 2) * num_outputs if GATED else o_w
    o_row = tl.where(m_w, o_row, 0).to(tl.int64)
    o_k = tl.arange(0, BLOCK_K)
    p_w = weight_ptr + o_row[:, None] * depth + o_k[None, :]
    rows = [start_row(x_ptr, i_row, num_rows, stride_x, BLOCK_N, BLOCK_K) for i_row in row_ids]
    for start in tl.range(0, depth, BLOCK_K, num_stages=STAGES):
        m_k = start + o_k < depth
        b_w = load_block(p_w + start, m_k[None, :], EVEN_K)
        rows = [add_block(row, b_w, start + o_k, m_k, EVEN_K) for row in rows]
    for i_out in tl.static_range(MROWS):
        b_out = tl.sum(rows[i_out][1], axis=1)
        p_out = out_ptr + i_out * num_outputs
        if GATED:
            b_gate, b_up = tl.split(tl.reshape(b_out, [BLOCK_N // 2, 2]))
            b_out = b_gate * tl.sigmoid(b_gate) * b_up
            o_n = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
            tl.store(p_out + o_n, b_out, mask=(o_n < num_outputs) & (i_out < num_rows))
        else:
            tl.store(p_out + o_w, b_out, mask=m_w & (i_out < num_rows))
