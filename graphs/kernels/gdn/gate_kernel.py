"""The two gates of a value head, for prefill and decode alike."""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def log_gates(a, b, a_log, dt_bias):
    """Log decay -exp(A_log) softplus(a + dt_bias) and write strength sigmoid(b), fp32."""
    shifted = a.to(tl.float32) + dt_bias
    # log(1 + e) as accurate for small e as for large: log1p is not there for the interpreter.
    grown = tl.exp(tl.minimum(shifted, 20.0))
    rounded = 1.0 + grown
    excess = tl.where(rounded == 1.0, 1.0, rounded - 1.0)
    log1p = tl.where(rounded == 1.0, grown, tl.log(rounded) * (grown / excess))
    softplus = tl.where(shifted > 20.0, shifted, log1p)
    return -tl.exp(a_log) * softplus, tl.sigmoid(b.to(tl.float32))
