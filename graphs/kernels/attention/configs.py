"""Launch configurations of the attention kernels: plain functions of shapes.

bench/kernels_attention.py times what they give.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

NUM_SMS = 132
MAX_SPLITS = 256


@dataclass(frozen=True)
class PrepareConfig:
    """Rows of one program."""

    block_t: int = 8
    num_warps: int = 4


@dataclass(frozen=True)
class DecodeConfig:
    """`block_n` tokens a tile; the splits fill `num_programs`, of at least `min_tiles` tiles each.

    `block_s` splits by `block_d` dims are combined at once.
    """

    block_n: int
    num_warps: int
    num_stages: int
    num_programs: int
    min_tiles: int = 1
    block_s: int = 64
    block_d: int = 64


@dataclass(frozen=True)
class PrefillConfig:
    """`max_heads` query heads by `block_rows` rows against tiles of `block_n` tokens."""

    max_heads: int
    block_rows: int
    block_n: int
    num_warps: int
    num_stages: int
    has_full_loop: bool = True


def pad_to_power_of_two(size: int, smallest: int = 16) -> int:
    """The next power of two; tl.dot wants 16."""
    return max(smallest, 1 << (size - 1).bit_length())


def decode_config(dtype: torch.dtype, head_dim: int, num_packed_rows: int) -> DecodeConfig:
    """`num_packed_rows`: query heads of one key/value head times rows of one request."""
    if dtype == torch.float32:
        num_warps = pad_to_power_of_two(num_packed_rows) // 4
        return DecodeConfig(16, num_warps, 2, num_programs=2 * NUM_SMS, block_s=32)
    if num_packed_rows > 32:
        return DecodeConfig(block_n=64, num_warps=8, num_stages=2, num_programs=NUM_SMS)
    if head_dim > 128:
        return DecodeConfig(block_n=32, num_warps=4, num_stages=3, num_programs=2 * NUM_SMS)
    return DecodeConfig(block_n=64, num_warps=4, num_stages=3, num_programs=2 * NUM_SMS)


def num_decode_splits(config: DecodeConfig, num_pairs: int, max_tokens: int) -> int:
    """Splits of the context of each of `num_pairs` (request, key/value head)s.

    From shapes only: max_tokens is what the page table has room for. Both may be symbolic.
    """
    tokens_per_split = config.block_n * config.min_tiles
    most = torch.sym_min((max_tokens + tokens_per_split - 1) // tokens_per_split, MAX_SPLITS)
    splits: int = torch.sym_max(torch.sym_min(config.num_programs // num_pairs, most), 1)
    return splits


def prefill_config(dtype: torch.dtype, head_dim: int) -> PrefillConfig:
    """Shared memory holds the queries and the stages' keys and values."""
    if dtype == torch.float32:
        return PrefillConfig(max_heads=1, block_rows=16, block_n=16, num_warps=4, num_stages=2)
    num_stages = 2 if head_dim > 128 else 3
    return PrefillConfig(max_heads=2, block_rows=64, block_n=64, num_warps=8, num_stages=num_stages)


def heads_per_program(config: PrefillConfig, group_size: int) -> int:
    """The most query heads of one key/value head that divide its group: 1, 2, 4, ..."""
    heads = config.max_heads
    while group_size % heads:
        heads //= 2
    return heads
