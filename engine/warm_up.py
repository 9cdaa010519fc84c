"""Runs planned shapes once, so that no request waits for their compilation.

A dimension becomes dynamic when it is met with a second size, or where it is marked. Decode steps
come first, and every later size of theirs, like every prefill, finds it dynamic. On CUDA our
kernels also choose by the number of rows: of prefills, one size of each range runs here, up to
what the plan allows; of decode steps, every size that there is.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from engine.batch import (
    MIN_TABLE_PAGES,
    PREFILL_ROW_MULTIPLE,
    build_chunks,
    padded_rows,
)
from engine.cache.pools import PADDING_INDEX
from engine.model_config import ModelConfig
from engine.models.hybrid import HybridModel
from engine.sampler import SamplingPlan, sample
from engine.sampling_rows import SamplingTable
from engine.step_memory import SCORED_ROWS_AT_ONCE
from engine.token_step import GREEDY, Chosen, StepFunctions
from engine.verify_step import TakeFeatures
from graphs.family import GraphFamily
from graphs.inputs import ForwardInputs, Kind
from graphs.kernels.moe.configs import GroupedConfig, RouterConfig, grouped_config, router_config

# Sizes of a prefill here that differ from each other and from those of decode steps: equal ones
# would be taken for one dimension.
PREFILL_REQUESTS = 3
# Room for contexts long enough to be split.
PREFILL_PAGES = 64
# Rows and pages of the first decode steps on the CPU: other rows and other pages each time.
CPU_DECODE_SHAPES = ((1, MIN_TABLE_PAGES), (1, 5), (2, 7))
# Width of the slots' page table that those use, at most.
WARM_UP_PAGES = max(num_pages for _, num_pages in CPU_DECODE_SHAPES)
# On the CPU, the plan whose only work is the noise of a whole vocabulary.
DRAWN = replace(GREEDY, is_all_greedy=False)
# A number of rows of each range in which the head has a kernel of its own; prefills score prompts
# in pieces of any size up to the last.
HEAD_ROWS = (1, 2, 4, 16, 32, SCORED_ROWS_AT_ONCE)


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
    take_features: TakeFeatures | None = None,
) -> None:
    """Run padding-only steps: they touch the padding page and slots, no request's.

    `sampling` is the table that requests will use: compiled code is bound to how tensors were
    made.
    """
    if device.type == "cpu":
        for num_rows in (1, 2, 3):
            slots = torch.zeros(num_rows, dtype=torch.int64, device=device)
            logits = torch.zeros(num_rows, sampling.vocab_size, device=device)
            sample(logits, sampling, slots, slots, DRAWN, functions.kernels)
        # Here the page table is as wide as the longest request needs, so widths vary as well.
        for size, num_pages in CPU_DECODE_SHAPES:
            if size in decode.sizes:
                decode.run_padding(size, decode.variants[0], (num_pages - 1) * page_size)
    decode.compile()
    for num_rows in prefill_sizes(model.config, model.embedding.dtype, device, max_prefill_rows):
        inputs = padding_prefill(PREFILL_REQUESTS, num_rows, PREFILL_PAGES, device)
        hidden = model.hidden(inputs, functions.forward)
        if take_features is not None:
            take_features(model.features(hidden), inputs, torch.zeros_like(inputs.token_ids))
    for num_rows in HEAD_ROWS:
        rows = torch.zeros(num_rows, dtype=torch.int64, device=device)
        model.logits(hidden, rows, functions.forward)


def prefill_sizes(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, max_rows: int
) -> list[int]:
    """The fewest rows of a prefill, and on CUDA the fewest of each range with kernels of its own.

    Beyond the fewest, that is where the experts' blocks change.
    """
    least = padded_rows(1, device)
    if device.type != "cuda" or not any(config.is_moe):
        return [least]
    sizes, before = [], None
    for num_rows in range(least, padded_rows(max_rows, device) + 1, PREFILL_ROW_MULTIPLE):
        blocks = expert_blocks(config, dtype, num_rows)
        if blocks != before:
            sizes.append(num_rows)
        before = blocks
    return sizes


def expert_blocks(
    config: ModelConfig, dtype: torch.dtype, num_rows: int
) -> tuple[RouterConfig, GroupedConfig]:
    """How the kernels of the experts are launched for that many rows."""
    experts, hidden = config.num_experts, config.hidden_size
    return router_config(num_rows, hidden, experts, dtype), grouped_config(
        num_rows, experts, config.num_experts_per_tok, hidden, config.moe_intermediate_size, dtype
    )


def padding_prefill(
    num_requests: int, num_rows: int, num_pages: int, device: torch.device
) -> ForwardInputs:
    """Requests of one row each that own nothing, at position 0; further rows are padding."""
    assert num_requests <= num_rows
    padding = torch.full((num_rows,), PADDING_INDEX, dtype=torch.int64, device=device)
    row_starts = list(range(num_requests + 1))
    # Twice as many chunks as requests, so that the two are not taken for one dimension.
    chunks, chunk_starts = build_chunks(row_starts, 2 * num_requests)
    only_prefills = [
        torch.tensor(values, device=device) for values in (row_starts, chunks, chunk_starts)
    ]
    for tensor in only_prefills:
        # Decode steps read none of these, so this is the first size that any code meets.
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return ForwardInputs(
        kind=Kind.PREFILL,
        token_ids=padding,
        positions=padding.clone(),
        kv_slots=padding.clone(),
        page_table=padding.new_full((num_requests, num_pages), PADDING_INDEX),
        context_lens=padding.new_ones(num_requests),
        state_slots=padding.new_full((num_requests,), PADDING_INDEX),
        logit_rows=torch.arange(num_requests, device=device),
        row_starts=only_prefills[0],
        chunks=only_prefills[1],
        chunk_starts=only_prefills[2],
    )
