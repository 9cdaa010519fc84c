"""How a vocabulary is cut up for drawing. Functions of its size alone; no token depends on them."""

from __future__ import annotations

from dataclasses import dataclass

import triton

MIN_BLOCK, MAX_BLOCK = 64, 2048
MIN_SPLIT_BLOCKS, MAX_SPLITS = 2, 31
ELEMENTS_PER_THREAD = 4  # a load of 16 bytes; twice as many spill registers
NUM_STAGES = 3
LANES_PER_GROUP = 32  # of a block; about 2000 groups in large vocabularies
ARGMAX_PROGRAMS = 2048  # two waves of programs of 256 threads
ARGMAX_ELEMENTS_PER_THREAD = 8  # of bf16 a load of 16 bytes
# On the whole GPU, before rows go on alone: of nuclei of 0.95 one in 20 rejects the first draw,
# and one in 800 the second too.
NUM_ROUNDS = 3


@dataclass(frozen=True)
class DrawConfig:
    """block: tokens that a program looks at together; split: tokens a program of a round.

    num_stages: blocks of a row's own program that are loaded ahead, and one.
    """

    block: int
    split: int
    num_splits: int
    num_warps: int
    num_stages: int


def draw_config(vocab_size: int) -> DrawConfig:
    """The vocabulary in blocks, and those in splits for a grid of (row, split)."""
    block = min(MAX_BLOCK, max(MIN_BLOCK, triton.next_power_of_2(vocab_size) // 16))
    num_blocks = triton.cdiv(vocab_size, block)
    split = block * max(MIN_SPLIT_BLOCKS, triton.cdiv(num_blocks, MAX_SPLITS))
    num_warps = max(1, block // (32 * ELEMENTS_PER_THREAD))
    return DrawConfig(block, split, triton.cdiv(vocab_size, split), num_warps, NUM_STAGES)


@dataclass(frozen=True)
class ArgmaxConfig:
    """block: tokens that a program looks at together; split: tokens of a program."""

    block: int
    split: int
    num_splits: int
    num_warps: int


def argmax_config(num_rows: int, vocab_size: int) -> ArgmaxConfig:
    """As few splits as still fill the GPU: one row is spread over all of it."""
    block = min(MAX_BLOCK, max(MIN_BLOCK, triton.next_power_of_2(vocab_size)))
    num_blocks = triton.cdiv(vocab_size, block)
    split = block * triton.cdiv(num_blocks, triton.cdiv(ARGMAX_PROGRAMS, num_rows))
    num_warps = max(1, block // (32 * ARGMAX_ELEMENTS_PER_THREAD))
    return ArgmaxConfig(block, split, triton.cdiv(vocab_size, split), num_warps)
