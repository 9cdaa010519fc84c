"""Choosing tokens on the GPU, with static shapes and nothing read back.

The public functions take what their namesakes in `reference` take and give the same results; the
`triton_op`s behind them take tensors alone.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from graphs.kernels.launch import launch
from graphs.kernels.sample.adjust_kernel import adjust_splits_kernel, scale_splits_kernel
from graphs.kernels.sample.argmax_kernel import argmax_rows_kernel, argmax_splits_kernel
from graphs.kernels.sample.candidates_kernel import (
    collect_kernel,
    draw_candidates_kernel,
    find_bounds_kernel,
    group_minima_kernel,
)
from graphs.kernels.sample.configs import (
    LANES_PER_GROUP,
    NUM_ROUNDS,
    argmax_config,
    draw_config,
)
from graphs.kernels.sample.draw_kernel import draw_rows_kernel
from graphs.kernels.sample.rounds_kernel import scan_splits_kernel
from graphs.kernels.sample.rows import RowParams, SlotAdjustments

MAX_VOCAB_SIZE = 2**22  # masses of 2^40 each sum to less than 2^63


@torch.library.triton_op("deltaloom::argmax_tokens", mutates_args={})
def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The best token of each row, and which rows are bad; see `reference.argmax`."""
    num_rows, vocab_size = logits.shape
    device = logits.device
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=device)
    is_bad = torch.empty(num_rows, dtype=torch.uint8, device=device)
    if num_rows > 0:
        config = argmax_config(num_rows, vocab_size)
        shape = (num_rows, config.num_splits)
        best = torch.empty(shape, dtype=torch.float32, device=device)
        best_ids = torch.empty(shape, dtype=torch.int32, device=device)
        launch(argmax_splits_kernel)[(num_rows * config.num_splits,)](
            logits.contiguous(),
            best,
            best_ids,
            VOCAB=vocab_size,
            BLOCK=config.block,
            SPLIT=config.split,
            NUM_SPLITS=config.num_splits,
            num_warps=config.num_warps,
        )
        launch(argmax_rows_kernel)[(num_rows,)](
            best,
            best_ids,
            token_ids,
            is_bad,
            VOCAB=vocab_size,
            NUM_SPLITS=config.num_splits,
            SPLITS_PADDED=triton.next_power_of_2(config.num_splits),
            num_warps=1,
        )
    return token_ids, is_bad.view(torch.bool)


def adjust_logits(
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    rows: RowParams,
    tables: SlotAdjustments,
    *,
    has_penalties: bool,
    has_bias: bool,
    has_min_tokens: bool,
) -> tuple[Tensor, Tensor]:
    """Scores to draw by, [R, V] float32, and which rows are bad; see `reference.adjust_logits`."""
    scaled, is_bad = launch_adjust(
        logits,
        slots,
        positions,
        rows.temperature,
        rows.presence_penalty,
        rows.frequency_penalty,
        rows.repetition_penalty,
        rows.min_tokens,
        tables.bias_ids,
        tables.bias_values,
        tables.masked_ids,
        tables.output_counts,
        tables.in_prompt,
        has_penalties,
        has_bias,
        has_min_tokens,
    )
    return scaled, is_bad


@torch.library.triton_op("deltaloom::adjust_logits", mutates_args={})
def launch_adjust(
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    temperature: Tensor,
    presence_penalty: Tensor,
    frequency_penalty: Tensor,
    repetition_penalty: Tensor,
    min_tokens: Tensor,
    bias_ids: Tensor,
    bias_values: Tensor,
    masked_ids: Tensor,
    output_counts: Tensor,
    in_prompt: Tensor,
    has_penalties: bool,
    has_bias: bool,
    has_min_tokens: bool,
) -> tuple[Tensor, Tensor]:
    """The adjusted logits with the peaks of splits, then the scores in their place."""
    num_rows, vocab_size = logits.shape
    assert vocab_size == output_counts.shape[1], "the tables are of another vocabulary"
    device = logits.device
    scaled = torch.empty(num_rows, vocab_size, dtype=torch.float32, device=device)
    is_bad = torch.empty(num_rows, dtype=torch.uint8, device=device)
    if num_rows == 0:
        return scaled, is_bad.view(torch.bool)
    config = draw_config(vocab_size)
    peaks = torch.empty(num_rows, config.num_splits, dtype=torch.float32, device=device)
    num_biases, num_masked = bias_ids.shape[1], masked_ids.shape[1]
    launch(adjust_splits_kernel)[(num_rows * config.num_splits,)](
        logits.contiguous(),
        slots.contiguous(),
        positions.contiguous(),
        presence_penalty.contiguous(),
        frequency_penalty.contiguous(),
        repetition_penalty.contiguous(),
        min_tokens.contiguous(),
        bias_ids,
        bias_values,
        masked_ids,
        output_counts,
        in_prompt.view(torch.uint8),
        scaled,
        peaks,
        VOCAB=vocab_size,
        BLOCK=config.block,
        SPLIT=config.split,
        NUM_SPLITS=config.num_splits,
        NUM_BIASES=num_biases,
        BIASES_PADDED=triton.next_power_of_2(num_biases),
        NUM_MASKED=num_masked,
        MASKED_PADDED=triton.next_power_of_2(num_masked),
        HAS_PENALTIES=has_penalties,
        HAS_BIAS=has_bias,
        HAS_MIN_TOKENS=has_min_tokens,
        num_warps=config.num_warps,
    )
    launch(scale_splits_kernel)[(num_rows * config.num_splits,)](
        scaled,
        peaks,
        temperature.contiguous(),
        is_bad,
        VOCAB=vocab_size,
        BLOCK=config.block,
        SPLIT=config.split,
        NUM_SPLITS=config.num_splits,
        SPLITS_PADDED=triton.next_power_of_2(config.num_splits),
        num_warps=config.num_warps,
    )
    return scaled, is_bad.view(torch.bool)


def draw_tokens(
    scaled: Tensor,
    token_ids: Tensor,
    positions: Tensor,
    rows: RowParams,
    *,
    has_truncation: bool,
    is_top_k_small: bool,
) -> Tensor:
    """Gumbel-max over the tokens that stay, [R] int64, as `reference.draw_tokens`.

    The mass of a token and its noise come from the exp and log of the GPU, an ulp or more from
    torch's, so the last token of a nucleus may differ. Rows whose scores are not logits less their
    maximum get any token in the vocabulary. `token_ids` and `is_top_k_small` help the reference
    alone: kernels count tokens themselves, and look at a row no further than it needs.
    """
    drawn: Tensor = launch_draw(
        scaled,
        rows.seed,
        positions,
        rows.is_greedy,
        rows.top_k,
        rows.top_p,
        rows.min_p,
        NUM_ROUNDS if has_truncation else 1,
    )
    return drawn


@torch.library.triton_op("deltaloom::draw_tokens", mutates_args={})
def launch_draw(
    scaled: Tensor,
    seeds: Tensor,
    positions: Tensor,
    is_greedy: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    num_rounds: int,
) -> Tensor:
    """The rounds, all rows in splits over the whole GPU, then a program for each row."""
    num_rows, vocab_size = scaled.shape
    assert scaled.dtype == torch.float32
    assert 1 <= vocab_size <= MAX_VOCAB_SIZE, f"vocabulary of {vocab_size}"
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=scaled.device)
    if num_rows == 0:
        return token_ids
    config = draw_config(vocab_size)
    shape = (num_rows, num_rounds, config.num_splits)
    mass = torch.empty(shape, dtype=torch.int64, device=scaled.device)
    best = torch.empty(shape, dtype=torch.float32, device=scaled.device)
    drawn = torch.empty(shape, dtype=torch.int64, device=scaled.device)
    inputs = (
        scaled.contiguous(),
        seeds.contiguous(),
        positions.contiguous(),
        is_greedy.to(torch.uint8),
        top_k.contiguous(),
        top_p.contiguous(),
        torch.log(min_p).contiguous(),
    )
    counts = torch.empty(num_rows, dtype=torch.int32, device=scaled.device)
    if num_rounds > 1:
        launch_candidates(*inputs, counts, token_ids)
    id_bits = (vocab_size - 1).bit_length()
    splits_padded = triton.next_power_of_2(config.num_splits)
    for i_round in range(num_rounds):
        launch(scan_splits_kernel)[(num_rows * config.num_splits,)](
            *inputs,
            mass,
            best,
            drawn,
            VOCAB=vocab_size,
            ID_BITS=id_bits,
            BLOCK=config.block,
            ROUND=i_round,
            NUM_ROUNDS=num_rounds,
            SPLIT=config.split,
            NUM_SPLITS=config.num_splits,
            SPLITS_PADDED=splits_padded,
            num_warps=config.num_warps,
        )
    launch(draw_rows_kernel)[(num_rows,)](
        *inputs,
        mass,
        best,
        drawn,
        counts,
        token_ids,
        VOCAB=vocab_size,
        ID_BITS=id_bits,
        BLOCK=config.block,
        STAGES=config.num_stages,
        NUM_ROUNDS=num_rounds,
        NUM_SPLITS=config.num_splits,
        SPLITS_PADDED=splits_padded,
        ROOM=config.block,
        num_warps=config.num_warps,
    )
    return token_ids


def launch_candidates(
    scaled: Tensor,
    seeds: Tensor,
    positions: Tensor,
    is_greedy: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    log_min_p: Tensor,
    counts: Tensor,
    token_ids: Tensor,
) -> None:
    """The tokens of rows whose candidates are few; `counts` [R] int32 says of which."""
    num_rows, vocab_size = scaled.shape
    config = draw_config(vocab_size)
    id_bits = (vocab_size - 1).bit_length()
    groups = config.block // LANES_PER_GROUP
    num_groups = config.num_splits * groups
    minima = torch.empty(num_rows, num_groups, dtype=torch.int64, device=scaled.device)
    bounds = torch.empty(num_rows, dtype=torch.int64, device=scaled.device)
    candidates = torch.empty(num_rows, config.block, dtype=torch.int64, device=scaled.device)
    launch(group_minima_kernel)[(num_rows * config.num_splits,)](
        scaled,
        top_k,
        minima,
        VOCAB=vocab_size,
        ID_BITS=id_bits,
        BLOCK=config.block,
        GROUPS=groups,
        SPLIT=config.split,
        NUM_SPLITS=config.num_splits,
        num_warps=config.num_warps,
    )
    launch(find_bounds_kernel)[(num_rows,)](
        top_k,
        minima,
        bounds,
        counts,
        VOCAB=vocab_size,
        ID_BITS=id_bits,
        NUM_GROUPS=num_groups,
        GROUPS_PADDED=triton.next_power_of_2(num_groups),
        num_warps=max(1, config.num_warps // 2),
    )
    launch(collect_kernel)[(num_rows * config.num_splits,)](
        scaled,
        top_k,
        bounds,
        counts,
        candidates,
        VOCAB=vocab_size,
        ID_BITS=id_bits,
        BLOCK=config.block,
        ROOM=config.block,
        SPLIT=config.split,
        NUM_SPLITS=config.num_splits,
        num_warps=config.num_warps,
    )
    launch(draw_candidates_kernel)[(num_rows,)](
        seeds,
        positions,
        is_greedy,
        top_k,
        top_p,
        log_min_p,
        counts,
        candidates,
        token_ids,
        VOCAB=vocab_size,
        ID_BITS=id_bits,
        ROOM=config.block,
        num_warps=max(1, config.num_warps // 2),
    )
