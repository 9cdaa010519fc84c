"""Block sizes of the mixture-of-experts kernels: plain functions of shapes and dtype.

The tiles are chosen from a sweep on an H200 at the sizes of Qwen3.6-35B-A3B (hidden 2048,
256 experts, top 8, inner 512) with 16, 64, 512, 2048 and 8192 rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

MAX_PAIR_ROWS = 2  # up to here each pair streams its own expert; with 4 rows tiles are faster
LANE_WORDS_AHEAD = 128  # registers of a lane that down weights on their way may take
MAX_SINGLE_ROUTES = 64  # up to here a program of the top-k takes one row
MAX_FEW_ROWS = 256  # up to here the router splits the hidden dim to fill the GPU
MIN_MANY_ROWS = 4096  # from here on programs of half the warps choose and group


@dataclass(frozen=True)
class DotConfig:
    """Blocks of a `tl.dot` loop: rows of x, rows of the weight, depth."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class RouterConfig:
    """The router's product, splits of the hidden dim, rows per program of the top-k, warps."""

    dot: DotConfig
    splits: int
    route_rows: int
    route_warps: int
    group_warps: int = 8


@dataclass(frozen=True)
class VectorConfig:
    """Blocks of a matrix-vector product: rows of the weight, depth."""

    block_n: int
    block_k: int
    num_warps: int


@dataclass(frozen=True)
class PairConfig:
    """The matrix-vector path; the down weights of slots_ahead experts are loaded before the
    first product."""

    gate_up: VectorConfig
    down: VectorConfig
    slots_ahead: int


@dataclass(frozen=True)
class GroupedConfig:
    """The grouped path; both products run over the same tiles, so their block_m is one."""

    gate_up: DotConfig
    down: DotConfig
    sum_block: int = 1024

    def __post_init__(self) -> None:
        assert self.gate_up.block_m == self.down.block_m, self


def router_config(num_rows: int, hidden: int, num_experts: int, dtype: torch.dtype) -> RouterConfig:
    """The same sums for every number of rows up to MAX_FEW_ROWS: routing ignores the batch."""
    depth = max(16, triton.next_power_of_2(hidden))
    if dtype == torch.float32:
        return RouterConfig(DotConfig(16, 16, min(64, depth), 4, 2), 1, 8, 4)
    if num_rows <= MAX_FEW_ROWS:
        dot = DotConfig(16, 16, min(128, depth), 4, 3)
        route_rows = 1 if num_rows <= MAX_SINGLE_ROUTES else 4
        return RouterConfig(dot, max(1, min(8, hidden // dot.block_k)), route_rows, route_rows)
    # Many rows per program, because grouping reads the counts of all programs in each.
    dot = DotConfig(64, 64, min(64, depth), 4, 4)
    if num_experts > 256:
        return RouterConfig(dot, 1, 16, 8)
    if num_rows >= MIN_MANY_ROWS:
        return RouterConfig(dot, 1, 32, 8, 4)
    return RouterConfig(dot, 1, 32, 16)


def pair_config(
    num_rows: int, hidden: int, inner: int, top_k: int, dtype: torch.dtype
) -> PairConfig:
    """Small programs, to balance, with many loads in flight.

    256 dims a warp are 16 bytes a lane, so that x lies in the layout of the weights as it is
    loaded. Of the down weights as many experts are loaded ahead as the registers hold; with one
    row a second warp makes that all of them.
    """
    gate_up_depth = min(512, triton.next_power_of_2(hidden))
    down_depth = min(512, triton.next_power_of_2(inner))
    block_n, down_warps = 4, 2 if num_rows == 1 else 1
    row_words = triton.next_power_of_2(inner) * dtype.itemsize // 4
    lane_words = block_n * row_words // (32 * down_warps)
    slots_ahead = max(1, min(top_k, LANE_WORDS_AHEAD // max(1, lane_words)))
    return PairConfig(
        gate_up=VectorConfig(4, gate_up_depth, 1),
        down=VectorConfig(block_n, down_depth, down_warps),
        slots_ahead=slots_ahead,
    )


def grouped_config(
    num_rows: int, num_experts: int, top_k: int, hidden: int, inner: int, dtype: torch.dtype
) -> GroupedConfig:
    """Tiles about as high as an expert has rows on average, up to 64."""
    rows_per_expert = num_rows * top_k // num_experts
    hidden_depth = max(16, triton.next_power_of_2(hidden))
    inner_depth = max(16, triton.next_power_of_2(inner))
    if dtype == torch.float32:
        gate_up = DotConfig(16, 32, min(32, hidden_depth), 4, 2)
        return GroupedConfig(gate_up, DotConfig(16, 32, min(32, inner_depth), 4, 2))
    if rows_per_expert < 6:
        gate_up = DotConfig(16, 64, min(128, hidden_depth), 4, 3)
        return GroupedConfig(gate_up, DotConfig(16, 128, min(128, inner_depth), 4, 3))
    if rows_per_expert < 32:
        gate_up = DotConfig(32, 64, min(64, hidden_depth), 4, 3)
        return GroupedConfig(gate_up, DotConfig(32, 64, min(64, inner_depth), 4, 4))
    # Higher tiles lose even at 256 rows an expert.
    gate_up = DotConfig(64, 64, min(64, hidden_depth), 4, 4)
    return GroupedConfig(gate_up, DotConfig(64, 128, min(64, inner_depth), 4, 3))
