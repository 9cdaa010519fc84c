"""Where kernel tests run: interpreted on the CPU, and for real on CUDA (marker gpu)."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("kernels are interpreted only where there is no GPU")
    return torch.device(request.param)
