"""Drawing tokens from truncated distributions, with static shapes and nothing read back."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from graphs.kernels.launch import launch
from graphs.kernels.sample.configs import NUM_ROUNDS, draw_config
from graphs.kernels.sample.draw_kernel import draw_rows_kernel
from graphs.kernels.sample.rounds_kernel import scan_splits_kernel

MAX_VOCAB_SIZE = 2**22  # masses of 2^40 each sum to less than 2^63


@torch.library.triton_op("deltaloom::draw_tokens", mutates_args={})
def draw_tokens(
    scaled: Tensor, noise: Tensor, is_greedy: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """The token of each row with the largest scaled + noise among those kept, [R] int64.

    As `reference.draw_tokens`, which also says what the arguments are; the mass of a token comes
    from the exp of the GPU, an ulp or more from torch's, so the last token of a nucleus may
    differ. Rows whose scores are not logits less their maximum get any token in the vocabulary.
    """
    num_rows, vocab_size = scaled.shape
    assert scaled.dtype == noise.dtype == torch.float32
    assert 1 <= vocab_size <= MAX_VOCAB_SIZE, f"vocabulary of {vocab_size}"
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=scaled.device)
    if num_rows > 0:
        launch_draw(
            scaled.contiguous(),
            noise.contiguous(),
            is_greedy.to(torch.uint8),
            top_k,
            top_p,
            torch.log(min_p),
            token_ids,
        )
    return token_ids


def launch_draw(
    scaled: Tensor,
    noise: Tensor,
    is_greedy: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    log_min_p: Tensor,
    token_ids: Tensor,
) -> None:
    """The rounds, all rows in splits over the whole GPU, then a program for each row."""
    num_rows, vocab_size = scaled.shape
    config = draw_config(vocab_size)
    shape = (num_rows, NUM_ROUNDS, config.num_splits)
    mass = torch.empty(shape, dtype=torch.int64, device=scaled.device)
    best = torch.empty(shape, dtype=torch.float32, device=scaled.device)
    drawn = torch.empty(shape, dtype=torch.int64, device=scaled.device)
    id_bits = (vocab_size - 1).bit_length()
    splits_padded = triton.next_power_of_2(config.num_splits)
    for i_round in range(NUM_ROUNDS):
        launch(scan_splits_kernel)[(num_rows * config.num_splits,)](
            scaled,
            noise,
            is_greedy,
            top_k,
            top_p,
            log_min_p,
            mass,
            best,
            drawn,
            VOCAB=vocab_size,
            ID_BITS=id_bits,
            BLOCK=config.block,
            ROUND=i_round,
            NUM_ROUNDS=NUM_ROUNDS,
            SPLIT=config.split,
            NUM_SPLITS=config.num_splits,
            SPLITS_PADDED=splits_padded,
            num_warps=config.num_warps,
        )
    launch(draw_rows_kernel)[(num_rows,)](
        scaled,
        noise,
        is_greedy,
        top_k,
        top_p,
        log_min_p,
        mass,
        best,
        drawn,
        token_ids,
        VOCAB=vocab_size,
        ID_BITS=id_bits,
        BLOCK=config.block,
        STAGES=config.num_stages,
        NUM_ROUNDS=NUM_ROUNDS,
        NUM_SPLITS=config.num_splits,
        SPLITS_PADDED=splits_padded,
        num_warps=config.num_warps,
    )
