"""Zero-centred RMSNorm, alone and behind the residual sum, against fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from graphs.kernels.norm import reference
from graphs.kernels.norm.ops import add_rms_norm, rms_norm
from tests.tolerances import KERNEL_BF16_RTOL, KERNEL_FP32_RTOL

EPS = 1e-6
TOLERANCES = {
    torch.float32: KERNEL_FP32_RTOL,
    torch.float16: KERNEL_BF16_RTOL,
    torch.bfloat16: KERNEL_BF16_RTOL,
}
SANITIZED_SIZE = pytest.param(65, 500, marks=pytest.mark.sanitize)
SIZES = [(1, 5120), (63, 32), SANITIZED_SIZE, (500, 63)]
INTERPRETED_DTYPES = [torch.float32, torch.float16]  # the interpreter cuts bf16 off, unrounded


pytestmark = pytest.mark.usefixtures("poisoned_memory")


def random_rows(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    """Rows that lie between NaN."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.full((*shape[:-1], shape[-1] + 16), float("nan"))
    wide[..., : shape[-1]] = torch.randn(shape, generator=generator) * 3 + 0.5
    return wide.to(device, dtype)[..., : shape[-1]]


def norm_fp64(x: Tensor, weight: Tensor) -> Tensor:
    x = x.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * (1.0 + weight.double())


def relative_error(result: Tensor, expected: Tensor) -> float:
    error = (result.double() - expected).norm() / expected.norm()
    return float(error)


def check_rms_norm(num_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
    x = random_rows(num_rows, width, dtype=dtype, device=device)
    weight = random_rows(width, dtype=dtype, device=device, seed=1)
    expected = norm_fp64(x, weight)
    result = rms_norm(x, weight, EPS)
    assert result.dtype == dtype and result.is_contiguous()
    assert relative_error(result, expected) < TOLERANCES[dtype]
    assert relative_error(reference.rms_norm(x, weight, EPS), expected) < TOLERANCES[dtype]


def check_add_rms_norm(num_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
    x = random_rows(num_rows, width, dtype=dtype, device=device)
    residual = random_rows(num_rows, width, dtype=dtype, device=device, seed=2) * 30
    weight = random_rows(width, dtype=dtype, device=device, seed=1)
    before = x.clone(), residual.clone()
    for add_and_norm in (add_rms_norm, reference.add_rms_norm):
        normed, new_residual = add_and_norm(x, residual, weight, EPS)
        assert torch.equal(new_residual, residual + x)
        assert relative_error(normed, norm_fp64(new_residual, weight)) < TOLERANCES[dtype]
    normed, new_residual = add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(normed, rms_norm(new_residual, weight, EPS))
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])


@pytest.mark.parametrize("dtype", INTERPRETED_DTYPES)
@pytest.mark.parametrize(("num_rows", "width"), SIZES)
def test_rms_norm_matches_fp64(
    num_rows: int, width: int, dtype: torch.dtype, device: torch.device
) -> None:
    """E2: strided rows, widths around the block. Oracle: the formula in fp64."""
    check_rms_norm(num_rows, width, dtype, device)


@pytest.mark.parametrize("dtype", INTERPRETED_DTYPES)
@pytest.mark.parametrize(("num_rows", "width"), SIZES)
def test_add_rms_norm_rounds_the_sum_once(
    num_rows: int, width: int, dtype: torch.dtype, device: torch.device
) -> None:
    """E2: Oracle: the sum in torch, the norm of that sum alone, both bit for bit; fp64."""
    check_add_rms_norm(num_rows, width, dtype, device)


@pytest.mark.gpu
@pytest.mark.parametrize(("num_rows", "width"), [*SIZES, (8192, 5120)])
def test_norms_in_bf16(num_rows: int, width: int) -> None:
    """E2: the dtype and the sizes of real models. Oracle: the formulas in fp64."""
    check_rms_norm(num_rows, width, torch.bfloat16, torch.device("cuda"))
    check_add_rms_norm(num_rows, width, torch.bfloat16, torch.device("cuda"))


def test_rms_norm_takes_heads_and_any_strides(device: torch.device) -> None:
    """E2: [T, heads, D] views as attention makes them. Oracle: the formula in fp64."""
    pairs = random_rows(5, 3, 2, 32, dtype=torch.float32, device=device)
    weight = random_rows(32, dtype=torch.float32, device=device, seed=1)
    transposed = random_rows(32, 7, dtype=torch.float32, device=device).t()
    for x in (pairs[:, :, 0], pairs[:, :, 1], transposed):
        result = rms_norm(x, weight, EPS)
        assert result.shape == x.shape and result.is_contiguous()
        assert relative_error(result, norm_fp64(x, weight)) < KERNEL_FP32_RTOL


@pytest.mark.parametrize("width", [32, 300, 1500])
def test_a_norm_has_the_same_bits_whatever_the_rows_beside_it(
    width: int, device: torch.device
) -> None:
    """E2: Oracle: each row normed alone, bit for bit."""
    x = random_rows(9, width, dtype=torch.float16, device=device)
    weight = random_rows(width, dtype=torch.float16, device=device, seed=1)
    alone = torch.cat([rms_norm(row[None], weight, EPS) for row in x])
    assert torch.equal(rms_norm(x, weight, EPS), alone)
    sums = [add_rms_norm(row[None], row[None], weight, EPS)[0] for row in x]
    assert torch.equal(add_rms_norm(x, x, weight, EPS)[0], torch.cat(sums))


def test_no_rows_give_no_rows(device: torch.device) -> None:
    """E2: an empty batch launches nothing. Oracle: the shapes."""
    x = random_rows(0, 32, dtype=torch.float32, device=device)
    weight = random_rows(32, dtype=torch.float32, device=device)
    assert rms_norm(x, weight, EPS).shape == (0, 32)
    normed, new_residual = add_rms_norm(x, x, weight, EPS)
    assert normed.shape == new_residual.shape == (0, 32)
