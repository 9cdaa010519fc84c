"""E5: the shapes that run before the first request."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.batch import MIN_CUDA_PREFILL_ROWS, padded_rows
from engine.cache.pools import PADDING_INDEX
from engine.model_config import load_model_config
from engine.warm_up import (
    PREFILL_PAGES,
    PREFILL_REQUESTS,
    expert_blocks,
    padding_prefill,
    prefill_sizes,
)
from graphs.kernels.linear.configs import MAX_FEW_ROWS

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
GEOMETRY = Path(__file__).parents[2] / "bench" / "geometries" / "Qwen3.6-35B-A3B"


def test_prefills_of_few_rows_are_padded_on_cuda_alone() -> None:
    """E5: to what no kernel for few rows takes. Oracle: by hand."""
    assert [padded_rows(n, CPU) for n in (1, 16, 17, 100)] == [16, 16, 32, 112]
    assert [padded_rows(n, CUDA) for n in (1, 79, 80, 81)] == [80, 80, 80, 96]
    assert MIN_CUDA_PREFILL_ROWS > MAX_FEW_ROWS


@pytest.mark.parametrize("max_rows", [16, 177, 191, 300, 1023, 8192])
@pytest.mark.parametrize(("experts", "top_k"), [(256, 8), (512, 10), (128, 8), (60, 4)])
def test_every_range_of_rows_that_can_come_is_visited(
    experts: int, top_k: int, max_rows: int
) -> None:
    """E5: no prefill of up to max_rows rows has blocks that none here has, and none is larger.

    Oracle: the configurations of every number of rows that there can be, by brute force.
    """
    config = replace(load_model_config(GEOMETRY), num_experts=experts, num_experts_per_tok=top_k)
    sizes = prefill_sizes(config, torch.bfloat16, CUDA, max_rows)
    visited = [expert_blocks(config, torch.bfloat16, num_rows) for num_rows in sizes]
    for num_rows in range(1, max_rows + 1):
        padded = padded_rows(num_rows, CUDA)
        assert expert_blocks(config, torch.bfloat16, padded) in visited
    assert max(sizes) <= padded_rows(max_rows, CUDA)
    assert len(set(visited)) == len(sizes)


def test_few_sizes_where_no_kernel_differs() -> None:
    """E5: dense blocks on CUDA, and all on the CPU, have one range. Oracle: by hand."""
    dense = load_model_config(GEOMETRY.parent / "Qwen3.6-27B")
    assert prefill_sizes(dense, torch.bfloat16, CUDA, 8192) == [80]
    assert prefill_sizes(load_model_config(GEOMETRY), torch.bfloat16, CPU, 300) == [16]


def test_warm_up_names_no_page_or_slot_of_a_request() -> None:
    """E5, E2: only padding is touched. Oracle: the padding index."""
    for num_rows in (16, 80, 512):
        inputs = padding_prefill(PREFILL_REQUESTS, num_rows, PREFILL_PAGES, CPU)
        for tensor in (inputs.kv_slots, inputs.page_table, inputs.state_slots):
            assert bool((tensor == PADDING_INDEX).all())
        assert inputs.token_ids.shape == inputs.positions.shape == inputs.kv_slots.shape
