"""Bytes of the tensors that one step holds at once: plain functions of sizes, no allocation.

The formulas follow the order in which the layers and our Triton ops make and drop tensors; ADR
13 says which. Letters: T rows, R requests, NC chunks, h hidden, the rest as in the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.model_config import LayerKind, ModelConfig
from graphs.inputs import CHUNK_ROWS, Kind
from graphs.kernels.attention.configs import decode_config, num_decode_splits
from graphs.kernels.gdn.prefill import NUM_FACTORS, working_dtype
from graphs.kernels.moe.configs import MAX_FEW_ROWS, router_config
from graphs.kernels.moe.routing import LOGITS_PADDING

FP32_BYTES = 4
INDEX_BYTES = 8
MIN_TILE_ROWS = 16
# Live bytes per logit in `engine.sampler.sample` with every option in use: 50 of tensors while a
# whole vocabulary is ranked (12 scores and noise, the rest 64-bit keys, their sorted twin and its
# indices), and three 64-bit words for what the sort works in.
SAMPLER_BYTES_PER_LOGIT = 74
# `engine.sampler.score_tokens`: 25 of tensors, and the top-k's.
SCORER_BYTES_PER_LOGIT = 32


@dataclass(frozen=True)
class StepShape:
    """The most that steps of one kind hold. `context_len`: tokens that a page table has room for.

    `num_logit_rows`: rows whose logits the step computes.
    """

    kind: Kind
    num_rows: int
    num_requests: int
    num_logit_rows: int
    context_len: int

    @property
    def num_chunks(self) -> int:
        """NC: each request begins a chunk of its own, so one row each fills the most chunks."""
        requests = min(self.num_requests, self.num_rows)
        return max(2, requests + (self.num_rows - requests) // CHUNK_ROWS)


def block_bytes(
    config: ModelConfig, shape: StepShape, *, dtype: torch.dtype, is_triton: bool
) -> int:
    """The largest decoder block: its inputs and both norms' results [T, h], and mixer or MLP.

    Layers run one after the other, so this is a maximum over layer kinds and no sum.
    """
    hidden = shape.num_rows * config.hidden_size * dtype.itemsize
    parts = [2 * hidden]
    if LayerKind.GDN in config.layer_kinds:
        parts.append(gdn_bytes(config, shape, dtype=dtype, is_triton=is_triton))
    if LayerKind.ATTENTION in config.layer_kinds:
        parts.append(attention_bytes(config, shape, dtype=dtype))
    if not all(config.is_moe):
        parts.append(mlp_bytes(shape.num_rows, config.hidden_size, config.intermediate_size, dtype))
    if any(config.is_moe):
        parts.append(moe_bytes(config, shape.num_rows, dtype=dtype))
    return 4 * hidden + max(parts)


def gdn_bytes(config: ModelConfig, shape: StepShape, *, dtype: torch.dtype, is_triton: bool) -> int:
    """The GDN mixer: in-projection [T, C + HV * V + 2 * HV], the core, y [T, HV * V], out [T, h].

    The output of the core and that of the out-projection live while the core's scratch does: the
    boundary states go with the mixer's frame.
    """
    rows, item = shape.num_rows, dtype.itemsize
    columns = config.conv_dim + config.value_dim + 2 * config.num_v_heads_gdn
    projected, y = rows * columns * item, rows * config.value_dim * item
    out = rows * config.hidden_size * item
    if shape.kind is Kind.DECODE:
        state = config.value_dim * config.head_k_dim_gdn * FP32_BYTES
        # The reference gathers the states of all rows and makes new ones.
        return projected + y + out + (0 if is_triton else 4 * rows * state)
    if not is_triton:
        return projected + y + out + gdn_reference_bytes(config, rows, shape.num_chunks)
    handed_on, solve_scratch, boundary = gdn_chunk_bytes(config, dtype)
    chunks = shape.num_chunks
    core = chunks * (handed_on + boundary) + max(chunks * solve_scratch, y)
    return projected + max(core, chunks * boundary + y + out)


def gdn_chunk_bytes(config: ModelConfig, dtype: torch.dtype) -> tuple[int, int, int]:
    """Of one chunk of `graphs.kernels.gdn.prefill`: handed on, the solver's scratch, the state.

    Handed on, W the working dtype: queries_keys [2H, 64, KP] W, values [HV, VP, 64] W, products
    [H, 64, 64] and lengths [H, 64] fp32, inverses [HV, 64, 64] W, factors [HV, 6, 64] fp32.
    Scratch: [HV, 64, 64] fp32. State before the chunk: [HV, V, K] fp32.
    """
    heads, v_heads, rows = config.num_k_heads_gdn, config.num_v_heads_gdn, CHUNK_ROWS
    padded_k, padded_v = pad_dim(config.head_k_dim_gdn), pad_dim(config.head_v_dim_gdn)
    working = 2 * heads * rows * padded_k + v_heads * padded_v * rows + v_heads * rows * rows
    fp32 = heads * rows * rows + heads * rows + v_heads * NUM_FACTORS * rows
    handed_on = working * working_dtype(dtype).itemsize + fp32 * FP32_BYTES
    boundary = v_heads * config.head_v_dim_gdn * config.head_k_dim_gdn * FP32_BYTES
    return handed_on, v_heads * rows * rows * FP32_BYTES, boundary


def gdn_reference_bytes(config: ModelConfig, num_rows: int, num_chunks: int) -> int:
    """At most what `graphs.kernels.gdn.reference.gdn_prefill` adds, all rows of one request.

    fp32 throughout: 9 tensors of keys' and 8 of values' width, 5 systems [64], the conv's 2 [C],
    and the boundary states three times: in a list, stacked, and returned.
    """
    v_heads = config.num_v_heads_gdn
    keys, values = v_heads * config.head_k_dim_gdn, config.value_dim
    row = 9 * keys + 8 * values + 5 * v_heads * CHUNK_ROWS + 2 * config.conv_dim
    state = config.value_dim * config.head_k_dim_gdn
    return FP32_BYTES * ((num_rows + CHUNK_ROWS) * row + 3 * num_chunks * state)


def attention_bytes(config: ModelConfig, shape: StepShape, *, dtype: torch.dtype) -> int:
    """The attention mixer: qkv, q and attended [T, HQ * D], then out [T, h] in place of q.

    Decode adds, where it splits contexts, each split's fp32 result [T, HQ, splits, D + 1]. The
    torch backend's copies of a context are not in here (see ADR 13).
    """
    rows, item = shape.num_rows, dtype.itemsize
    q = rows * config.num_q_heads * config.head_dim
    kv = rows * config.num_kv_heads * config.head_dim
    out = rows * config.hidden_size
    partials = 0
    if shape.kind is Kind.DECODE:
        rows_per_request = rows // shape.num_requests
        packed = config.num_q_heads // config.num_kv_heads * rows_per_request
        pairs = shape.num_requests * config.num_kv_heads
        launch = decode_config(dtype, config.head_dim, packed, pairs)
        splits = num_decode_splits(launch, pairs, shape.context_len)
        partials = rows * config.num_q_heads * splits * (config.head_dim + 1) * FP32_BYTES
    return (2 * q + 2 * kv + q + max(q, out)) * item + partials


def mlp_bytes(num_rows: int, hidden: int, inner: int, dtype: torch.dtype) -> int:
    """The dense MLP: gate_up [T, 2 * I] and its swiglu [T, I]; then that and out [T, h].

    With few rows one kernel goes from x to the swiglu; that is less.
    """
    return num_rows * dtype.itemsize * (inner + max(2 * inner, hidden))


def moe_bytes(config: ModelConfig, num_rows: int, *, dtype: torch.dtype) -> int:
    """The experts, S = top_k + 1 slots a row: all tensors of `graphs.kernels.moe`, none dropped.

    Logits [splits, T, E + 16] fp32; weights, ids, ranks and pairs [T * S] of 4 bytes; counts of
    at most T chunks [E] of 1 byte; tiles [3, N] int32; inner [T * S, I], outputs [T * S, h] and
    out [T, h].
    """
    hidden, experts = config.hidden_size, config.num_experts
    inner = max(config.moe_intermediate_size, config.shared_expert_intermediate_size)
    # Few rows are split more often, and their tiles are smaller.
    few_rows = min(num_rows, MAX_FEW_ROWS)
    splits = router_config(few_rows, hidden, experts, dtype).splits
    pairs = num_rows * (config.num_experts_per_tok + 1)
    tiles = pairs // MIN_TILE_ROWS + experts + 1
    logits = max(splits * few_rows, num_rows) * (experts + LOGITS_PADDING) * FP32_BYTES
    routing = (4 * pairs + 3 * tiles) * FP32_BYTES + num_rows * experts
    return logits + routing + (pairs * (inner + hidden) + num_rows * hidden) * dtype.itemsize


def head_bytes(config: ModelConfig, shape: StepShape, *, dtype: torch.dtype) -> int:
    """x and residual [T, h], their logit rows and norms (4 times [N, h]), logits [N, V]."""
    wanted = shape.num_logit_rows * (4 * config.hidden_size + config.vocab_size)
    return (2 * shape.num_rows * config.hidden_size + wanted) * dtype.itemsize


def sampler_bytes(num_rows: int, vocab_size: int) -> int:
    """What the sampler adds to the logits of `num_rows` rows with every option in use."""
    return num_rows * vocab_size * SAMPLER_BYTES_PER_LOGIT


def scorer_bytes(num_rows: int, vocab_size: int) -> int:
    """What scoring `num_rows` prompt tokens at once adds to their logits."""
    return num_rows * vocab_size * SCORER_BYTES_PER_LOGIT


def input_bytes(shape: StepShape, page_size: int) -> int:
    """The int64 tensors of `ForwardInputs`: five per row at most, the page table, the chunks."""
    pages = shape.num_requests * (-(-shape.context_len // page_size) + 4)
    return INDEX_BYTES * (5 * shape.num_rows + pages + 2 * shape.num_chunks)


def pad_dim(size: int) -> int:
    """The power of two that a head dim is padded to."""
    return 1 << (size - 1).bit_length()
