"""Launch configurations of the attention kernels: plain functions of shapes.

bench/kernels_attention.py times what they give.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

NUM_SMS = 132
MAX_PROGRAMS = 32 * NUM_SMS
FEW_PAIRS = 8
SOME_PAIRS = 64
COMBINED_DIMS = 32  # at a time, of one program of one warp; more dims or warps are no faster


@dataclass(frozen=True)
class PrepareConfig:
    """Rows of one program."""

    block_t: int = 4
    num_warps: int = 1


@dataclass(frozen=True)
class DecodeConfig:
    """`block_n` tokens a tile.

    Contexts are split until they fill `num_programs`; beyond that, where page tables have room
    for contexts of several `long_tokens`, until a batch has `max_programs`.
    A program of the combine kernel adds up to `block_s` splits, the most there are.
    `is_strided`: a split takes every so manieth tile, or else neighbouring ones.
    `loads_all_splits`: as in decode_kernel.py, and no pool.
    `num_pooled`: programs that share the splits in use, or 0 for one program a split, as have
    batches whose splits, used or not, are at most `few_splits` a context or fill the pool at most
    `few_rounds` times. The pool reads the lengths of `block_r` contexts at once.
    """

    block_n: int
    num_warps: int
    num_stages: int
    num_programs: int
    max_programs: int = 0
    long_tokens: int = 2048
    short_tokens: int = 1024
    block_s: int = 64
    loads_all_splits: bool = False
    is_strided: bool = True
    num_pooled: int = 0
    few_splits: int = 2
    few_rounds: int = 2
    block_r: int = 64


@dataclass(frozen=True)
class PrefillConfig:
    """`max_heads` query heads by `block_rows` rows against tiles of `block_n` tokens."""

    max_heads: int
    block_rows: int
    block_n: int
    num_warps: int
    num_stages: int


def pad_to_power_of_two(size: int, smallest: int = 16) -> int:
    """The next power of two; tl.dot wants 16."""
    return max(smallest, 1 << (size - 1).bit_length())


def decode_config(
    dtype: torch.dtype, head_dim: int, num_packed_rows: int, num_pairs: int
) -> DecodeConfig:
    """For `num_pairs` (request, key/value head)s.

    `num_packed_rows`: query heads of one key/value head times rows of one request.
    """
    config = pooled_config(dtype, head_dim, num_packed_rows, num_pairs)
    # With few pairs the grid is small, and every split counts.
    if bool(num_pairs <= FEW_PAIRS):
        return replace(config, loads_all_splits=True, num_pooled=0)
    return config


def pooled_config(
    dtype: torch.dtype, head_dim: int, num_packed_rows: int, num_pairs: int
) -> DecodeConfig:
    """`decode_config` but for few pairs.

    The pools are about as many programs as run at the same time: more of them would find nothing
    to do, and fewer would leave memory idle where all contexts are long.
    """
    if dtype == torch.float32:
        num_warps = pad_to_power_of_two(num_packed_rows) // 4
        return DecodeConfig(16, num_warps, 2, 2 * NUM_SMS)  # never many programs, so no pool
    if num_packed_rows > 32:
        return DecodeConfig(64, 8, 2, NUM_SMS, MAX_PROGRAMS, num_pooled=NUM_SMS)
    if head_dim <= 128:
        return DecodeConfig(64, 4, 3, 2 * NUM_SMS, MAX_PROGRAMS, num_pooled=2 * NUM_SMS)
    # Large tiles for long contexts, small ones for many short contexts.
    if num_packed_rows <= 16 and bool(num_pairs <= SOME_PAIRS):
        return DecodeConfig(64, 8, 3, NUM_SMS, MAX_PROGRAMS, num_pooled=NUM_SMS)
    if num_packed_rows <= 16:
        return DecodeConfig(32, 4, 3, 2 * NUM_SMS, MAX_PROGRAMS, num_pooled=3 * NUM_SMS)
    # Verify of long contexts is faster over neighbouring tiles.
    return DecodeConfig(
        32, 4, 3, 2 * NUM_SMS, MAX_PROGRAMS, is_strided=False, num_pooled=2 * NUM_SMS
    )


def num_decode_splits(config: DecodeConfig, num_pairs: int, max_tokens: int) -> int:
    """Splits of the context of each of `num_pairs` (request, key/value head)s, at most.

    From shapes only: max_tokens is what the page table has room for. Both may be symbolic.
    """
    max_tiles = torch.sym_max((max_tokens + config.block_n - 1) // config.block_n, 1)
    for_long = torch.sym_min(max_tokens // config.long_tokens, config.max_programs // num_pairs)
    splits = torch.sym_max(torch.sym_max(config.num_programs // num_pairs, for_long), 1)
    splits = torch.sym_min(torch.sym_min(splits, config.block_s), max_tiles)
    # The fewest with the same longest split.
    longest = (max_tiles + splits - 1) // splits
    fewest: int = (max_tiles + longest - 1) // longest
    return fewest


def least_tiles(config: DecodeConfig, num_pairs: int) -> int:
    """Tiles a split is worth: where all contexts are of `short_tokens`, they fill the GPU once."""
    tiles = config.short_tokens * num_pairs // (config.num_programs * config.block_n)
    most = max(config.short_tokens // config.block_n, 1)
    least: int = torch.sym_max(torch.sym_min(tiles, most), 1)
    return least


def num_pooled_programs(config: DecodeConfig, num_pairs: int, num_splits: int) -> int:
    """Programs of the pool, or 0 where shapes alone say that few programs would be idle.

    num_pairs and num_splits may be symbolic; what is returned is not.
    """
    if bool(num_splits <= config.few_splits):
        return 0
    is_pooled = bool(num_pairs * num_splits > config.few_rounds * config.num_pooled)
    return config.num_pooled if is_pooled else 0


def combined_blocks(num_pooled: int, head_dim: int) -> int:
    """Blocks of COMBINED_DIMS of one combining program.

    All of a head beside a pool: most programs find nothing to combine, so that they are few.
    """
    return -(-head_dim // COMBINED_DIMS) if num_pooled > 0 else 1


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
