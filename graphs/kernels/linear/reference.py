"""Matrix products with a weight [N, K], in plain torch."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [M, K] times weight [N, K] transposed, [M, N].

    A single row on the CPU is a sum of products, fp32 inside: compiled, it reads the weight at
    two to three times the rate of the matrix library's matrix-vector product.
    """
    if x.shape[0] == 1 and x.device.type == "cpu":
        return (weight.float() * x.float()).sum(-1).to(x.dtype)[None]
    return F.linear(x, weight)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of the halves of gate_up [M, 2 * I]: [M, I], fp32 inside, rounded once."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def gated_linear(x: Tensor, gate_up: Tensor) -> Tensor:
    """swiglu of x [M, K] times gate_up [2 * I, K] (gate rows, then up rows): [M, I]."""
    return swiglu(linear(x, gate_up))
