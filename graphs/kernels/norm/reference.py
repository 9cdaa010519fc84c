"""Root-mean-square norms in plain torch. All arithmetic is fp32, results in the input dtype."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Zero-centred RMSNorm over the last dim: x * rsqrt(mean(x^2) + eps) * (1 + weight)."""
    x_f32 = x.float()
    scaled = x_f32 * torch.rsqrt(x_f32.square().mean(-1, keepdim=True) + eps)
    return (scaled * (1.0 + weight.float())).to(x.dtype)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Plain-weight RMSNorm over the last dim, times silu(gate); x and gate [..., D]."""
    x_f32 = x.float()
    scaled = x_f32 * torch.rsqrt(x_f32.square().mean(-1, keepdim=True) + eps)
    normed = weight * scaled.to(gate.dtype)
    return (normed * F.silu(gate.float())).to(gate.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of residual + x, and that sum, rounded to the input dtype before the norm."""
    new_residual = residual + x
    return rms_norm(new_residual, weight, eps), new_residual
