"""Runs planned shapes once, so that no request waits for their compilation.

On the CPU these are all that there are. On CUDA our kernels also choose by the number of rows: one
size of each range runs here, up to what the plan allows.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from engine.batch import (
    MIN_PREFILL_REQUESTS,
    MIN_TABLE_PAGES,
    PREFILL_ROW_MULTIPLE,
    build_chunks,
)
from engine.cache.pools import PADDING_INDEX
from engine.models.hybrid import ForwardFunctions, HybridModel
from engine.sampler import NoiseFunction
from engine.sampling_rows import SamplingTable
from graphs.inputs import ForwardInputs, Kind

# The first rows of each range: products of few rows, experts, splits of the context.
DECODE_RANGES = (1, 2, 3, 5, 9, 17, 33, 65, 129, 257)
PREFILL_RANGES = (48, 80, 192, 272, 1024, 4096)
# Room for contexts long enough to be split.
WIDE_TABLE_PAGES = 64


@torch.inference_mode()
def warm_up(
    model: HybridModel,
    run: ForwardFunctions,
    make_noise: NoiseFunction,
    table: SamplingTable,
    device: torch.device,
    *,
    max_decode_rows: int,
    max_prefill_rows: int,
) -> None:
    """Run padding-only steps: they touch the padding page and slots, no request's.

    `table` is the one that requests will use: compiled code is bound to how tensors were made.
    """
    for inputs in planned_inputs(device):
        model(inputs, run)
    if device.type == "cuda":
        for inputs in kernel_ranges(device, max_decode_rows, max_prefill_rows):
            model(inputs, run)
    for num_rows in (1, 2, 3):
        positions = torch.zeros(num_rows, dtype=torch.int64, device=device)
        seeds = table.gather(positions).seed
        make_noise(seeds, positions, table.token_ids)


def planned_inputs(device: torch.device) -> Iterator[ForwardInputs]:
    """One input per compilation: a second size of a dimension makes it dynamic.

    Decode batches of 1 are compiled on their own, larger ones share one compilation; prefill
    rows, requests and table widths are dynamic from their smallest size on. The second sizes
    all differ, since equal ones would be taken for one dimension.
    """
    decode, prefill = Kind.DECODE, Kind.PREFILL
    yield padding_inputs(decode, 1, 1, MIN_TABLE_PAGES, device)
    yield padding_inputs(decode, 1, 1, 5, device)
    yield padding_inputs(decode, 2, 2, MIN_TABLE_PAGES, device)
    yield padding_inputs(decode, 3, 3, 5, device)
    num_rows, num_requests = PREFILL_ROW_MULTIPLE, MIN_PREFILL_REQUESTS
    yield padding_inputs(prefill, num_requests, num_rows, MIN_TABLE_PAGES, device)
    yield padding_inputs(prefill, 3, 2 * num_rows, 5, device)


def kernel_ranges(
    device: torch.device, max_decode_rows: int, max_prefill_rows: int
) -> Iterator[ForwardInputs]:
    """One input per range of rows for which some kernel or its blocks differ."""
    for num_rows in DECODE_RANGES:
        if num_rows <= max_decode_rows:
            yield padding_inputs(Kind.DECODE, num_rows, num_rows, WIDE_TABLE_PAGES, device)
    for num_rows in PREFILL_RANGES:
        if num_rows <= max_prefill_rows:
            yield padding_inputs(
                Kind.PREFILL, MIN_PREFILL_REQUESTS, num_rows, WIDE_TABLE_PAGES, device
            )


def padding_inputs(
    kind: Kind,
    num_requests: int,
    num_rows: int,
    num_pages: int,
    device: torch.device,
) -> ForwardInputs:
    """Requests of one row each that own nothing, at position 0; further rows are padding."""
    assert num_requests <= num_rows
    padding = torch.full((num_rows,), PADDING_INDEX, dtype=torch.int64, device=device)
    row_starts = list(range(num_requests + 1))
    # Twice as many chunks as requests, so that the two are not taken for one dimension.
    is_prefill = kind is Kind.PREFILL
    chunks, chunk_starts = build_chunks(row_starts, 2 * num_requests) if is_prefill else ([], [])
    return ForwardInputs(
        kind=kind,
        token_ids=padding,
        positions=padding.clone(),
        kv_slots=padding.clone(),
        page_table=padding.new_full((num_requests, num_pages), PADDING_INDEX),
        context_lens=padding.new_ones(num_requests),
        state_slots=padding.new_full((num_requests,), PADDING_INDEX),
        logit_rows=torch.arange(num_requests, device=device),
        row_starts=torch.tensor(row_starts, device=device),
        chunks=torch.tensor(chunks, dtype=torch.int64, device=device),
        chunk_starts=torch.tensor(chunk_starts, dtype=torch.int64, device=device),
    )
