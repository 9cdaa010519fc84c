"""E5: the shapes that run before the first request."""

from __future__ import annotations

import torch

from engine.batch import MIN_CUDA_PREFILL_ROWS, padded_rows
from engine.cache.pools import PADDING_INDEX
from engine.warm_up import PREFILL_PAGES, PREFILL_REQUESTS, padding_prefill, prefill_sizes
from graphs.kernels.linear.configs import MAX_FEW_ROWS

CPU = torch.device("cpu")


def test_prefills_of_few_rows_are_padded_on_cuda_alone() -> None:
    """E5: to what no kernel for few rows takes. Oracle: by hand."""
    cuda = torch.device("cuda")
    assert [padded_rows(n, CPU) for n in (1, 16, 17, 100)] == [16, 16, 32, 112]
    assert [padded_rows(n, cuda) for n in (1, 79, 80, 81)] == [80, 80, 80, 96]
    assert MIN_CUDA_PREFILL_ROWS > MAX_FEW_ROWS


def test_every_range_of_rows_that_can_come_is_visited() -> None:
    """E5: up to what the plan allows, no further. Oracle: the rows, by hand."""
    assert prefill_sizes(torch.device("cuda"), max_rows=300) == [80, 192, 272]
    assert prefill_sizes(CPU, max_rows=300) == [16]


def test_warm_up_names_no_page_or_slot_of_a_request() -> None:
    """E5, E2: only padding is touched. Oracle: the padding index."""
    for num_rows in (16, 80, 512):
        inputs = padding_prefill(PREFILL_REQUESTS, num_rows, PREFILL_PAGES, CPU)
        for tensor in (inputs.kv_slots, inputs.page_table, inputs.state_slots):
            assert bool((tensor == PADDING_INDEX).all())
        assert inputs.token_ids.shape == inputs.positions.shape == inputs.kv_slots.shape
