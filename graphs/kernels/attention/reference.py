"""Attention over a paged KV cache in plain torch; signatures and contracts are those of `ops`.

Shapes: T rows of R requests, HQ query heads, H key/value heads, D head dim. k_pool and v_pool
are [pages, page_size, H, D]; page_table [R, P] names each request's pages in order. qkv has the
columns [per query head: q, gate | k | v].
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from graphs.kernels.norm.reference import rms_norm


def rotate(x: Tensor, positions: Tensor, inv_freq: Tensor) -> Tensor:
    """Rotary embedding of the first 2 * len(inv_freq) dims of x [T, heads, D], half-split."""
    half = inv_freq.shape[0]
    angles = positions[:, None, None].float() * inv_freq
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def write_kv(k_pool: Tensor, v_pool: Tensor, kv_slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Store k and v [T, H, D] at kv_slots [T] (page * page_size + offset), in place."""
    page_size = k_pool.shape[1]
    k_pool[kv_slots // page_size, kv_slots % page_size] = k
    v_pool[kv_slots // page_size, kv_slots % page_size] = v


def split_qkv(
    qkv: Tensor, num_q_heads: int, head_dim: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Views of qkv: q and gate [T, HQ, D], k and v [T, H, D]."""
    q_columns = 2 * num_q_heads * head_dim
    kv_columns = (qkv.shape[1] - q_columns) // 2
    q_gate, k, v = qkv.split([q_columns, kv_columns, kv_columns], dim=-1)
    q, gate = q_gate.unflatten(-1, (num_q_heads, 2, head_dim)).unbind(2)
    return q, gate, k.unflatten(-1, (-1, head_dim)), v.unflatten(-1, (-1, head_dim))


def norm_and_rotate(
    x: Tensor, weight: Tensor, inv_freq: Tensor, positions: Tensor, eps: float
) -> Tensor:
    """Zero-centred RMSNorm of x [T, heads, D], then its first dims turn; fp32, rounded once."""
    return rotate(rms_norm(x.float(), weight, eps), positions, inv_freq).to(x.dtype)


def prepare_qkv(
    qkv: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    inv_freq: Tensor,
    positions: Tensor,
    kv_slots: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    num_q_heads: int,
    eps: float,
) -> Tensor:
    """See `ops.prepare_qkv`; rows of padding requests write to page 0."""
    q, _, k, v = split_qkv(qkv, num_q_heads, k_pool.shape[3])
    k = norm_and_rotate(k, k_norm, inv_freq, positions, eps)
    write_kv(k_pool, v_pool, kv_slots, k, v)
    return norm_and_rotate(q, q_norm, inv_freq, positions, eps)


def paged_decode_attention(
    q: Tensor,
    qkv: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    page_table: Tensor,
    context_lens: Tensor,
    rows_per_request: int,
    first_token: int = 0,
) -> Tensor:
    """See `ops.paged_decode_attention`; rows of padding requests are NaN.

    first_token: no row sees a token before it; one that sees none at all is NaN.
    """
    num_rows, num_q_heads, head_dim = q.shape
    num_requests, num_kv_heads = page_table.shape[0], k_pool.shape[2]
    k = k_pool[page_table].flatten(1, 2)  # [R, S, H, D]
    v = v_pool[page_table].flatten(1, 2)
    tokens = torch.arange(k.shape[1], device=q.device)
    row_offsets = torch.arange(1 - rows_per_request, 1, device=q.device)
    visible = tokens[:, None] < (context_lens[:, None] + row_offsets)[:, None]  # [R, S, rows]
    visible = (visible & (tokens >= first_token)[:, None])[:, :, None, :, None]
    outside = (tokens >= context_lens[:, None]) | (tokens < first_token)
    # Stale pages may hold NaN, and 0 * NaN is NaN.
    v = v.masked_fill(outside[:, :, None, None], 0.0).float()
    # Products and sums instead of matmul: compiled, they read the pages where they lie.
    grouped_q = q.view(num_requests, 1, rows_per_request, num_kv_heads, -1, head_dim)
    grouped_q = grouped_q.transpose(2, 3).float()  # [R, 1, H, rows, G, D]
    scores = (grouped_q * k[:, :, :, None, None].float()).sum(-1) * head_dim**-0.5
    weights = scores.masked_fill(~visible, -torch.inf).softmax(1)  # [R, S, H, rows, G]
    attended = (weights[..., None] * v[:, :, :, None, None]).sum(1)  # [R, H, rows, G, D]
    attended = attended.transpose(1, 2).reshape(num_rows, num_q_heads, head_dim)
    gate = split_qkv(qkv, num_q_heads, head_dim)[1]
    gated: Tensor = attended * torch.sigmoid(gate.float())
    return gated.to(q.dtype).flatten(1)


def paged_prefill_attention(
    q: Tensor,
    qkv: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    page_table: Tensor,
    context_lens: Tensor,
    row_starts: Tensor,
    chunks: Tensor,
    first_token: int = 0,
) -> Tensor:
    """See `ops.paged_prefill_attention`; chunks are not looked at.

    first_token: no row sees a token before it; one that sees none at all is zero.
    """
    attended: Tensor = attend_requests(
        q, k_pool, v_pool, page_table, context_lens, row_starts, first_token
    )
    gate = split_qkv(qkv, q.shape[1], q.shape[2])[1]
    return (attended * torch.sigmoid(gate)).flatten(1)


@torch.library.custom_op("deltaloom::attend_requests_reference", mutates_args=())
def attend_requests(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    page_table: Tensor,
    context_lens: Tensor,
    row_starts: Tensor,
    first_token: int,
) -> Tensor:
    """Causal attention of q [T, HQ, D] request by request; rows past row_starts[-1] are zero.

    As are rows that see no token, from first_token on.
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
        seen = slice(first_token, context_len)
        k = k_pool[pages].flatten(0, 1)[seen].transpose(0, 1)  # [H, S, D]
        v = v_pool[pages].flatten(0, 1)[seen].transpose(0, 1)
        last_visible = torch.arange(context_len - num_rows, context_len, device=q.device)
        tokens = torch.arange(context_len, device=q.device)[seen]
        repeats = q.shape[1] // k.shape[0]
        attended = F.scaled_dot_product_attention(
            q[rows].transpose(0, 1)[None],
            k.repeat_interleave(repeats, dim=0)[None],
            v.repeat_interleave(repeats, dim=0)[None],
            attn_mask=tokens <= last_visible[:, None],
        )
        seeing = last_visible >= first_token
        out[rows] = torch.where(seeing[:, None, None], attended[0].transpose(0, 1), 0.0)
    return out


@attend_requests.register_fake
def _(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    page_table: Tensor,
    context_lens: Tensor,
    row_starts: Tensor,
    first_token: int,
) -> Tensor:
    return torch.empty_like(q)
