"""E5: the shapes that run before the first request."""

from __future__ import annotations

import torch

from engine.cache.pools import PADDING_INDEX
from engine.warm_up import kernel_ranges, planned_inputs
from graphs.inputs import Kind

CPU = torch.device("cpu")


def test_every_range_of_rows_that_can_come_is_visited() -> None:
    """E5: up to what the plan allows, no further. Oracle: the rows of each kind, by hand."""
    inputs = list(kernel_ranges(CPU, max_decode_rows=40, max_prefill_rows=300))
    rows = {kind: [i.token_ids.shape[0] for i in inputs if i.kind is kind] for kind in Kind}
    assert rows[Kind.DECODE] == [1, 2, 3, 5, 9, 17, 33]
    assert rows[Kind.PREFILL] == [48, 80, 192, 272]


def test_warm_up_names_no_page_or_slot_of_a_request() -> None:
    """E5, E2: only padding is touched. Oracle: the padding index."""
    for inputs in [*planned_inputs(CPU), *kernel_ranges(CPU, 64, 512)]:
        for tensor in (inputs.kv_slots, inputs.page_table, inputs.state_slots):
            assert bool((tensor == PADDING_INDEX).all())
        assert inputs.token_ids.shape == inputs.positions.shape == inputs.kv_slots.shape
