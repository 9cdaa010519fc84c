"""Which kernel multiplies how many rows, and with which blocks. Plain functions of shapes.

A block of the matrix-vector kernel is as wide as its warps' 16-byte loads, and the order of its
sums follows from the number of warps alone. That number is therefore a function of the weight;
what may depend on the number of rows (BLOCK_N, stages) changes no bit of a result. The
matrix-unit kernel has one configuration a weight. Numbers chosen from times on an H200.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_MATVEC_ROWS = 4
MAX_FEW_ROWS = 64
WARP_LOAD_BYTES = 32 * 16
# Elements. Up to a small weight, starting a kernel takes longer than reading it.
SMALL_WEIGHT, LARGE_WEIGHT = 2**23, 3 * 2**23


@dataclass(frozen=True)
class MatvecConfig:
    """num_warps fixes the bits of a sum; block_n (weight rows a program) and stages do not."""

    num_warps: int
    block_n: int
    num_stages: int

    def block_k(self, itemsize: int) -> int:
        """Columns that all warps load at once."""
        return self.num_warps * WARP_LOAD_BYTES // itemsize


@dataclass(frozen=True)
class FewRowsConfig:
    """Blocks of the matrix-unit kernel; block_n, block_k and num_warps fix the bits of a sum."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def pad_rows(num_rows: int, smallest: int, largest: int) -> int:
    """The smallest of smallest, 2 * smallest, ..., largest that holds num_rows."""
    padded = smallest
    while padded < largest and num_rows > padded:
        padded *= 2
    return padded


def max_matvec_rows(num_weight_rows: int, depth: int) -> int:
    """Up to how many rows multiply-adds keep up with the reading of the weight."""
    return MAX_MATVEC_ROWS if num_weight_rows * depth <= SMALL_WEIGHT else 2


def max_own_rows(num_weight_rows: int, depth: int, itemsize: int) -> int:
    """Up to how many rows our kernels take; more go to torch's product.

    Up to there they are faster at the measured weights, or as fast within a few percent. The
    matrix-unit kernel takes no float32: it would not use the matrix units.
    """
    if itemsize > 2:
        return max_matvec_rows(num_weight_rows, depth)
    if num_weight_rows * depth <= SMALL_WEIGHT:
        return 16
    return 32 if num_weight_rows * depth <= LARGE_WEIGHT else MAX_FEW_ROWS


def matvec_config(num_rows: int, num_weight_rows: int, depth: int) -> MatvecConfig:
    """For num_rows in (1, 2, 4) and a weight [num_weight_rows, depth]."""
    if num_weight_rows * depth <= SMALL_WEIGHT:
        return MatvecConfig(num_warps=2, block_n=8 if num_rows == 1 else 4, num_stages=4)
    if num_weight_rows < 8192:
        return MatvecConfig(num_warps=1, block_n=8, num_stages=4)
    num_warps = 1 if depth <= 2048 else 2
    return MatvecConfig(num_warps, block_n=4, num_stages=1 if num_rows == 1 else 4)


def few_rows_config(num_weight_rows: int, *, is_gated: bool) -> FewRowsConfig:
    """For up to MAX_FEW_ROWS rows and a weight of num_weight_rows rows."""
    if num_weight_rows >= 8192 and not is_gated:
        return FewRowsConfig(block_n=128, block_k=128, num_warps=8, num_stages=4)
    return FewRowsConfig(block_n=64, block_k=128, num_warps=4, num_stages=6)
