"""Which kernel multiplies how many rows, and with which blocks. Plain functions of shapes.

A block of the matrix-vector kernels is as wide as its warps' 16-byte loads, and the order of its
sums follows from the number of warps alone. That number is therefore a function of the weight
and the kernel; what may depend on the number of rows (BLOCK_N, stages) changes no bit of a
result. The matrix-unit kernel adds the products of a sum in the same order whatever its blocks, so
that theirs may depend on the number of rows too. Numbers chosen from times on an H200.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_MATVEC_ROWS = 4
MIN_MATRIX_ROWS, MAX_FEW_ROWS = 16, 64
WARP_LOAD_BYTES = 32 * 16
NUM_SMS = 132
# What the kernel of one row is measured for. Its registers hold two blocks of weight rows.
ONE_ROW_WARPS = 4
MAX_ONE_ROW_PIECES = 17
MIN_ONE_ROW_WEIGHT, MAX_ONE_ROW_WEIGHT_ROWS = 2**23, 2**16
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
class OneRowConfig:
    """block_n: weight rows a block; max_programs: what fits the GPU at once. No bit follows."""

    block_n: int
    max_programs: int


@dataclass(frozen=True)
class FewRowsConfig:
    """Blocks of the matrix-unit kernel: 16 columns after 16 enter a sum, whichever they are."""

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


def one_row_block_k(itemsize: int) -> int:
    """Columns of a piece: all warps' 16-byte loads side by side."""
    return ONE_ROW_WARPS * WARP_LOAD_BYTES // itemsize


def one_row_config(num_weight_rows: int, depth: int, itemsize: int) -> OneRowConfig | None:
    """For one row and a plain weight [num_weight_rows, depth]; None: the matrix-vector kernel.

    Whether there is one, as all bits of the result, is a function of the weight.
    """
    pieces = -(-depth // one_row_block_k(itemsize))
    is_measured = (
        num_weight_rows * depth >= MIN_ONE_ROW_WEIGHT
        and num_weight_rows <= MAX_ONE_ROW_WEIGHT_ROWS
        and pieces <= MAX_ONE_ROW_PIECES
    )
    if not is_measured or depth * itemsize % 4 != 0:
        return None
    if pieces > 5:  # As many programs as the registers of an SM hold.
        num_programs = 4 if pieces <= 6 else 3 if pieces <= 8 else 2
        return OneRowConfig(block_n=1, max_programs=num_programs * NUM_SMS)
    return OneRowConfig(block_n=2, max_programs=(8 if pieces <= 2 else 4) * NUM_SMS)


def few_rows_config(padded_rows: int, num_weight_rows: int, *, is_gated: bool) -> FewRowsConfig:
    """For padded_rows in (16, 32, 64) and a weight of num_weight_rows rows."""
    if is_gated:
        # Few stages: several programs an SM, so that no wave of them is left nearly empty.
        block_n = 64 if padded_rows == 16 else 128
        return FewRowsConfig(block_n=block_n, block_k=64, num_warps=4, num_stages=3)
    if num_weight_rows >= 8192:
        return FewRowsConfig(block_n=128, block_k=128, num_warps=8, num_stages=4)
    # As many stages as shared memory holds.
    num_stages = 6 if padded_rows == 64 else 8
    return FewRowsConfig(block_n=64, block_k=128, num_warps=4, num_stages=num_stages)
