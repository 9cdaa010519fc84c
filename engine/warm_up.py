"""Runs planned shapes once, so that no request waits for their compilation.

On CUDA our kernels also choose by the number of rows: of prefills, one size of each range runs
here, up to what the plan allows; of decode steps, every size that there is.
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
from engine.models.hybrid import HybridModel
from engine.sampler import SamplingPlan
from engine.sampling_rows import SamplingTable
from engine.token_step import Chosen, StepFunctions
from graphs.family import GraphFamily
from graphs.inputs import ForwardInputs, Kind

# The first rows of each range: products of few rows, experts, splits of the context.
PREFILL_RANGES = (48, 80, 192, 272, 1024, 4096)
# Room for contexts long enough to be split.
WIDE_TABLE_PAGES = 64
# Width of the slots' page table that decode steps here use, at most.
WARM_UP_PAGES = 5


@torch.inference_mode()
def warm_up(
    model: HybridModel,
    functions: StepFunctions,
    decode: GraphFamily[SamplingPlan, Chosen],
    sampling: SamplingTable,
    device: torch.device,
    *,
    max_prefill_rows: int,
    page_size: int,
) -> None:
    """Run padding-only steps: they touch the padding page and slots, no request's.

    `sampling` is the table that requests will use: compiled code is bound to how tensors were
    made.
    """
    for inputs in prefill_inputs(device):
        model(inputs, functions.forward)
    if device.type == "cuda":
        for inputs in prefill_ranges(device, max_prefill_rows):
            model(inputs, functions.forward)
    for num_rows in (1, 2, 3):
        positions = torch.zeros(num_rows, dtype=torch.int64, device=device)
        seeds = sampling.gather(positions).seed
        functions.kernels.make_noise(seeds, positions, sampling.token_ids)
    if device.type == "cpu":
        # Here the page table is as wide as the longest request needs: a second width makes the
        # width dynamic. Sizes and widths that become dynamic together must differ.
        smallest = decode.sizes[:3]
        for size, num_pages in (
            (1, MIN_TABLE_PAGES),
            (1, WARM_UP_PAGES),
            (2, MIN_TABLE_PAGES),
            (smallest[-1], WARM_UP_PAGES),
        ):
            if size in smallest:
                decode.run_padding(size, decode.variants[0], (num_pages - 1) * page_size)
    decode.compile()


def prefill_inputs(device: torch.device) -> Iterator[ForwardInputs]:
    """Prefills whose second sizes make rows, requests and table widths dynamic.

    They all differ, since equal ones would be taken for one dimension.
    """
    num_rows, num_requests = PREFILL_ROW_MULTIPLE, MIN_PREFILL_REQUESTS
    yield padding_prefill(num_requests, num_rows, MIN_TABLE_PAGES, device)
    yield padding_prefill(3, 2 * num_rows, 5, device)


def prefill_ranges(device: torch.device, max_rows: int) -> Iterator[ForwardInputs]:
    """One prefill per range of rows for which some kernel or its blocks differ."""
    for num_rows in PREFILL_RANGES:
        if num_rows <= max_rows:
            yield padding_prefill(MIN_PREFILL_REQUESTS, num_rows, WIDE_TABLE_PAGES, device)


def padding_prefill(
    num_requests: int, num_rows: int, num_pages: int, device: torch.device
) -> ForwardInputs:
    """Requests of one row each that own nothing, at position 0; further rows are padding."""
    assert num_requests <= num_rows
    padding = torch.full((num_rows,), PADDING_INDEX, dtype=torch.int64, device=device)
    row_starts = list(range(num_requests + 1))
    # Twice as many chunks as requests, so that the two are not taken for one dimension.
    chunks, chunk_starts = build_chunks(row_starts, 2 * num_requests)
    return ForwardInputs(
        kind=Kind.PREFILL,
        token_ids=padding,
        positions=padding.clone(),
        kv_slots=padding.clone(),
        page_table=padding.new_full((num_requests, num_pages), PADDING_INDEX),
        context_lens=padding.new_ones(num_requests),
        state_slots=padding.new_full((num_requests,), PADDING_INDEX),
        logit_rows=torch.arange(num_requests, device=device),
        row_starts=torch.tensor(row_starts, device=device),
        chunks=torch.tensor(chunks, device=device),
        chunk_starts=torch.tensor(chunk_starts, device=device),
    )
