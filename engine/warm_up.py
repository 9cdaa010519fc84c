"""Runs every planned shape once, so that no request waits for a compilation."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from engine.batch import MIN_PREFILL_REQUESTS, MIN_TABLE_PAGES, PREFILL_ROW_MULTIPLE
from engine.cache.pools import PADDING_INDEX
from engine.models.hybrid import BlockForward, HybridModel
from graphs.inputs import ForwardInputs, Kind


@torch.inference_mode()
def warm_up(
    model: HybridModel, run_block: BlockForward, page_size: int, device: torch.device
) -> None:
    """Run padding-only forwards: they touch the padding page and slot, no request's."""
    for inputs in planned_inputs(page_size, device):
        model(inputs, run_block)


def planned_inputs(page_size: int, device: torch.device) -> Iterator[ForwardInputs]:
    """One input per compilation: a second size of a dimension makes it dynamic.

    Decode batches of 1 are compiled on their own, larger ones share one compilation; prefill
    rows, requests and table widths are dynamic from their smallest size on.
    """
    for num_requests in (1, 2, 3):
        for num_pages in (MIN_TABLE_PAGES, MIN_TABLE_PAGES + 1):
            yield padding_inputs(Kind.DECODE, [1] * num_requests, num_pages, page_size, device)
    smallest = PREFILL_ROW_MULTIPLE // MIN_PREFILL_REQUESTS
    for num_requests in (MIN_PREFILL_REQUESTS, MIN_PREFILL_REQUESTS + 1):
        lens = [smallest * num_requests] * num_requests
        num_pages = num_requests + MIN_TABLE_PAGES - MIN_PREFILL_REQUESTS
        yield padding_inputs(Kind.PREFILL, lens, num_pages, page_size, device)


def padding_inputs(
    kind: Kind, row_lens: list[int], num_pages: int, page_size: int, device: torch.device
) -> ForwardInputs:
    """Requests of `row_lens` rows each that own nothing; contexts start at position 0."""
    num_rows, num_requests = sum(row_lens), len(row_lens)
    padding = torch.full((num_rows,), PADDING_INDEX, dtype=torch.int64, device=device)
    starts = [0]
    for row_len in row_lens:
        assert row_len <= num_pages * page_size
        starts.append(starts[-1] + row_len)
    return ForwardInputs(
        kind=kind,
        token_ids=padding,
        positions=padding.clone(),
        kv_slots=padding.clone(),
        page_table=padding.new_full((num_requests, num_pages), PADDING_INDEX),
        context_lens=torch.tensor(row_lens, device=device),
        state_slots=padding.new_full((num_requests,), PADDING_INDEX),
        row_starts=torch.tensor(starts),
        is_fresh=torch.ones(num_requests, dtype=torch.bool),
        logit_rows=torch.arange(num_requests, device=device),
    )
