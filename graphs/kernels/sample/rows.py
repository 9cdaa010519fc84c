"""What choosing a token for each of R rows is told, as device tensors."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


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
