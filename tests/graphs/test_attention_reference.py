"""E2: paged attention on pools whose unused pages hold NaN."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.batch import build_chunks
from graphs.kernels.attention import reference
from tests.graphs.allocations import largest_allocation
from tests.oracle.gated_delta import causal_attention
from tests.tolerances import KERNEL_FP32_RTOL

PAGE_SIZE = 8
NUM_PAGES = 40


def place(pages: list[int], positions: range) -> Tensor:
    return torch.tensor([pages[p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE for p in positions])


@pytest.mark.parametrize(
    ("num_q_heads", "num_kv_heads", "head_dim"), [(6, 2, 32), (4, 4, 16), (16, 1, 8)]
)
def test_prefill_chunks_then_decode(num_q_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """E2: two requests, uneven chunks, scattered pages. Oracle: whole-sequence attention, fp64."""
    torch.manual_seed(0)
    shape = (NUM_PAGES, PAGE_SIZE, num_kv_heads, head_dim)
    k_pool, v_pool = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
    order = (1 + torch.randperm(NUM_PAGES - 1)).tolist()
    pages = [order[:10], order[10:14]]
    lens = [70, 23]
    q = [torch.randn(n, num_q_heads, head_dim) for n in lens]
    k = [torch.randn(n, num_kv_heads, head_dim) for n in lens]
    v = [torch.randn(n, num_kv_heads, head_dim) for n in lens]
    # Gates of infinity let everything through.
    gates = torch.full((80, 2 * (num_q_heads + num_kv_heads) * head_dim), torch.inf)
    table = torch.tensor([pages[0], pages[1] + [0] * 6])
    got: list[list[Tensor]] = [[], []]
    for cuts in ([(0, 33), (0, 1)], [(33, 68), (1, 20)]):
        rows = [slice(*cut) for cut in cuts]
        slots = torch.cat([place(pages[r], range(*cuts[r])) for r in range(2)])
        reference.write_kv(
            k_pool,
            v_pool,
            slots,
            torch.cat([k[r][rows[r]] for r in range(2)]),
            torch.cat([v[r][rows[r]] for r in range(2)]),
        )
        sizes = [stop - start for start, stop in cuts]
        out = reference.paged_prefill_attention(
            torch.cat([*(q[r][rows[r]] for r in range(2)), torch.zeros(2, num_q_heads, head_dim)]),
            gates[: sum(sizes) + 2],
            k_pool,
            v_pool,
            torch.cat([table, torch.zeros(1, 10, dtype=torch.int64)]),
            torch.tensor([cuts[0][1], cuts[1][1], 0]),
            torch.tensor(row_starts := [0, sizes[0], sum(sizes), sum(sizes)]),
            torch.tensor(build_chunks(row_starts)[0]),
        ).unflatten(1, (num_q_heads, head_dim))
        assert not out[sum(sizes) :].any()
        for r, piece in enumerate(out[: sum(sizes)].split(sizes)):
            got[r].append(piece)
    for step in range(2):
        at = [68 + step, 20 + step]
        slots = torch.cat([place(pages[r], range(at[r], at[r] + 1)) for r in range(2)])
        reference.write_kv(
            k_pool,
            v_pool,
            slots,
            torch.stack([k[r][at[r]] for r in range(2)]),
            torch.stack([v[r][at[r]] for r in range(2)]),
        )
        out = reference.paged_decode_attention(
            torch.stack([q[r][at[r]] for r in range(2)]),
            gates[:2],
            k_pool,
            v_pool,
            table,
            torch.tensor([at[0] + 1, at[1] + 1]),
            1,
        ).unflatten(1, (num_q_heads, head_dim))
        for r in range(2):
            got[r].append(out[r : r + 1])
    for r, done in enumerate((70, 22)):
        expected = causal_attention(q[r][:done], k[r][:done], v[r][:done])
        error = (torch.cat(got[r]).double() - expected).norm() / expected.norm()
        assert error < KERNEL_FP32_RTOL


@pytest.mark.parametrize("first_token", [1, 9])
def test_tokens_before_the_first_are_not_seen(first_token: int) -> None:
    """V18: whatever their keys and values hold. Oracle: attention over the rest."""
    torch.manual_seed(1)
    length, heads, head_dim, rows = 20, 2, 16, 3
    pools = tuple(torch.full((NUM_PAGES, PAGE_SIZE, heads, head_dim), torch.nan) for _ in range(2))
    pages = [7, 3, 5]
    q, k, v = (torch.randn(length, heads, head_dim) for _ in range(3))
    seen = range(first_token, length)
    reference.write_kv(*pools, place(pages, seen), k[first_token:], v[first_token:])
    expected = causal_attention(q[first_token:], k[first_token:], v[first_token:])
    gates = torch.full((length, 8 * head_dim), torch.inf)
    table, lens = torch.tensor([pages]), torch.tensor([length])
    whole = reference.paged_prefill_attention(
        q, gates, *pools, table, lens, torch.tensor([0, length]), torch.empty(0), first_token
    )
    assert not whole[:first_token].any()
    last = reference.paged_decode_attention(
        q[-rows:], gates[:rows], *pools, table, lens, rows, first_token
    )
    for got, wanted in ((whole[first_token:], expected), (last, expected[-rows:])):
        error = (got.double() - wanted.flatten(1)).norm() / wanted.norm()
        assert error < KERNEL_FP32_RTOL


def test_rotation_leaves_the_rest_and_keeps_lengths() -> None:
    """E1: only the first dims turn, by position * frequency. Oracle: complex multiplication."""
    torch.manual_seed(0)
    x = torch.randn(9, 3, 20)
    positions = torch.arange(9) * 100
    inv_freq = 1.0 / (10_000.0 ** (torch.arange(0, 8, 2) / 8))
    got = reference.rotate(x, positions, inv_freq)
    turned = torch.complex(x[..., :4].double(), x[..., 4:8].double()) * torch.exp(
        1j * positions[:, None, None].double() * inv_freq.double()
    )
    assert torch.equal(got[..., 8:], x[..., 8:])
    torch.testing.assert_close(got[..., :4].double(), turned.real, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got[..., 4:8].double(), turned.imag, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_requests", [1, 2])
def test_a_compiled_decode_step_copies_no_pool(num_requests: int, tmp_path: Path) -> None:
    """E5: keys and values are written in place. Oracle: the profiler's record of allocations."""
    k_pool, v_pool = torch.zeros(2, 4096, PAGE_SIZE, 2, 16)
    qkv = torch.randn(num_requests, 2 * (4 + 2) * 16)
    positions, kv_slots = torch.full((2, num_requests), 9)
    table = torch.tensor([[1, 2]] * num_requests)

    def attend() -> Tensor:
        norm, inv_freq = torch.ones(16), torch.ones(4)
        q = reference.prepare_qkv(
            qkv, norm, norm, inv_freq, positions, kv_slots, k_pool, v_pool, 4, 1e-6
        )
        lens = positions + 1
        return reference.paged_decode_attention(q, qkv, k_pool, v_pool, table, lens, 1)

    taken = largest_allocation(torch.compile(attend, fullgraph=True), tmp_path)
    assert 0 < taken < k_pool.nbytes / 4
    assert k_pool[1, 1].any() and not k_pool[1, 0].any()
