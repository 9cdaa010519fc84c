"""Block sizes of the mixture-of-experts kernels: plain functions of shapes and dtype.

Measured on an H200 at the sizes of Qwen3.6-35B-A3B (hidden 2048, 256 experts, inner 512).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

MAX_PAIR_ROWS = 2  # up to here each pair streams its own expert
MAX_FEW_ROWS = 256  # up to here the router splits the hidden dim to fill the GPU


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
    """The router's product, splits of the hidden dim, and rows per program of the top-k."""

    dot: DotConfig
    splits: int
    route_rows: int
    route_warps: int


@dataclass(frozen=True)
class VectorConfig:
    """Blocks of a matrix-vector product: rows of the weight, depth."""

    block_n: int
    block_k: int
    num_warps: int


@dataclass(frozen=True)
class PairConfig:
    """The matrix-vector path."""

    gate_up: VectorConfig
    down: VectorConfig


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
        return RouterConfig(dot, max(1, min(8, hidden // dot.block_k)), 4, 4)
    # Many rows per program, because grouping reads the counts of all programs in each.
    route_rows, route_warps = (32, 16) if num_experts <= 256 else (16, 8)
    return RouterConfig(DotConfig(64, 64, min(64, depth), 4, 4), 1, route_rows, route_warps)


def pair_config(hidden: int, inner: int) -> PairConfig:
    """Many loads in flight, and programs small enough to balance.

    256 dims a warp (16 bytes a thread): so x lies in the layout of the weights as it is loaded.
    """
    gate_up_depth = min(1024, triton.next_power_of_2(hidden))
    down_depth = min(512, triton.next_power_of_2(inner))
    return PairConfig(
        gate_up=VectorConfig(4, gate_up_depth, max(1, gate_up_depth // 256)),
        down=VectorConfig(4, down_depth, max(1, down_depth // 256)),
    )


def grouped_config(
    num_rows: int, num_experts: int, top_k: int, hidden: int, inner: int, dtype: torch.dtype
) -> GroupedConfig:
    """Tiles about as high as an expert has rows on average."""
    rows_per_expert = num_rows * top_k // num_experts
    hidden_depth = max(16, triton.next_power_of_2(hidden))
    inner_depth = max(16, triton.next_power_of_2(inner))
    if dtype == torch.float32:
        gate_up = DotConfig(16, 32, min(32, hidden_depth), 4, 2)
        return GroupedConfig(gate_up, DotConfig(16, 32, min(32, inner_depth), 4, 2))
    if rows_per_expert < 12:
        gate_up = DotConfig(16, 64, min(128, hidden_depth), 4, 3)
        return GroupedConfig(gate_up, DotConfig(16, 64, min(128, inner_depth), 4, 4))
    if rows_per_expert < 48:
        gate_up = DotConfig(32, 64, min(128, hidden_depth), 4, 3)
        return GroupedConfig(gate_up, DotConfig(32, 64, min(128, inner_depth), 4, 4))
    gate_up = DotConfig(64, 128, min(64, hidden_depth), 8, 4)
    return GroupedConfig(gate_up, DotConfig(64, 128, min(64, inner_depth), 4, 4))
