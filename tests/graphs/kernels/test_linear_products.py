"""Products of rows with a weight against fp64, their bits against each other, swiglu."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from graphs.kernels.linear import reference
from graphs.kernels.linear.configs import OneRowConfig, max_matvec_rows, max_own_rows
from graphs.kernels.linear.ops import (
    gated_linear,
    launch_one_row,
    linear,
    multiply_few_rows,
    swiglu,
)
from tests.tolerances import KERNEL_BF16_RTOL, KERNEL_FP32_RTOL

TOLERANCES = {
    torch.float32: KERNEL_FP32_RTOL,
    torch.float16: KERNEL_BF16_RTOL,
    torch.bfloat16: KERNEL_BF16_RTOL,
}
# Rows, weight rows, depth: less than a block, a little more, no multiple of anything.
AWKWARD_SIZES = [(1, 65, 500), (2, 1, 63), (3, 63, 1), (8, 7, 1500), (9, 65, 500), (65, 63, 65)]
REAL_SIZES = [
    (1, 16480, 5120),
    (1, 5120, 17408),
    (1, 12352, 2048),
    (4, 5120, 17408),
    (8, 1024, 2048),
    (16, 14336, 5120),
]
# Weight rows, depth, weight rows a block, programs: programs with no, one and more blocks ahead.
ONE_ROW_SIZES = [(1, 2, 2, 132), (7, 512, 2, 4), (13, 1030, 1, 3), (27, 2560, 2, 4)]
INTERPRETED_DTYPES = [torch.float32, torch.float16]  # the interpreter cuts bf16 off, unrounded
BITWISE_WEIGHTS = [(16480, 5120), (34816, 5120), (5120, 17408), (12352, 2048), (2048, 4096)]


pytestmark = pytest.mark.usefixtures("poisoned_memory")


def random_operands(
    num_rows: int, num_weight_rows: int, depth: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """x, whose rows lie between NaN, and a weight that keeps its products near 1."""
    generator = torch.Generator().manual_seed(num_rows + depth)
    wide = torch.full((num_rows, depth + 24), float("nan"))
    wide[:, 8 : depth + 8] = torch.randn(num_rows, depth, generator=generator)
    weight = torch.randn(num_weight_rows, depth, generator=generator) * depth**-0.5
    return wide.to(device, dtype)[:, 8 : depth + 8], weight.to(device, dtype)


def relative_error(result: Tensor, expected: Tensor) -> float:
    error = (result.double() - expected).norm() / expected.norm()
    return float(error)


def check_linear(
    num_rows: int, num_weight_rows: int, depth: int, dtype: torch.dtype, device: torch.device
) -> None:
    x, weight = random_operands(num_rows, num_weight_rows, depth, dtype, device)
    result = linear(x, weight)
    assert result.dtype == dtype and result.is_contiguous()
    expected = x.double() @ weight.double().t()
    assert relative_error(result, expected) < TOLERANCES[dtype]


def check_gated_linear(
    num_rows: int, num_weight_rows: int, depth: int, dtype: torch.dtype, device: torch.device
) -> None:
    x, weight = random_operands(num_rows, 2 * num_weight_rows, depth, dtype, device)
    gate, up = (x.double() @ weight.double().t()).chunk(2, dim=-1)
    assert relative_error(gated_linear(x, weight), F.silu(gate) * up) < TOLERANCES[dtype]


def check_swiglu(num_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
    gate_up, _ = random_operands(num_rows, 1, 2 * width, dtype, device)
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert relative_error(swiglu(gate_up), F.silu(gate) * up) < TOLERANCES[dtype]


def check_row_bits(
    num_weight_rows: int, depth: int, dtype: torch.dtype, device: torch.device
) -> None:
    most = max_matvec_rows(num_weight_rows, depth)
    x, weight = random_operands(most, num_weight_rows, depth, dtype, device)
    for multiply, first in ((linear, 2), (gated_linear, 1)):
        together = multiply(x, weight)
        for num_rows in range(first, most + 1):
            rows = x[most - num_rows :].flip(0)
            expected = together[most - num_rows :].flip(0)
            assert torch.equal(multiply(rows, weight), expected), num_rows


@pytest.mark.parametrize("dtype", INTERPRETED_DTYPES)
@pytest.mark.parametrize(("num_rows", "num_weight_rows", "depth"), AWKWARD_SIZES)
def test_linear_is_the_product(
    num_rows: int, num_weight_rows: int, depth: int, dtype: torch.dtype, device: torch.device
) -> None:
    """E2: any number of rows, strided, times the weight. Oracle: the product in fp64."""
    check_linear(num_rows, num_weight_rows, depth, dtype, device)


@pytest.mark.gpu
@pytest.mark.parametrize(("num_rows", "num_weight_rows", "depth"), AWKWARD_SIZES + REAL_SIZES)
def test_linear_in_bf16(num_rows: int, num_weight_rows: int, depth: int) -> None:
    """E2: the dtype and the sizes of real models. Oracle: the product in fp64."""
    check_linear(num_rows, num_weight_rows, depth, torch.bfloat16, torch.device("cuda"))


@pytest.mark.parametrize("dtype", INTERPRETED_DTYPES)
@pytest.mark.parametrize(("num_rows", "num_weight_rows", "depth"), AWKWARD_SIZES)
def test_gated_linear_is_swiglu_of_the_product(
    num_rows: int, num_weight_rows: int, depth: int, dtype: torch.dtype, device: torch.device
) -> None:
    """E2: the fused gate, gate and up rows kept apart. Oracle: silu(gate) * up in fp64."""
    check_gated_linear(num_rows, num_weight_rows, depth, dtype, device)


@pytest.mark.gpu
@pytest.mark.parametrize(("num_rows", "num_weight_rows", "depth"), AWKWARD_SIZES + REAL_SIZES)
def test_gated_linear_in_bf16(num_rows: int, num_weight_rows: int, depth: int) -> None:
    """E2: the dtype and the sizes of real models. Oracle: silu(gate) * up in fp64."""
    check_gated_linear(num_rows, num_weight_rows, depth, torch.bfloat16, torch.device("cuda"))


@pytest.mark.parametrize("dtype", INTERPRETED_DTYPES)
@pytest.mark.parametrize(("num_rows", "width"), [(1, 63), (63, 65), (5, 500), (3, 1025), (500, 2)])
def test_swiglu_matches_fp64(
    num_rows: int, width: int, dtype: torch.dtype, device: torch.device
) -> None:
    """E2: strided rows, widths around the block. Oracle: silu(gate) * up in fp64."""
    check_swiglu(num_rows, width, dtype, device)


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_kernel_in_small(dtype: torch.dtype) -> None:
    """E2: one small case of every kernel. Oracle: the formulas in fp64."""
    device = torch.device("cuda")
    check_one_row((13, 1030, 1, 3), dtype, device)
    for num_rows in (3, 9):  # nine float32 rows are torch's
        check_linear(num_rows, 65, 500, dtype, device)
        check_gated_linear(num_rows, 65, 500, dtype, device)
    check_swiglu(3, 65, dtype, device)


def test_a_row_has_the_same_bits_whatever_the_rows_beside_it(device: torch.device) -> None:
    """E2: the matrix-vector kernel. Oracle: the most rows multiplied together, bit for bit.

    In float32, whose results show every change of the order of a sum.
    """
    check_row_bits(6, 1030, torch.float32, device)


@pytest.mark.gpu
@pytest.mark.parametrize(("num_weight_rows", "depth"), BITWISE_WEIGHTS)
def test_a_row_has_the_same_bits_at_real_sizes(num_weight_rows: int, depth: int) -> None:
    """E2: the matrix-vector kernel. Oracle: the most rows multiplied together, bit for bit."""
    check_row_bits(num_weight_rows, depth, torch.bfloat16, torch.device("cuda"))


def one_row_product(x: Tensor, weight: Tensor, block_n: int, max_programs: int) -> Tensor:
    """By the kernel of one row, into NaN; what lies behind the result must stay NaN."""
    num_outputs = weight.shape[0]
    memory = torch.empty(1, num_outputs + 64, dtype=x.dtype, device=x.device)
    launch_one_row(x, weight, memory[:, :num_outputs], OneRowConfig(block_n, max_programs))
    assert memory[:, num_outputs:].isnan().all()
    return memory[:, :num_outputs]


def check_one_row(
    size: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    num_weight_rows, depth, block_n, max_programs = size
    x, weight = random_operands(1, num_weight_rows, depth, dtype, device)
    result = one_row_product(x, weight, block_n, max_programs)
    assert relative_error(result, x.double() @ weight.double().t()) < TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", INTERPRETED_DTYPES)
@pytest.mark.parametrize("size", ONE_ROW_SIZES)
def test_one_row_is_multiplied(
    size: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    """E2: every block of every program, once. Oracle: the product in fp64, NaN behind it."""
    check_one_row(size, dtype, device)


@pytest.mark.gpu
@pytest.mark.parametrize("size", ONE_ROW_SIZES)
def test_one_row_is_multiplied_in_bf16(size: tuple[int, int, int, int]) -> None:
    """E2: pairs of bf16 in words. Oracle: the product in fp64, NaN behind it."""
    check_one_row(size, torch.bfloat16, torch.device("cuda"))


def test_one_row_has_the_same_bits_wherever_the_weight_rows_lie(device: torch.device) -> None:
    """E2: the kernel of one row. Oracle: each weight row multiplied alone, bit for bit."""
    x, weight = random_operands(1, 7, 1030, torch.float32, device)
    alone = torch.cat([one_row_product(x, row[None], 1, 1) for row in weight], dim=1)
    for block_n, max_programs in ((1, 3), (2, 2), (2, 132)):
        assert torch.equal(one_row_product(x, weight, block_n, max_programs), alone), block_n


@pytest.mark.gpu
@pytest.mark.parametrize(("num_weight_rows", "depth"), BITWISE_WEIGHTS)
def test_one_row_has_the_same_bits_at_real_sizes(num_weight_rows: int, depth: int) -> None:
    """E2: one row. Oracle: the same product with the weight's rows reversed, bit for bit."""
    device = torch.device("cuda")
    x, weight = random_operands(1, num_weight_rows, depth, torch.bfloat16, device)
    assert torch.equal(linear(x, weight.flip(0)), linear(x, weight).flip(1))


@pytest.mark.gpu
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize(("num_weight_rows", "depth"), BITWISE_WEIGHTS)
def test_rows_on_the_matrix_units_have_the_same_bits(
    num_weight_rows: int, depth: int, is_gated: bool
) -> None:
    """E2: few rows, as many as are ours. Oracle: the product of the most of them, bit for bit."""
    device = torch.device("cuda")
    first = max_matvec_rows(num_weight_rows, depth) + 1
    most = max_own_rows(num_weight_rows, depth, itemsize=2)
    x, weight = random_operands(most, num_weight_rows, depth, torch.bfloat16, device)
    multiply = gated_linear if is_gated else linear
    together = multiply(x, weight)
    for num_rows in {first, 8, 16, 17, 32, 33, most} & set(range(first, most + 1)):
        assert torch.equal(multiply(x[:num_rows], weight), together[:num_rows]), num_rows


@pytest.mark.parametrize("num_rows", [1, 3, 5, 9])
@pytest.mark.parametrize("is_gated", [False, True])
def test_nothing_is_written_past_the_last_row(
    num_rows: int, is_gated: bool, device: torch.device
) -> None:
    """E2: blocks that hang over the rows and the weight. Oracle: the NaN behind the result."""
    x, weight = random_operands(num_rows, 26 if is_gated else 27, 70, torch.float16, device)
    memory = torch.empty(num_rows + 64, 13 if is_gated else 27, dtype=x.dtype, device=device)
    multiply_few_rows(x, weight, memory[:num_rows], is_gated=is_gated)
    assert memory[:num_rows].isfinite().all()
    assert memory[num_rows:].isnan().all()


def test_no_rows_give_no_rows(device: torch.device) -> None:
    """E2: an empty batch launches nothing. Oracle: the shapes."""
    x, weight = random_operands(0, 6, 64, torch.float32, device)
    assert linear(x, weight).shape == (0, 6)
    assert gated_linear(x, weight).shape == (0, 3)
    assert swiglu(x).shape == (0, 32)


def test_references_match_fp64(device: torch.device) -> None:
    """E2: the references that run where Triton does not. Oracle: the formulas in fp64."""
    x, weight = random_operands(3, 10, 70, torch.float32, device)
    gate, up = (x.double() @ weight.double().t()).chunk(2, dim=-1)
    for rows in (x, x[:1]):
        expected = (F.silu(gate) * up)[: rows.shape[0]]
        assert relative_error(reference.gated_linear(rows, weight), expected) < KERNEL_FP32_RTOL
        product = torch.cat([gate, up], dim=-1)[: rows.shape[0]]
        assert relative_error(reference.linear(rows, weight), product) < KERNEL_FP32_RTOL
