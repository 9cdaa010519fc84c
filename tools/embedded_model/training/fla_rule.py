"""The gated delta rule of flash-linear-attention; imported only when it is asked for."""

import fla.ops.common.chunk_o
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from torch import Tensor

# fla-core 0.6.0 refuses its backward on Hopper with Triton 3.4.0 to 3.7.0 (its issue 640): a key
# block of 64 is miscompiled. Heads of 128 have blocks of 128, so the guard is lifted here; every
# gradient is compared with plain torch before this rule is used.
fla.ops.common.chunk_o.TRITON_ABOVE_3_7_1 = True


def fla_delta_rule(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """See `gdn.DeltaRule`."""
    output, _ = chunk_gated_delta_rule(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        log_decay,
        beta.to(q.dtype),
        use_qk_l2norm_in_kernel=True,
    )
    result: Tensor = output
    return result
