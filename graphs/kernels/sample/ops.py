"""Choosing tokens on the GPU, with static shapes and nothing read back.

The public functions take what their namesakes in `reference` take and give the same results; the
`triton_op`s behind them take tensors alone.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from graphs.kernels.launch import launch
from graphs.kernels.sample.adjust import adjust_logits
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
from graphs.kernels.sample.rows import RowParams

__all__ = ["adjust_logits", "argmax", "draw_tokens"]

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
