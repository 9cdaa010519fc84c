"""E5: the shapes that run before the first request."""

from __future__ import annotations

import torch

from engine.cache.pools import PADDING_INDEX
from engine.warm_up import prefill_inputs, prefill_ranges

CPU = torch.device("cpu")


def test_every_range_of_rows_that_can_come_is_visited() -> None:
    """E5: up to what the plan allows, no further. Oracle: the rows, by hand."""
    rows = [inputs.token_ids.shape[0] for inputs in prefill_ranges(CPU, max_rows=300)]
    assert rows == [48, 80, 192, 272]


def test_warm_up_names_no_page_or_slot_of_a_request() -> None:
    """E5, E2: only padding is touched. Oracle: the padding index."""
    for inputs in [*prefill_inputs(CPU), *prefill_ranges(CPU, 512)]:
        for tensor in (inputs.kv_slots, inputs.page_table, inputs.state_slots):
            assert bool((tensor == PADDING_INDEX).all())
        assert inputs.token_ids.shape == inputs.positions.shape == inputs.kv_slots.shape
