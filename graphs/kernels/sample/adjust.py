"""What comes before choosing a token on the GPU: penalties, bias and mask, then the temperature."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from graphs.kernels.launch import launch
from graphs.kernels.sample.adjust_kernel import adjust_splits_kernel, scale_splits_kernel
from graphs.kernels.sample.configs import draw_config
from graphs.kernels.sample.rows import RowParams, SlotAdjustments


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
    row_tokens: Tensor | None = None,
    rows_per_request: int = 1,
) -> tuple[Tensor, Tensor]:
    """Scores to draw by, [R, V] float32, and which rows are bad; see `reference.adjust_logits`."""
    assert rows_per_request == 1 or row_tokens is not None
    scaled, is_bad = launch_adjust(
        logits,
        slots,
        positions,
        # Not read where each request has one row.
        slots if row_tokens is None else row_tokens,
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
        rows_per_request,
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
    row_tokens: Tensor,
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
    rows_per_request: int,
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
        row_tokens.contiguous(),
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
        ROWS_PER_REQUEST=rows_per_request,
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
