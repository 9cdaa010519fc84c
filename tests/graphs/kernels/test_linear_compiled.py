"""Products and norms inside torch.compile."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from graphs.kernels.linear.ops import gated_linear, linear
from graphs.kernels.norm.ops import add_rms_norm, rms_norm

EPS = 1e-6


def forward(x: Tensor, residual: Tensor, weights: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """What a feed-forward block does with its rows."""
    norm, gate_up, down = weights
    normed, residual = add_rms_norm(x, residual, norm, EPS)
    return rms_norm(linear(gated_linear(normed, gate_up), down), norm, EPS) + residual


@pytest.mark.gpu
def test_compiled_products_follow_the_batch_size() -> None:
    """E5: no graph break, any number of rows. Oracle: the same ops, uncompiled."""
    generator = torch.Generator("cuda").manual_seed(0)
    options = {"generator": generator, "device": "cuda", "dtype": torch.bfloat16}
    x, residual = (torch.randn(80, 512, **options) for _ in range(2))  # type: ignore[call-overload]
    shapes = [(512,), (512, 512), (512, 256)]
    norm, gate_up, down = (torch.randn(shape, **options) * 0.05 for shape in shapes)  # type: ignore[call-overload]
    compiled = torch.compile(forward, fullgraph=True)
    for num_rows in (1, 2, 3, 4, 5, 16, 17, 80):
        rows = x[:num_rows], residual[:num_rows]
        expected = forward(*rows, (norm, gate_up, down))
        assert torch.equal(compiled(*rows, (norm, gate_up, down)), expected), num_rows


@pytest.mark.gpu
def test_compiled_product_of_one_row() -> None:
    """E5: the kernel of one row, which large weights have. Oracle: the same op, uncompiled."""
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(1, 1000, generator=generator, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(8500, 1000, generator=generator, device="cuda", dtype=torch.bfloat16)
    compiled = torch.compile(linear, fullgraph=True)
    assert torch.equal(compiled(x, weight), linear(x, weight))
