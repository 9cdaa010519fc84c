"""What a verify step leaves for the commit: the recurrence's inputs of every row it scored.

Shapes: L layers, R requests, H key heads of K, HV value heads of V, C = 2 * H * K + HV * V conv
channels. A request's rows lie at its index in the batch, not at its slot.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class VerifyStash(NamedTuple):
    """Five tensors [R, rows, ...] of one layer, or [L, R, rows, ...] of all.

    conv_in [..., C] are the raw conv inputs; k [..., H * K] and v [..., HV * V] what conv and
    silu made of them, rounded, before the norm; all three in the model dtype. decay and
    beta [..., HV] are fp32. Each is an allocation of its own: two mutated inputs of one compiled
    block that alias each other make the compiler copy both.
    """

    conv_in: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor

    def layer(self, index: int) -> VerifyStash:
        """The views [R, rows, ...] of one layer."""
        return VerifyStash(*(tensor[index] for tensor in self))


def stash_widths(
    *, num_k_heads: int, num_v_heads: int, head_k_dim: int, head_v_dim: int
) -> tuple[int, int, int]:
    """Elements of conv_in, k and v of one row of one layer."""
    key_dim, value_dim = num_k_heads * head_k_dim, num_v_heads * head_v_dim
    return 2 * key_dim + value_dim, key_dim, value_dim


def stash_bytes_per_row(
    *, num_k_heads: int, num_v_heads: int, head_k_dim: int, head_v_dim: int, dtype_bytes: int
) -> int:
    """Bytes that one row of one request takes in one layer; `dtype_bytes` of the model's dtype."""
    widths = stash_widths(
        num_k_heads=num_k_heads,
        num_v_heads=num_v_heads,
        head_k_dim=head_k_dim,
        head_v_dim=head_v_dim,
    )
    return sum(widths) * dtype_bytes + 2 * num_v_heads * torch.float32.itemsize


def allocate_stash(
    num_layers: int,
    max_requests: int,
    rows_per_request: int,
    *,
    num_k_heads: int,
    num_v_heads: int,
    head_k_dim: int,
    head_v_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> VerifyStash:
    """The stash of all layers; left as it comes, since a commit reads only what a verify wrote."""
    widths = stash_widths(
        num_k_heads=num_k_heads,
        num_v_heads=num_v_heads,
        head_k_dim=head_k_dim,
        head_v_dim=head_v_dim,
    )
    rows = num_layers, max_requests, rows_per_request
    conv_in, k, v = (torch.empty(*rows, width, dtype=dtype, device=device) for width in widths)
    decay, beta = (
        torch.empty(*rows, num_v_heads, dtype=torch.float32, device=device) for _ in range(2)
    )
    return VerifyStash(conv_in, k, v, decay, beta)
