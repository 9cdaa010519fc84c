"""From what steps may be at most to the fixed parts of the memory plan."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.activations import (
    StepShape,
    block_bytes,
    head_bytes,
    input_bytes,
    sampler_bytes,
    scorer_bytes,
)
from engine.batch import MIN_CUDA_PREFILL_ROWS, MIN_TABLE_PAGES
from engine.memory import NO_DRAFTS, DraftMemory, FixedBytes
from engine.model_config import ModelConfig
from engine.slot_tables import table_bytes
from graphs.inputs import CHUNK_ROWS, Kind
from graphs.sizes import family_sizes

# Greedy, sampled, and sampled with log-probabilities are graphs of their own.
NUM_GRAPH_VARIANTS = 3
# What an instantiated graph keeps on the device: about 16 kernels a layer of 16 KiB each.
GRAPH_BYTES_PER_LAYER = 2**18
# The runner computes logits of scored rows, and scores them, in pieces of that many: those of a
# whole prefill chunk would take gigabytes.
SCORED_ROWS_AT_ONCE = 64
# The CUDA context's growth, cuBLAS workspaces, modules, and gaps that the allocator cannot fill.
CUDA_RESERVE_BYTES = 2**30


@dataclass(frozen=True)
class StepLimits:
    """What the plan allows."""

    max_running_requests: int
    max_prefill_tokens: int
    max_model_len: int
    page_size: int


@dataclass(frozen=True)
class StepSettings:
    """How steps run. `is_cuda` also stands for our Triton ops in place of the references."""

    dtype: torch.dtype
    is_cuda: bool
    is_compiled: bool
    is_captured: bool


def fixed_bytes(
    config: ModelConfig,
    limits: StepLimits,
    settings: StepSettings,
    *,
    num_weights: int,
    draft: DraftMemory = NO_DRAFTS,
) -> FixedBytes:
    """Bytes of everything but slots and pages; `num_weights` counts the target's values."""
    prefill = prefill_shape(limits)
    sizes = family_sizes(limits.max_running_requests)
    decodes = [decode_shape(limits, size, draft) for size in sizes]
    # Every size of the decode family also runs uncaptured once, to be compiled.
    blocks = max(
        block_bytes(config, shape, dtype=settings.dtype, is_triton=settings.is_cuda)
        for shape in (prefill, *decodes)
    )
    steps = max(decode_bytes(config, shape, settings) for shape in decodes)
    num_graphs = len(sizes) * NUM_GRAPH_VARIANTS
    graphs = steps + num_graphs * config.num_layers * GRAPH_BYTES_PER_LAYER
    return FixedBytes(
        weights=num_weights * settings.dtype.itemsize,
        graphs=graphs if settings.is_captured else 0,
        activations=blocks + input_bytes(prefill, limits.page_size),
        sampling=sampling_bytes(config, limits, settings, draft),
        tables=table_bytes(
            limits.max_running_requests,
            -(-(limits.max_model_len + draft.rows_per_request - 1) // limits.page_size)
            + MIN_TABLE_PAGES,
        ),
        drafts=draft.fixed_bytes + draft.num_weights * settings.dtype.itemsize,
        reserve=CUDA_RESERVE_BYTES if settings.is_cuda else 0,
    )


def prefill_shape(limits: StepLimits) -> StepShape:
    """The largest prefill, its rows padded."""
    most = max(limits.max_prefill_tokens, MIN_CUDA_PREFILL_ROWS)
    num_rows = -(-most // CHUNK_ROWS) * CHUNK_ROWS
    num_requests = min(limits.max_running_requests, num_rows)
    num_logit_rows = num_requests + min(SCORED_ROWS_AT_ONCE, limits.max_prefill_tokens)
    return StepShape(Kind.PREFILL, num_rows, num_requests, num_logit_rows, limits.max_model_len)


def decode_shape(limits: StepLimits, num_requests: int, draft: DraftMemory) -> StepShape:
    """A decode step, or with drafts a verify step, of that many requests."""
    num_rows = num_requests * draft.rows_per_request
    return StepShape(Kind.DECODE, num_rows, num_requests, num_rows, limits.max_model_len)


def decode_bytes(config: ModelConfig, shape: StepShape, settings: StepSettings) -> int:
    """What one decode or verify step holds: its blocks, or after them the head and sampling."""
    blocks = block_bytes(config, shape, dtype=settings.dtype, is_triton=settings.is_cuda)
    head = head_bytes(config, shape, dtype=settings.dtype)
    return max(blocks, head + sampler_bytes(shape.num_logit_rows, config.vocab_size))


def sampling_bytes(
    config: ModelConfig, limits: StepLimits, settings: StepSettings, draft: DraftMemory
) -> int:
    """Logits and sampling of a step that is not captured: rows that sample, a piece of scored ones.

    Beside the logits [N, V] a row has 4 tensors [N, h] (see `head_bytes`).
    """
    num_sampled = limits.max_running_requests * draft.rows_per_request
    row = (4 * config.hidden_size + config.vocab_size) * settings.dtype.itemsize
    sampler = sampler_bytes(num_sampled, config.vocab_size)
    num_scored = min(SCORED_ROWS_AT_ONCE, limits.max_prefill_tokens)
    scorer = scorer_bytes(num_scored, config.vocab_size)
    return (num_sampled + num_scored) * row + max(sampler, scorer)
