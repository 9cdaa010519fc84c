"""Copies between host and device that the host does not wait for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def upload(
    values: Sequence[object], device: torch.device, dtype: torch.dtype = torch.int64
) -> Tensor:
    """A tensor of `values` on the device; the copy is ordered by the current stream.

    The pinned memory behind it is reused no sooner than the copy is done: torch sees to that.
    """
    is_cuda = device.type == "cuda"
    return torch.tensor(values, dtype=dtype, pin_memory=is_cuda).to(device, non_blocking=True)


def download(tensor: Tensor) -> Tensor:
    """A host copy of `tensor`, to be read only after the current stream has got there."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
