"""The strides that all GDN kernels take for granted."""

from __future__ import annotations

import torch
from torch import Tensor

from graphs.kernels.gdn.stash import VerifyStash, stash_widths


def check_layout(
    projected: Tensor, conv_weight: Tensor, conv_pool: Tensor, state_pool: Tensor
) -> None:
    """Rows of projected, conv_weight and the slots of both pools are dense in themselves.

    Rows and slots may lie any distance apart.
    """
    assert projected.stride(1) == 1, projected.stride()
    assert conv_weight.is_contiguous(), conv_weight.stride()
    assert conv_pool.shape[2] == conv_weight.shape[0], conv_pool.shape
    check_pools(conv_pool, state_pool)


def check_pools(conv_pool: Tensor, state_pool: Tensor) -> None:
    """What a slot holds is dense in itself; pools of one layer or of all."""
    num_v_heads, head_v_dim, head_k_dim = state_pool.shape[-3:]
    head_stride, *row_strides = state_pool.stride()[-3:]
    assert conv_pool.stride()[-2:] == (conv_pool.shape[-1], 1), conv_pool.stride()
    assert row_strides == [head_k_dim, 1], state_pool.stride()
    assert head_stride == head_v_dim * head_k_dim or num_v_heads == 1, state_pool.stride()


def check_stash(
    stash: VerifyStash, conv_pool: Tensor, state_pool: Tensor, num_k_heads: int
) -> None:
    """Every tensor of the stash is dense, with the rows of the others and its own width."""
    num_v_heads, head_v_dim, head_k_dim = state_pool.shape[-3:]
    conv_in_width, k_width, v_width = stash_widths(
        num_k_heads=num_k_heads,
        num_v_heads=num_v_heads,
        head_k_dim=head_k_dim,
        head_v_dim=head_v_dim,
    )
    rows = stash.k.shape[:-1]
    widths = conv_in_width, k_width, v_width, num_v_heads, num_v_heads
    for tensor, width in zip(stash, widths, strict=True):
        assert tensor.shape == (*rows, width), tensor.shape
        assert tensor.is_contiguous(), tensor.stride()
    assert stash.conv_in.dtype == conv_pool.dtype, stash.conv_in.dtype
    assert stash.decay.dtype == stash.beta.dtype == torch.float32
