"""The strides that all GDN kernels take for granted."""

from __future__ import annotations

from torch import Tensor


def check_layout(
    projected: Tensor, conv_weight: Tensor, conv_pool: Tensor, state_pool: Tensor
) -> None:
    """Rows of projected, conv_weight and the slots of both pools are dense in themselves.

    Rows and slots may lie any distance apart.
    """
    num_v_heads, head_v_dim, head_k_dim = state_pool.shape[1:]
    head_stride, *row_strides = state_pool.stride()[1:]
    assert projected.stride(1) == 1, projected.stride()
    assert conv_weight.is_contiguous(), conv_weight.stride()
    assert conv_pool.stride()[1:] == (conv_weight.shape[0], 1), conv_pool.stride()
    assert row_strides == [head_k_dim, 1], state_pool.stride()
    assert head_stride == head_v_dim * head_k_dim or num_v_heads == 1, state_pool.stride()
