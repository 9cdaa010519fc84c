"""Attention over a paged KV cache in plain torch.

Shapes: T rows of R requests, HQ query heads, H key/value heads, D head dim. k_pool and v_pool
are [pages, page_size, H, D]; page_table [R, P] names each request's pages in order.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def rotate(x: Tensor, positions: Tensor, inv_freq: Tensor) -> Tensor:
    """Rotary embedding of the first 2 * len(inv_freq) dims of x [T, heads, D], half-split."""
    half = inv_freq.shape[0]
    angles = positions[:, None, None].float() * inv_freq
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


@torch.library.custom_op("deltaloom::write_kv_reference", mutates_args={"k_pool", "v_pool"})
def write_kv(k_pool: Tensor, v_pool: Tensor, kv_slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Store k and v [T, H, D] at kv_slots [T] (page * page_size + offset), in place."""
    k_pool.view(-1, *k_pool.shape[2:])[kv_slots] = k
    v_pool.view(-1, *v_pool.shape[2:])[kv_slots] = v


def paged_decode_attention(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, page_table: Tensor, context_lens: Tensor
) -> Tensor:
    """One query row per request, q [R, HQ, D], over its first context_lens[r] tokens."""
    num_requests, num_q_heads, head_dim = q.shape
    num_kv_heads = k_pool.shape[2]
    k = k_pool[page_table].flatten(1, 2)  # [R, S, H, D]
    v = v_pool[page_table].flatten(1, 2)
    outside = torch.arange(k.shape[1], device=q.device) >= context_lens[:, None]
    # Stale pages may hold NaN, and 0 * NaN is NaN.
    v = v.masked_fill(outside[:, :, None, None], 0.0).float()
    # Products and sums instead of matmul: compiled, they read the pages where they lie.
    grouped_q = q.view(num_requests, 1, num_kv_heads, -1, head_dim).float()
    scores = (grouped_q * k[:, :, :, None].float()).sum(-1) * head_dim**-0.5  # [R, S, H, G]
    weights = scores.masked_fill(outside[:, :, None, None], -torch.inf).softmax(1)
    attended: Tensor = (weights[..., None] * v[:, :, :, None]).sum(1)
    return attended.to(q.dtype).view(num_requests, num_q_heads, head_dim)


@torch.library.custom_op("deltaloom::paged_prefill_attention_reference", mutates_args=())
def paged_prefill_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    page_table: Tensor,
    context_lens: Tensor,
    row_starts: Tensor,
) -> Tensor:
    """Any number of rows per request, q [T, HQ, D], causal; the rows' own k and v are stored.

    The last row of request r is at position context_lens[r] - 1. row_starts [R + 1] is on the
    CPU; rows past row_starts[-1] are padding and so are requests without rows: output zero.
    """
    out = torch.zeros_like(q)
    page_size = k_pool.shape[1]
    starts = row_starts.tolist()
    for index, context_len in enumerate(context_lens.tolist()):
        rows = slice(starts[index], starts[index + 1])
        num_rows = rows.stop - rows.start
        if num_rows == 0:
            continue
        pages = page_table[index, : -(-context_len // page_size)]
        k = k_pool[pages].flatten(0, 1)[:context_len].transpose(0, 1)  # [H, S, D]
        v = v_pool[pages].flatten(0, 1)[:context_len].transpose(0, 1)
        last_visible = torch.arange(context_len - num_rows, context_len, device=q.device)
        visible = torch.arange(context_len, device=q.device) <= last_visible[:, None]
        repeats = q.shape[1] // k.shape[0]
        attended = F.scaled_dot_product_attention(
            q[rows].transpose(0, 1)[None],
            k.repeat_interleave(repeats, dim=0)[None],
            v.repeat_interleave(repeats, dim=0)[None],
            attn_mask=visible,
        )
        out[rows] = attended[0].transpose(0, 1)
    return out


@paged_prefill_attention.register_fake
def _(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    page_table: Tensor,
    context_lens: Tensor,
    row_starts: Tensor,
) -> Tensor:
    return torch.empty_like(q)
