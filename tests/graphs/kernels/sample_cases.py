"""Rows for the tests of choosing tokens, and the noise that kernels give them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphs.kernels.sample.noise_kernel import (
    block_words,
    gumbel_from_uniform,
    gumbel_noise,
    token_words,
    uniform_from_words,
)
from graphs.kernels.sample.rows import RowParams

PROBE_BLOCK = 1024


@triton.jit
def words_probe(seeds_ptr, positions_ptr, ids_ptr, words_ptr, num_ids, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    i_row, i_block = tl.program_id(0), tl.program_id(1)
    o_id = i_block * BLOCK + tl.arange(0, BLOCK)
    b_id = tl.load(ids_ptr + o_id, mask=o_id < num_ids, other=0)
    b_word = token_words(tl.load(seeds_ptr + i_row), tl.load(positions_ptr + i_row), b_id)
    tl.store(words_ptr + i_row * num_ids + o_id, b_word.to(tl.int64), mask=o_id < num_ids)


@triton.jit
def block_probe(seeds_ptr, positions_ptr, words_ptr, first, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    i_row = tl.program_id(0)
    b_word = block_words(tl.load(seeds_ptr + i_row), tl.load(positions_ptr + i_row), first, BLOCK)
    tl.store(words_ptr + i_row * BLOCK + tl.arange(0, BLOCK), b_word.to(tl.int64))


@triton.jit
def gumbel_probe(words_ptr, noise_ptr, num_words, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    o_word = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b_word = tl.load(words_ptr + o_word, mask=o_word < num_words, other=0).to(tl.uint32)
    b_noise = gumbel_from_uniform(uniform_from_words(b_word))
    tl.store(noise_ptr + o_word, b_noise, mask=o_word < num_words)


@triton.jit
def noise_probe(seeds_ptr, positions_ptr, ids_ptr, noise_ptr, num_ids, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    i_row, i_block = tl.program_id(0), tl.program_id(1)
    o_id = i_block * BLOCK + tl.arange(0, BLOCK)
    b_id = tl.load(ids_ptr + o_id, mask=o_id < num_ids, other=0)
    b_noise = gumbel_noise(tl.load(seeds_ptr + i_row), tl.load(positions_ptr + i_row), b_id)
    tl.store(noise_ptr + i_row * num_ids + o_id, b_noise, mask=o_id < num_ids)


def kernel_words(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """What kernels have for `reference.token_words`, ids [1, N]."""
    shape = (len(seeds), token_ids.shape[1])
    words = torch.zeros(shape, dtype=torch.int64, device=seeds.device)
    grid = (shape[0], triton.cdiv(shape[1], PROBE_BLOCK))
    words_probe[grid](
        seeds, positions, token_ids.int().contiguous(), words, shape[1], BLOCK=PROBE_BLOCK
    )
    return words


def kernel_block_words(seeds: Tensor, positions: Tensor, first: int, block: int) -> Tensor:
    """What kernels have for the words of tokens first .. first + block - 1, [R, block] int64."""
    words = torch.zeros(len(seeds), block, dtype=torch.int64, device=seeds.device)
    block_probe[(len(seeds),)](seeds, positions, words, first, BLOCK=block)
    return words


def kernel_noise(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """What kernels have for `reference.gumbel_noise`, ids [1, N]: other bits, an ulp away."""
    shape = (len(seeds), token_ids.shape[1])
    noise = torch.zeros(shape, dtype=torch.float32, device=seeds.device)
    grid = (shape[0], triton.cdiv(shape[1], PROBE_BLOCK))
    noise_probe[grid](
        seeds, positions, token_ids.int().contiguous(), noise, shape[1], BLOCK=PROBE_BLOCK
    )
    return noise


def noise_from_words(words: Tensor) -> Tensor:
    """The noise that kernels make of words [N] int64."""
    noise = torch.zeros(len(words), device=words.device)
    grid = (triton.cdiv(len(words), PROBE_BLOCK),)
    gumbel_probe[grid](words, noise, len(words), BLOCK=PROBE_BLOCK)
    return noise


def neutral_rows(num_rows: int, vocab_size: int, device: torch.device) -> RowParams:
    """Rows that change no logit and keep every token; the seeds are 0, 1, ..."""
    ones = torch.ones(num_rows, device=device)
    counting = torch.arange(num_rows, device=device)
    return RowParams(
        temperature=ones,
        top_p=ones.clone(),
        min_p=torch.zeros_like(ones),
        presence_penalty=torch.zeros_like(ones),
        frequency_penalty=torch.zeros_like(ones),
        repetition_penalty=ones.clone(),
        top_k=torch.full_like(counting, vocab_size),
        seed=counting,
        min_tokens=torch.zeros_like(counting),
        is_greedy=torch.zeros_like(counting, dtype=torch.bool),
    )
