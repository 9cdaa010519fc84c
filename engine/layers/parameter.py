"""Weights as inference wants them: uninitialised, without gradients."""

from __future__ import annotations

import torch
from torch import nn


def empty_weight(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """A parameter whose values the loader fills in."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
