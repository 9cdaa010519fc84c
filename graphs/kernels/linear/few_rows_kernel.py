# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
"""Up to BLOCK_M rows times a weight on the matrix units, every weight read once.

The weight is the left operand, so its many rows fill the matrix instruction and the few rows
of x only its short side.
"""

import triton
import triton.language as tl


@triton.jit
def few_rows_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    num_outputs,
    depth,
    stride_x,
    GATED: tl.constexpr,
    EVEN_K: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """out [num_rows, num_outputs] = x [num_rows, depth] times weight [.., depth] transposed.

    GATED as in `matvec_kernel`. One program owns BLOCK_N rows of the weight and all of x.
    MASKED: rows past the last one are not read; else they repeat it, so that loads stay inside x.
    Twelve rows that repeat one take a tenth longer, but a mask of 64 rows takes longer too.
    """
    o_w = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_w = o_w < (2 * num_outputs if GATED else num_outputs)
    o_row = o_w // 2 + (o_w % 2) * num_outputs if GATED else o_w
    o_row = tl.where(m_w, o_row, 0).to(tl.int64)
    o_m = tl.arange(0, BLOCK_M)
    m_m = o_m < num_rows
    o_x = tl.minimum(o_m, num_rows - 1).to(tl.int64)
    o_k = tl.arange(0, BLOCK_K)
    p_w = weight_ptr + o_row[:, None] * depth + o_k[None, :]
    p_x = x_ptr + o_x[:, None] * stride_x + o_k[None, :]
    b_sum = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(0, depth, BLOCK_K, num_stages=STAGES):
        m_k = start + o_k < depth
        b_w = tl.load(p_w + start) if EVEN_K else tl.load(p_w + start, mask=m_k[None, :], other=0.0)
        if EVEN_K and not MASKED:
            b_x = tl.load(p_x + start)
        elif EVEN_K:
            b_x = tl.load(p_x + start, mask=m_m[:, None], other=0.0)
        else:
            b_x = tl.load(p_x + start, mask=m_m[:, None] & m_k[None, :], other=0.0)
        b_sum = tl.dot(b_w, tl.trans(b_x), b_sum, input_precision="ieee")
    if GATED:
        b_pairs = tl.permute(tl.reshape(b_sum, [BLOCK_N // 2, 2, BLOCK_M]), [0, 2, 1])
        b_gate, b_up = tl.split(b_pairs)
        b_out = b_gate * tl.sigmoid(b_gate) * b_up
        o_n = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    else:
        b_out = b_sum
        o_n = o_w
    p_out = out_ptr + o_m[:, None].to(tl.int64) * num_outputs + o_n[None, :]
    m_out = m_m[:, None] & (o_n < num_outputs)[None, :]
    tl.store(p_out, tl.trans(b_out), mask=m_out)
