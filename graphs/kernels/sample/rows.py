"""What choosing a token for each of R rows is told, as device tensors."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

# What kernels read one number of a row from. It may start anywhere: in a table of several columns,
# 16 bytes are not a multiple of every number of rows. Triton would compile for each case.
ROW_POINTERS = [
    "slots_ptr",
    "positions_ptr",
    "row_tokens_ptr",
    "position_ptr",
    "seed_ptr",
    "is_greedy_ptr",
    "temperature_ptr",
    "presence_ptr",
    "frequency_ptr",
    "repetition_ptr",
    "min_tokens_ptr",
    "top_k_ptr",
    "top_p_ptr",
    "log_min_p_ptr",
]


class RowParams(NamedTuple):
    """The numbers of R rows, each [R].

    float32: temperature (1 in greedy rows), top_p, min_p and the penalties. int64: top_k (the
    vocabulary size is off), seed (64 bits, wrapped to int64) and min_tokens. bool: is_greedy.
    """

    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    presence_penalty: Tensor
    frequency_penalty: Tensor
    repetition_penalty: Tensor
    top_k: Tensor
    seed: Tensor
    min_tokens: Tensor
    is_greedy: Tensor


class SlotAdjustments(NamedTuple):
    """What rows look up by their slot, [S, ...].

    bias_ids int64 and bias_values float32: [S, biases], unused entries add 0, ids differ.
    masked_ids: [S, ids] int64, tokens that may not come before min_tokens, else -1.
    output_counts: [S, V] int32 and in_prompt: [S, V] bool, right only where a row has penalties.
    """

    bias_ids: Tensor
    bias_values: Tensor
    masked_ids: Tensor
    output_counts: Tensor
    in_prompt: Tensor
