"""Attention of a few rows per request over paged contexts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from graphs.kernels.attention import decode_launch, ops, reference
from graphs.kernels.attention.configs import DecodeConfig, decode_config
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

AWKWARD_CONTEXTS = [65, 1, 0, 63, 64]


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    poison_memory(monkeypatch)


def expected_rows(
    context: PagedContext, heads: Heads, q: Tensor, qkv: Tensor, rows: int
) -> tuple[Tensor, Tensor]:
    """What the rows of real requests attend to, fp64, and which rows those are."""
    real = [r for r, context_len in enumerate(context.context_lens) if context_len > 0]
    attended = [attend(q[r * rows : (r + 1) * rows], *context.tokens(r)) for r in real]
    index = torch.tensor([r * rows + i for r in real for i in range(rows)])
    return torch.cat(attended) * torch.sigmoid(gates(heads, qkv)[index]), index


def check_decode(
    heads: Heads,
    context_lens: list[int],
    rows: int,
    dtype: torch.dtype,
    device: torch.device,
    config: DecodeConfig | None = None,
) -> None:
    """Against the oracle, twice with the same bits, without a trace in the pools."""
    context = build_context(heads, context_lens, dtype, device)
    pools = (context.k_pool, context.v_pool)
    before = [bits(pool.clone()) for pool in pools]
    num_rows = len(context_lens) * rows
    q = torch.randn(num_rows, heads.num_q, heads.dim).to(device, dtype)
    qkv = random_qkv(heads, num_rows, dtype, device)
    packed_rows, num_pairs = heads.num_q // heads.num_kv * rows, len(context_lens) * heads.num_kv
    config = config or decode_config(dtype, heads.dim, packed_rows, num_pairs)
    results = [torch.empty(num_rows, heads.num_q * heads.dim, dtype=dtype, device=device)]
    decode_launch.launch_decode(
        q, qkv, pools, context.page_table, context.lens, rows, results[0], config
    )
    expected, real = expected_rows(context, heads, q, qkv, rows)
    assert relative_error(results[0].cpu()[real], expected) < TOLERANCES[dtype]
    results.append(torch.empty_like(results[0]))
    decode_launch.launch_decode(
        q, qkv, pools, context.page_table, context.lens, rows, results[1], config
    )
    assert torch.equal(bits(results[0]), bits(results[1]))
    assert all(torch.equal(bits(pool), old) for pool, old in zip(pools, before, strict=True))


# Programs for contexts of one length, and for some that are longer.
SPLITS = {"one split": (1, 0), "full of splits": (12, 0), "splits for some": (1, 20)}


@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize(
    ("heads", "rows"), [(SIX, 1), (PLAIN, 2), (SIXTEEN, 4), (PADDED_DIM, 1)], ids=str
)
def test_decode_matches_fp64(heads: Heads, rows: int, splits: str, device: torch.device) -> None:
    """E2: awkward contexts, one split and several, padding requests. Oracle: fp64 attention."""
    num_programs, max_programs = (n * heads.num_kv for n in SPLITS[splits])
    context_lens = [max(n, rows) if n > 0 else 0 for n in AWKWARD_CONTEXTS]
    config = DecodeConfig(
        16,
        4,
        2,
        num_programs,
        max_programs,
        long_tokens=16,
        short_tokens=32,
        block_s=4,
        loads_all_splits=splits == "full of splits",
    )
    check_decode(heads, context_lens, rows, torch.float32, device, config)


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 3])
def test_shipped_configurations(rows: int, dtype: torch.dtype, device: torch.device) -> None:
    """E2: a longer context, the configuration that serving uses. Oracle: fp64 attention."""
    check_decode(SIX, [500, 3], rows, dtype, device)


@pytest.mark.parametrize("page_size", [96, 24])
def test_pages_that_tiles_do_not_divide(page_size: int, device: torch.device) -> None:
    """E2: tiles of 64 tokens over pages of 96 and 24. Oracle: fp64 attention."""
    heads = Heads(2, 2, 32, page_size)
    check_decode(heads, [230, 97, 0, 24], 2, torch.float16, device)
    neighbours = DecodeConfig(64, 4, 2, 16, short_tokens=64, is_strided=False)
    check_decode(heads, [230, 97], 1, torch.float16, device, neighbours)


def test_what_the_kernels_would_misread(device: torch.device) -> None:
    """E2: strides and counts that the kernels do not look at are refused. Oracle: the contract."""
    context = build_context(PLAIN, [20, 9], torch.float32, device)
    q = torch.randn(2, PLAIN.num_q, PLAIN.dim, device=device)
    qkv = random_qkv(PLAIN, 2, torch.float32, device)
    pool, table = context.k_pool, context.page_table
    turned_pool = pool.transpose(1, 2).contiguous().transpose(1, 2)
    gaps = torch.zeros_like(table).repeat(1, 2)[:, ::2]
    turned_q = q.transpose(1, 2).contiguous().transpose(1, 2)
    wide_qkv = qkv.repeat_interleave(2, dim=1)[:, ::2]
    wrong = {
        "q is": (turned_q, qkv, pool, pool, table, 1),
        "qkv rows": (q, wide_qkv, pool, pool, table, 1),
        "k_pool": (q, qkv, turned_pool, pool, table, 1),
        "v_pool": (q, qkv, pool, turned_pool, table, 1),
        "page table": (q, qkv, pool, pool, gaps, 1),
        "rows_per_request": (q, qkv, pool, pool, table, 2),
        "too many rows": (q.repeat(129, 1, 1), qkv, pool, pool, table, 129),
    }
    ops.paged_decode_attention(q, qkv, pool, pool, table, context.lens, 1)
    for message, (*tensors, rows) in wrong.items():
        with pytest.raises(AssertionError, match=message):
            ops.paged_decode_attention(*tensors, context.lens, rows)
    row_starts, chunks = (x.to(device) for x in build_chunks([1, 1]))
    with pytest.raises(AssertionError, match="page table"):
        ops.paged_prefill_attention(q, qkv, pool, pool, gaps, context.lens, row_starts, chunks)
    norm, slots = torch.zeros(PLAIN.dim, device=device), torch.zeros_like(context.lens)
    with pytest.raises(AssertionError, match="qkv rows"):
        ops.prepare_qkv(wide_qkv, norm, norm, norm[:4], slots, slots, pool, pool, PLAIN.num_q, 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 4, 8])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_real_sizes(geometry: str, rows: int, dtype: torch.dtype) -> None:
    """E2: real heads, one split and many. Oracle: fp64 attention."""
    heads, device = GEOMETRIES[geometry], torch.device("cuda")
    check_decode(heads, [5000], rows, dtype, device)
    check_decode(heads, [max(rows, 37 * r % 700) for r in range(70)] + [0], rows, dtype, device)


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [8, 16, 24, 32, 64, 96, 256])
@pytest.mark.parametrize("sizes", [(4, 4, 128), (8, 1, 96), (16, 1, 64), (12, 4, 32), (3, 1, 80)])
def test_other_geometries(sizes: tuple[int, int, int], page_size: int) -> None:
    """E2: head dims from 32 to 256, ratios from 1 to 16. Oracle: fp64 attention."""
    for rows in (1, 4):
        heads = Heads(*sizes, page_size)
        check_decode(heads, [500, 65, 4, 1000], rows, torch.bfloat16, torch.device("cuda"))


@pytest.mark.gpu
def test_pools_beyond_int32() -> None:
    """E2: pages whose elements lie past 2^31. Oracle: the same pages at the pool's start."""
    heads, device = GEOMETRIES["27B"], torch.device("cuda")
    near = build_context(heads, [130], torch.bfloat16, device)
    shift = 2**31 // near.k_pool[0].numel() + 1
    far = []
    for pool in (near.k_pool, near.v_pool):
        shape = (shift + pool.shape[0], *pool.shape[1:])
        far.append(torch.zeros(shape, dtype=pool.dtype, device=device))
        far[-1][shift:] = pool
    q = torch.randn(1, heads.num_q, heads.dim, device=device, dtype=torch.bfloat16)
    qkv = random_qkv(heads, 1, torch.bfloat16, device)
    results = [
        ops.paged_decode_attention(q, qkv, *pools, table, near.lens, 1)
        for pools, table in (
            ((near.k_pool, near.v_pool), near.page_table),
            (far, near.page_table + shift),
        )
    ]
    assert torch.equal(*results)


@pytest.mark.parametrize("rows", [1, 2])
def test_reference_matches_fp64(rows: int) -> None:
    """E1: the reference, padding requests and stale pages. Oracle: fp64 attention."""
    context = build_context(SIX, [65, 2, 0, 64], torch.float32, torch.device("cpu"))
    q = torch.randn(4 * rows, SIX.num_q, SIX.dim)
    qkv = random_qkv(SIX, 4 * rows, torch.float32, q.device)
    got = reference.paged_decode_attention(
        q, qkv, context.k_pool, context.v_pool, context.page_table, context.lens, rows
    )
    expected, real = expected_rows(context, SIX, q, qkv, rows)
    assert relative_error(got[real], expected) < TOLERANCES[torch.float32]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::UserWarning")  # the compiler's advice on precision
def test_compiled_and_captured() -> None:
    """E5: one graph for every batch size, captured by CUDA. Oracle: the op called directly."""
    heads, device = GEOMETRIES["35B-A3B"], torch.device("cuda")
    torch._dynamo.reset()
    compiled = torch.compile(ops.paged_decode_attention, fullgraph=True, dynamic=True)
    for num_requests in (3, 5, 150):
        context = build_context(heads, [300] * num_requests, torch.bfloat16, device)
        q = torch.randn(num_requests, heads.num_q, heads.dim, device=device, dtype=torch.bfloat16)
        args = (
            q,
            random_qkv(heads, num_requests, torch.bfloat16, device),
            context.k_pool,
            context.v_pool,
            context.page_table,
            context.lens,
            1,
        )
        expected = ops.paged_decode_attention(*args)
        assert torch.equal(compiled(*args), expected)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = compiled(*args)
        captured.zero_()
        graph.replay()
        assert torch.equal(captured, expected)
