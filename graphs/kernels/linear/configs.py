"""Which kernel multiplies how many rows, and with which blocks. Plain functions of shapes.

A block of the matrix-vector kernel is as wide as its warps' 16-byte loads, and the order of its
sums follows from the number of warps alone. That number is therefore a function of the weight;
what may depend on the number of rows (BLOCK_N, stages) changes no bit of a result.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_MATVEC_ROWS = 8
MAX_FEW_ROWS = 64
WARP_LOAD_BYTES = 32 * 16


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
    """Blocks of the matrix-unit kernel; block_k and num_warps fix the bits of a sum."""

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


def matvec_config(num_rows: int, num_weight_rows: int, depth: int) -> MatvecConfig:
    """For num_rows in (1, 2, 4, 8) and a weight [num_weight_rows, depth]."""
    num_warps = 2 if depth <= 1024 else 4
    if num_rows > 2:
        return MatvecConfig(num_warps, block_n=2, num_stages=3)
    if num_weight_rows < 8192 and depth > 1024:
        return MatvecConfig(num_warps, block_n=2, num_stages=1)
    return MatvecConfig(num_warps, block_n=4, num_stages=1)


def few_rows_config(num_weight_rows: int, depth: int) -> FewRowsConfig:
    """For up to MAX_FEW_ROWS rows and a weight [num_weight_rows, depth]."""
    if num_weight_rows >= 8192:
        return FewRowsConfig(block_n=64, block_k=128, num_warps=4, num_stages=4)
    block_k = 128 if depth >= 1024 else 64
    return FewRowsConfig(block_n=16, block_k=block_k, num_warps=2, num_stages=5)


def max_few_rows(num_weight_rows: int, depth: int, itemsize: int) -> int:
    """Up to how many rows the matrix-unit kernel is used; more go to torch's product.

    In float32 it would not use the matrix units at all.
    """
    if itemsize > 2:
        return MAX_MATVEC_ROWS
    return MAX_FEW_ROWS
