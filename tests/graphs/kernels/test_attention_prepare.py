"""Norm, rotation and storing of queries, keys and values; and all of attention in a row."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from graphs.kernels.attention import ops, reference
from tests.graphs.kernels.attention_cases import (
    CHUNK,
    GEOMETRIES,
    PADDED_DIM,
    SIX,
    SIXTEEN,
    TOLERANCES,
    Heads,
    attend,
    bits,
    build_chunks,
    build_context,
    gates,
    poison_memory,
    random_qkv,
    relative_error,
)

EPS = 1e-6
IMPLEMENTATIONS = [ops, reference]


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    poison_memory(monkeypatch)


def inverse_frequencies(rotary_dim: int) -> Tensor:
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    return 1.0 / 1e7**exponents


def norm_and_rotate(x: Tensor, weight: Tensor, inv_freq: Tensor, positions: Tensor) -> Tensor:
    """x [T, heads, D] in fp64; the angles are fp32 products, as in every implementation."""
    x, weight = x.double().cpu(), weight.double().cpu()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * (1.0 + weight)
    angles = (positions.cpu()[:, None, None].float() * inv_freq).double()
    half = inv_freq.shape[0]
    pairs = torch.complex(x[..., :half], x[..., half : 2 * half])
    pairs = pairs * torch.exp(1j * angles)
    return torch.cat([pairs.real, pairs.imag, x[..., 2 * half :]], dim=-1)


def split(heads: Heads, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q [T, HQ, D], k and v [T, H, D] before anything is done to them."""
    sizes = [2 * heads.num_q * heads.dim, heads.num_kv * heads.dim, heads.num_kv * heads.dim]
    q, k, v = qkv.split(sizes, dim=1)
    q = q.unflatten(1, (heads.num_q, 2, heads.dim))[:, :, 0]
    return q, k.unflatten(1, (-1, heads.dim)), v.unflatten(1, (-1, heads.dim))


def check_prepare(
    heads: Heads, rotary_dim: int, num_rows: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Scattered slots, every seventh row in the padding page."""
    num_pages = 2 + num_rows // heads.page_size * 2
    shape = (num_pages, heads.page_size, heads.num_kv, heads.dim)
    pools = [torch.full(shape, float("nan"), dtype=dtype, device=device) for _ in range(2)]
    slots = heads.page_size + torch.randperm((num_pages - 1) * heads.page_size)[:num_rows]
    slots[::7] = 1
    positions = torch.randint(0, 500, (num_rows,))
    qkv = random_qkv(heads, num_rows, dtype, device)
    q_norm, k_norm = (torch.randn(heads.dim).to(device, dtype) for _ in range(2))
    inv_freq = inverse_frequencies(rotary_dim)
    got = ops.prepare_qkv(
        qkv,
        q_norm,
        k_norm,
        inv_freq.to(device),
        positions.to(device),
        slots.to(device),
        *pools,
        heads.num_q,
        EPS,
    )
    q, k, v = split(heads, qkv)
    expected_q = norm_and_rotate(q, q_norm, inv_freq, positions)
    assert relative_error(got, expected_q) < TOLERANCES[dtype]
    k_flat, v_flat = (pool.cpu().flatten(0, 1) for pool in pools)
    real = slots >= heads.page_size
    if real.any():
        expected_k = norm_and_rotate(k, k_norm, inv_freq, positions)[real]
        assert relative_error(k_flat[slots[real]], expected_k) < TOLERANCES[dtype]
        assert torch.equal(v_flat[slots[real]], v.cpu()[real])
    for flat in (k_flat, v_flat):
        flat[slots[real]] = float("nan")
        assert torch.equal(bits(flat), bits(torch.full_like(flat, float("nan"))))


@pytest.mark.parametrize("num_rows", [1, 63, 65])
@pytest.mark.parametrize(
    ("heads", "rotary_dim"), [(SIX, 16), (SIXTEEN, 32), (PADDED_DIM, 24)], ids=str
)
def test_prepare_matches_fp64(
    heads: Heads, rotary_dim: int, num_rows: int, device: torch.device
) -> None:
    """E2: partial and whole rotation; only named slots change. Oracle: fp64, complex turns."""
    check_prepare(heads, rotary_dim, num_rows, torch.float32, device)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 65, 500, 8192])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_real_sizes(geometry: str, dtype: torch.dtype, num_rows: int) -> None:
    """E2: real heads. Oracle: fp64, complex turns."""
    check_prepare(GEOMETRIES[geometry], 64, num_rows, dtype, torch.device("cuda"))


@pytest.mark.sanitize
def test_far_positions(device: torch.device) -> None:
    """E1: angles of up to a million. Oracle: fp64 turns of the same fp32 angles."""
    heads = Heads(1, 1, 32, 8)
    positions = torch.tensor([8191, 32_768, 70_000, 100_000, 262_143, 1_000_000])
    if device.type == "cpu":  # the interpreter rounds twice where the device fuses
        positions = positions[positions <= 100_000]
    qkv = random_qkv(heads, len(positions), torch.float32, device)
    pools = [torch.zeros(1, 8, 1, 32, device=device) for _ in range(2)]
    norm, inv_freq = torch.zeros(32, device=device), inverse_frequencies(32)
    got = ops.prepare_qkv(
        qkv,
        norm,
        norm,
        inv_freq.to(device),
        positions.to(device),
        torch.zeros_like(positions, device=device),
        *pools,
        1,
        EPS,
    )
    expected = norm_and_rotate(split(heads, qkv)[0], norm, inv_freq, positions)
    assert relative_error(got, expected) < TOLERANCES[torch.float32]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=["triton", "torch"])
def test_prompts_in_pieces_then_decode(implementation: ModuleType, device: torch.device) -> None:
    """E1: two requests, uneven prefills, two decode steps. Oracle: whole sequences, fp64."""
    heads, lens = SIX, [42, 23]
    totals = [n + 2 for n in lens]
    context = build_context(heads, totals, torch.float32, device)
    for pool in (context.k_pool, context.v_pool):
        pool.fill_(float("nan"))
    qkv = [random_qkv(heads, n, torch.float32, device) for n in totals]
    q_norm, k_norm = (torch.randn(heads.dim, device=device) for _ in range(2))
    inv_freq = inverse_frequencies(16)
    got: list[list[Tensor]] = [[], []]
    steps = [[(0, 20), (0, 1)], [(20, 42), (1, 23)], [(42, 43), (23, 24)], [(43, 44), (24, 25)]]
    for step in steps:
        rows = torch.cat([qkv[r][first:end] for r, (first, end) in enumerate(step)])
        q = implementation.prepare_qkv(
            rows,
            q_norm,
            k_norm,
            inv_freq.to(device),
            torch.cat([torch.arange(first, end, device=device) for first, end in step]),
            torch.tensor(
                [slot for r in range(2) for slot in context.slots(r, range(*step[r]))],
                device=device,
            ),
            context.k_pool,
            context.v_pool,
            heads.num_q,
            EPS,
        )
        done = torch.tensor([end for _, end in step], device=device)
        paged = (q, rows, context.k_pool, context.v_pool, context.page_table, done)
        counts = [end - first for first, end in step]
        if counts == [1, 1]:
            out = implementation.paged_decode_attention(*paged, 1)
        else:
            tables = [x.to(device) for x in build_chunks(counts)]
            out = implementation.paged_prefill_attention(*paged, *tables)
        for r, piece in enumerate(out.split(counts)):
            got[r].append(piece)
    for r, total in enumerate(totals):
        q, k, v = split(heads, qkv[r])
        positions = torch.arange(total)
        q = norm_and_rotate(q, q_norm, inv_freq, positions)
        k = norm_and_rotate(k, k_norm, inv_freq, positions)
        expected = attend(q, k, v.double().cpu()) * torch.sigmoid(gates(heads, qkv[r]))
        assert relative_error(torch.cat(got[r]), expected) < TOLERANCES[torch.float32]


def test_chunks_are_as_long_as_the_kernels_expect() -> None:
    """E2: tests build tables for the chunk of the ops. Oracle: the ops."""
    assert CHUNK == ops.CHUNK


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::UserWarning")  # the compiler's advice on precision
def test_compiled() -> None:
    """E5: one graph for every number of rows. Oracle: the op called directly."""
    heads, device = GEOMETRIES["35B-A3B"], torch.device("cuda")
    torch._dynamo.reset()
    compiled = torch.compile(ops.prepare_qkv, fullgraph=True, dynamic=True)
    norm, inv_freq = torch.randn(heads.dim, device=device), inverse_frequencies(64).to(device)
    norm = norm.bfloat16()
    for num_rows in (3, 40):
        qkv = random_qkv(heads, num_rows, torch.bfloat16, device)
        slots = heads.page_size + torch.arange(num_rows, device=device)
        results = []
        for op in (ops.prepare_qkv, compiled):
            pools = [
                torch.zeros(2, heads.page_size, heads.num_kv, heads.dim).to(qkv) for _ in range(2)
            ]
            q = op(qkv, norm, norm, inv_freq, slots, slots, *pools, heads.num_q, EPS)
            results.append([q, *pools])
        assert all(torch.equal(got, want) for got, want in zip(*results, strict=True))
