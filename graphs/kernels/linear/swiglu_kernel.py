# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
"""silu(gate) * up, element by element."""

import triton
import triton.language as tl


@triton.jit
def swiglu_kernel(gate_up_ptr, out_ptr, width, stride_gate_up, BLOCK: tl.constexpr):
    """out [rows, width] from gate_up [rows, 2 * width]; one program per row and block."""
    i_row = tl.program_id(0).to(tl.int64)
    o_n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_n = o_n < width
    p_gate = gate_up_ptr + i_row * stride_gate_up + o_n
    b_gate = tl.load(p_gate, mask=m_n).to(tl.float32)
    b_up = tl.load(p_gate + width, mask=m_n).to(tl.float32)
    b_out = b_gate * tl.sigmoid(b_gate) * b_up
    tl.store(out_ptr + i_row * width + o_n, b_out, mask=m_n)
