"""Where kernel tests run: interpreted on the CPU, and for real on CUDA (marker gpu)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

INT_POISON = 2**30


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("kernels are interpreted only where there is no GPU")
    return torch.device(request.param)


@pytest.fixture
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an op allocates starts as NaN, or as integers that no index may be."""

    def poison(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def poisoned(*args: Any, **options: Any) -> Tensor:
            memory = allocate(*args, **options)
            if memory.is_floating_point():
                # torch.compile makes tensors that require grad; those it fills itself.
                return memory if memory.requires_grad else memory.fill_(torch.nan)
            if memory.dtype == torch.bool:
                return memory.fill_(True)
            return memory.fill_(min(INT_POISON, torch.iinfo(memory.dtype).max))

        return poisoned

    monkeypatch.setattr(torch, "empty", poison(torch.empty))
    monkeypatch.setattr(torch.Tensor, "new_empty", poison(torch.Tensor.new_empty))
