"""Attention of chunks of rows over paged contexts."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from graphs.kernels.attention import ops, reference
from graphs.kernels.attention.configs import PrefillConfig, prefill_config
from tests.graphs.kernels.attention_cases import (
    GEOMETRIES,
    PADDED_DIM,
    PLAIN,
    SIX,
    SIXTEEN,
    TOLERANCES,
    Heads,
    PagedContext,
    attend,
    bits,
    build_chunks,
    build_context,
    gates,
    poison_memory,
    random_qkv,
    relative_error,
)

NUM_PADDING_ROWS = 3


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    poison_memory(monkeypatch)


def expected_rows(
    context: PagedContext, heads: Heads, q: Tensor, qkv: Tensor, row_starts: list[int]
) -> Tensor:
    """What the rows of requests attend to, fp64."""
    attended = [
        attend(q[first:end], *context.tokens(r))
        for r, (first, end) in enumerate(itertools.pairwise(row_starts))
        if end > first
    ]
    return torch.cat(attended) * torch.sigmoid(gates(heads, qkv)[: row_starts[-1]])


def check_prefill(
    heads: Heads,
    requests: list[tuple[int, int]],
    dtype: torch.dtype,
    device: torch.device,
    config: PrefillConfig | None = None,
) -> None:
    """Requests of (rows, context) and padding rows, against the oracle; pools stay as they are."""
    num_rows = [rows for rows, _ in requests]
    context = build_context(heads, [length for _, length in requests], dtype, device)
    pools = (context.k_pool, context.v_pool)
    before = [bits(pool.clone()) for pool in pools]
    row_starts, chunks = build_chunks(num_rows, num_padding=2)
    total = sum(num_rows) + NUM_PADDING_ROWS
    q = torch.randn(total, heads.num_q, heads.dim).to(device, dtype)
    q[sum(num_rows) :] = float("nan")
    qkv = random_qkv(heads, total, dtype, device)
    out = torch.empty(total, heads.num_q * heads.dim, dtype=dtype, device=device)
    ops.launch_prefill(
        q,
        qkv,
        pools,
        context.page_table,
        context.lens,
        (row_starts.to(device), chunks.to(device)),
        out,
        config or prefill_config(dtype, heads.dim),
    )
    expected = expected_rows(context, heads, q, qkv, row_starts.tolist())
    assert relative_error(out[: sum(num_rows)], expected) < TOLERANCES[dtype]
    assert not out[sum(num_rows) :].any()
    assert all(torch.equal(bits(pool), old) for pool, old in zip(pools, before, strict=True))


@pytest.mark.parametrize("block_rows", [16, 64])
@pytest.mark.parametrize("heads", [SIX, PLAIN, SIXTEEN, PADDED_DIM], ids=str)
def test_prefill_matches_fp64(heads: Heads, block_rows: int, device: torch.device) -> None:
    """E2: whole prompts, later chunks, requests without rows. Oracle: fp64 attention."""
    config = PrefillConfig(2, block_rows, 32, 4, 2)
    requests = [(65, 65), (0, 0), (1, 64), (63, 80), (1, 1)]
    check_prefill(heads, requests, torch.float32, device, config)


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_longer_contexts(dtype: torch.dtype, device: torch.device) -> None:
    """E2: the configuration that serving uses. Oracle: fp64 attention."""
    check_prefill(SIX, [(20, 300), (80, 80)], dtype, device)


@pytest.mark.parametrize("page_size", [96, 24])
def test_pages_that_tiles_do_not_divide(page_size: int, device: torch.device) -> None:
    """E2: tiles of 64 tokens over pages of 96 and 24. Oracle: fp64 attention."""
    requests = [(20, 230), (0, 0), (97, 97)]
    check_prefill(Heads(2, 2, 32, page_size), requests, torch.float16, device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_real_sizes(geometry: str, dtype: torch.dtype) -> None:
    """E2: real heads, hundreds of chunks. Oracle: fp64 attention."""
    requests = [(500, 500), (1, 1000), (63, 63), (0, 0), (400, 1500), (65, 70)]
    check_prefill(GEOMETRIES[geometry], requests, dtype, torch.device("cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [8, 16, 24, 32, 64, 96, 256])
@pytest.mark.parametrize("sizes", [(4, 4, 128), (8, 1, 96), (16, 1, 64), (12, 4, 32), (3, 1, 80)])
def test_other_geometries(sizes: tuple[int, int, int], page_size: int) -> None:
    """E2: head dims from 32 to 256, ratios from 1 to 16. Oracle: fp64 attention."""
    requests = [(200, 200), (65, 500), (1, 1)]
    check_prefill(Heads(*sizes, page_size), requests, torch.bfloat16, torch.device("cuda"))


def test_reference_matches_fp64() -> None:
    """E1: the reference; stale pages, padding rows. Oracle: fp64 attention."""
    num_rows = [65, 0, 1, 20]
    context = build_context(SIX, [70, 0, 64, 20], torch.float32, torch.device("cpu"))
    row_starts, chunks = build_chunks(num_rows)
    q = torch.randn(sum(num_rows) + 2, SIX.num_q, SIX.dim)
    qkv = random_qkv(SIX, sum(num_rows) + 2, torch.float32, q.device)
    got = reference.paged_prefill_attention(
        q,
        qkv,
        context.k_pool,
        context.v_pool,
        context.page_table,
        context.lens,
        row_starts,
        chunks,
    )
    expected = expected_rows(context, SIX, q, qkv, row_starts.tolist())
    assert relative_error(got[: sum(num_rows)], expected) < TOLERANCES[torch.float32]
    assert not got[sum(num_rows) :].any()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::UserWarning")  # the compiler's advice on precision
def test_compiled_and_captured() -> None:
    """E5: one graph for every batch size, captured by CUDA. Oracle: the op called directly."""
    heads, device = GEOMETRIES["35B-A3B"], torch.device("cuda")
    torch._dynamo.reset()
    compiled = torch.compile(ops.paged_prefill_attention, fullgraph=True, dynamic=True)
    for num_rows in ([100, 65], [300, 20, 64]):
        context = build_context(heads, num_rows, torch.bfloat16, device)
        q = torch.randn(sum(num_rows), heads.num_q, heads.dim).to(device, torch.bfloat16)
        args = (
            q,
            random_qkv(heads, sum(num_rows), torch.bfloat16, device),
            context.k_pool,
            context.v_pool,
            context.page_table,
            context.lens,
            *(x.to(device) for x in build_chunks(num_rows)),
        )
        expected = ops.paged_prefill_attention(*args)
        assert torch.equal(compiled(*args), expected)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = compiled(*args)
        captured.zero_()
        graph.replay()
        assert torch.equal(captured, expected)
