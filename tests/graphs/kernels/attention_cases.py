"""Paged caches whose every unused place is NaN, and attention over them in fp64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tolerances import KERNEL_BF16_RTOL, KERNEL_FP32_RTOL

TOLERANCES = {
    torch.float32: KERNEL_FP32_RTOL,
    torch.float16: KERNEL_BF16_RTOL,
    torch.bfloat16: KERNEL_BF16_RTOL,
}
CHUNK = 64


@dataclass(frozen=True)
class Heads:
    """Query heads, key/value heads, head dim, tokens of a page."""

    num_q: int
    num_kv: int
    dim: int
    page_size: int


SIX = Heads(6, 1, 64, 16)
PLAIN = Heads(2, 2, 32, 8)
SIXTEEN = Heads(16, 1, 32, 32)
PADDED_DIM = Heads(4, 2, 48, 64)
GEOMETRIES = {"27B": Heads(24, 4, 256, 64), "35B-A3B": Heads(16, 2, 256, 64)}


def poison_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an op allocates starts as NaN. (They allocate nothing but floats, without grad.)"""
    empty = torch.empty

    def poisoned(*size: Any, **options: Any) -> Tensor:
        memory = empty(*size, **options)
        if memory.is_floating_point() and not memory.requires_grad:
            memory.fill_(float("nan"))
        return memory

    monkeypatch.setattr(torch, "empty", poisoned)


def relative_error(result: Tensor, expected: Tensor) -> float:
    """Of a tensor on any device to one on the CPU, Frobenius norm."""
    return float((result.double().cpu() - expected).norm() / expected.norm())


def bits(x: Tensor) -> Tensor:
    """x as integers: equal bits are equal, NaN too."""
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def between_nan(x: Tensor) -> Tensor:
    """x [N, M] as a view into wider rows of NaN."""
    wide = x.new_full((x.shape[0], x.shape[1] + 32), float("nan"))
    wide[:, 16 : x.shape[1] + 16] = x
    return wide[:, 16 : x.shape[1] + 16]


@dataclass(frozen=True)
class PagedContext:
    """Keys and values of requests' tokens in scattered pages; all else in the pools is NaN.

    The page table is a view into a wider one; past a request's pages it names, like its
    neighbours, a page that is NaN throughout. A context of 0 is a padding request's.
    """

    context_lens: list[int]
    k_pool: Tensor
    v_pool: Tensor
    page_table: Tensor

    @property
    def lens(self) -> Tensor:
        return torch.tensor(self.context_lens, device=self.k_pool.device)

    def tokens(self, request: int) -> tuple[Tensor, Tensor]:
        """fp64 keys and values [S, H, D] of a request's context, on the CPU."""
        context_len = self.context_lens[request]
        pages = self.page_table[request].cpu()
        k, v = (p.cpu()[pages].flatten(0, 1)[:context_len] for p in (self.k_pool, self.v_pool))
        return k.double(), v.double()

    def slots(self, request: int, positions: range) -> list[int]:
        """The KV slots of a request's positions."""
        page_size = self.k_pool.shape[1]
        pages = self.page_table[request].tolist()
        return [pages[p // page_size] * page_size + p % page_size for p in positions]


def build_context(
    heads: Heads, context_lens: list[int], dtype: torch.dtype, device: torch.device
) -> PagedContext:
    """Random keys and values for the given contexts."""
    counts = [-(-n // heads.page_size) for n in context_lens]
    num_pages = 2 + sum(counts)
    stale_page = num_pages - 1
    shape = (num_pages, heads.page_size, heads.num_kv, heads.dim)
    pools = [torch.full(shape, float("nan")) for _ in range(2)]
    order = (1 + torch.randperm(sum(counts))).tolist()
    table = torch.full((len(counts), max(counts) + 5), stale_page)
    for request, (count, context_len) in enumerate(zip(counts, context_lens, strict=True)):
        pages, order = order[:count], order[count:]
        table[request, :count] = torch.tensor(pages, dtype=torch.int64)
        if context_len == 0:
            table[request] = 0
        for pool in pools:
            values = torch.full((count * heads.page_size, heads.num_kv, heads.dim), float("nan"))
            values[:context_len] = torch.randn(context_len, heads.num_kv, heads.dim)
            pool[pages] = values.view(count, *shape[1:])
    k_pool, v_pool = (pool.to(device, dtype) for pool in pools)
    return PagedContext(context_lens, k_pool, v_pool, table.to(device)[:, : max(counts) + 2])


def random_qkv(heads: Heads, num_rows: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Rows of a qkv product, between NaN."""
    columns = 2 * (heads.num_q + heads.num_kv) * heads.dim
    return between_nan(torch.randn(num_rows, columns).to(device, dtype))


def gates(heads: Heads, qkv: Tensor) -> Tensor:
    """The gates [T, HQ * D] of qkv, fp64 on the CPU."""
    columns = qkv[:, : 2 * heads.num_q * heads.dim].double().cpu()
    return columns.unflatten(1, (heads.num_q, 2, heads.dim))[:, :, 1].flatten(1)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k / sqrt(D)) v of the last tokens' queries q [N, HQ, D], causal; [N, HQ * D]."""
    repeats = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double().cpu(), k) * q.shape[2] ** -0.5
    last_visible = torch.arange(k.shape[0] - q.shape[0], k.shape[0])
    hidden = torch.arange(k.shape[0]) > last_visible[:, None]
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)


def build_chunks(num_rows: list[int], num_padding: int = 0) -> tuple[Tensor, Tensor]:
    """row_starts and chunks of requests with that many rows, on the CPU."""
    starts = [sum(num_rows[:r]) for r in range(len(num_rows) + 1)]
    chunks = [
        (r, first) for r in range(len(num_rows)) for first in range(starts[r], starts[r + 1], CHUNK)
    ]
    chunks += [(len(num_rows) - 1, starts[-1])] * num_padding
    return torch.tensor(starts), torch.tensor(chunks)
