"""Decode attention by a pool of programs that share the splits in use."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import triton.language as tl
from torch import Tensor

from graphs.kernels.attention import decode_launch, pooled_kernel
from graphs.kernels.attention.configs import (
    NUM_SMS,
    DecodeConfig,
    decode_config,
    least_tiles,
    num_decode_splits,
    num_pooled_programs,
)
from tests.graphs.kernels.attention_cases import (
    GEOMETRIES,
    PADDED_DIM,
    SIX,
    SIXTEEN,
    TOLERANCES,
    Heads,
    PagedContext,
    bits,
    build_context,
    poison_memory,
    random_qkv,
    relative_error,
)
from tests.graphs.kernels.test_attention_decode import expected_rows

MOST_IMBALANCE = 1.08  # load of the busiest program, to the mean


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    poison_memory(monkeypatch)


def decode_rows(
    heads: Heads, context: PagedContext, rows: int, q: Tensor, qkv: Tensor, config: DecodeConfig
) -> Tensor:
    """[T, HQ * D] of a launch into memory that starts as NaN."""
    out = torch.empty(q.shape[0], heads.num_q * heads.dim, dtype=q.dtype, device=q.device)
    decode_launch.launch_decode(
        q, qkv, (context.k_pool, context.v_pool), context.page_table, context.lens, rows, out,
        config,
    )  # fmt: skip
    return out


def check_pool(
    heads: Heads,
    context_lens: list[int],
    rows: int,
    dtype: torch.dtype,
    device: torch.device,
    config: DecodeConfig,
) -> None:
    """A pool against the oracle, and bit by bit against a program for each split."""
    context = build_context(heads, context_lens, dtype, device)
    num_pairs = len(context_lens) * heads.num_kv
    num_splits = num_decode_splits(config, num_pairs, context.page_table.shape[1] * heads.page_size)
    assert num_pooled_programs(config, num_pairs, num_splits) > 0
    num_rows = len(context_lens) * rows
    q = torch.randn(num_rows, heads.num_q, heads.dim).to(device, dtype)
    qkv = random_qkv(heads, num_rows, dtype, device)
    got = decode_rows(heads, context, rows, q, qkv, config)
    expected, real = expected_rows(context, heads, q, qkv, rows)
    assert relative_error(got.cpu()[real], expected) < TOLERANCES[dtype]
    each = decode_rows(heads, context, rows, q, qkv, replace(config, num_pooled=0))
    # Padding requests read page 0, which holds NaN here: they are compared as bits.
    assert torch.equal(bits(got), bits(each))


# None, one token, one split (full of tiles or not), several and the most, long beside short.
MIXED_CONTEXTS = [1, 230, 0, 63, 65, 500, 0, 129]


@pytest.mark.parametrize("is_strided", [True, False], ids=["strided", "neighbours"])
@pytest.mark.parametrize(
    ("heads", "rows", "num_pooled"),
    [(SIX, 1, 1), (PADDED_DIM, 3, 5), (SIXTEEN, 2, 30)],
    ids=["one program", "fewer than splits", "more than splits"],
)
def test_pool_gives_the_bits_of_a_program_a_split(
    heads: Heads, rows: int, num_pooled: int, is_strided: bool, device: torch.device
) -> None:
    """E2: more and fewer splits than the pool, requests past a vector. Oracle: fp64 attention."""
    if device.type == "cpu" and is_strided != (num_pooled == 5):
        pytest.skip("interpreted only once of each")
    context_lens = [max(n, rows) if n > 0 else 0 for n in MIXED_CONTEXTS]
    config = DecodeConfig(
        32,
        4,
        2,
        num_programs=12 * heads.num_kv,
        max_programs=64 * heads.num_kv,
        long_tokens=64,
        short_tokens=64,
        block_s=8,
        is_strided=is_strided,
        num_pooled=num_pooled,
        few_rounds=0,
        block_r=4,
    )
    check_pool(heads, context_lens, rows, torch.float32, device, config)


EQUAL_CONTEXTS = {"many": [200] * 9, "one": [64, 1, 33] * 3, "last": [0] * 8 + [9]}


@pytest.mark.parametrize("contexts", EQUAL_CONTEXTS)
def test_pool_of_equal_contexts(contexts: str, device: torch.device) -> None:
    """E2: all contexts use many splits or one, or most are empty. Oracle: fp64 attention."""
    config = DecodeConfig(
        32, 4, 2, 18, 80, 8, 128, 4, num_pooled=7, few_splits=1, few_rounds=0, block_r=8
    )
    check_pool(SIX, EQUAL_CONTEXTS[contexts], 1, torch.float32, device, config)


def tiles_of_splits(config: DecodeConfig, num_pairs: int, num_splits: int, n: int) -> list[int]:
    """Tiles of each split that a context of n tokens uses, from the definitions."""
    tiles = -(-n // config.block_n)
    most = max(min(num_splits, tiles // least_tiles(config, num_pairs)), 1)
    longest = max(-(-tiles // most), 1)
    num_used = max(-(-tiles // longest), 1)
    return [len(range(i_split, tiles, num_used)) for i_split in range(num_used)]


def shipped_pool(heads: Heads, num_requests: int, max_tokens: int) -> tuple[DecodeConfig, int, int]:
    """The configuration that decode in bf16 uses, the most splits, the programs of the pool."""
    num_pairs = num_requests * heads.num_kv
    config = decode_config(torch.bfloat16, heads.dim, heads.num_q // heads.num_kv, num_pairs)
    num_splits = num_decode_splits(config, num_pairs, max_tokens)
    return config, num_splits, num_pooled_programs(config, num_pairs, num_splits)


def serve(
    monkeypatch: pytest.MonkeyPatch, config: DecodeConfig, context_lens: list[int], max_tokens: int
) -> list[list[tuple[int, int]]]:
    """The (request, split)s of each program, for one key/value head; the splits are left alone."""
    served: dict[int, list[tuple[int, int]]] = {}

    def record(*args: Any) -> None:
        i_program = int(tl.program_id(0).handle.data.item())
        i_r, i_h, i_split = (int(index.handle.data.item()) for index in args[13:16])
        assert i_h == 0
        served.setdefault(i_program, []).append((i_r, i_split))

    monkeypatch.setattr(pooled_kernel, "attend_split", record)
    monkeypatch.setattr(pooled_kernel, "load_queries", lambda *_: 0)
    monkeypatch.setattr(pooled_kernel, "load_pages", lambda *_: 0)
    num_requests = len(context_lens)
    num_splits = num_decode_splits(config, num_requests, max_tokens)
    num_pooled = num_pooled_programs(config, num_requests, num_splits)
    nothing, pool = torch.empty(0), torch.empty(1, 64, 1, 16)
    page_table = torch.zeros(num_requests, max_tokens // 64, dtype=torch.int64)
    decode_launch.launch_pooled(
        torch.empty(num_requests, 1, 16), torch.empty(1, 1), (pool, pool), page_table,
        torch.tensor(context_lens), 1, (nothing, nothing), nothing, config, num_splits, num_pooled,
    )  # fmt: skip
    return [served.get(i_program, []) for i_program in range(num_pooled)]


LONG, SHORT = 32768, 1024
# Contexts, and the room of the page table.
SHARED = {
    "long": ([LONG] * 16, LONG),
    "many short": ([SHORT] * 64, 16384),
    "mixed": ([0] + [SHORT + (LONG - SHORT) * i // 14 for i in range(15)], LONG),
}


@pytest.mark.parametrize("contexts", SHARED)
def test_shares_are_even(contexts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """E2: each split has one program, and none has much more to do than the others.

    One key/value head, and as many times fewer programs. Oracle: the splits counted in Python;
    programs that have anything to do, where contexts are equal, within 8% of the mean, otherwise
    within one split of it.
    """
    if torch.cuda.is_available():
        pytest.skip("looks into the interpreter")
    (context_lens, max_tokens), heads = SHARED[contexts], GEOMETRIES["27B"]
    config, num_splits, _ = shipped_pool(heads, len(context_lens), max_tokens)
    one_head = replace(
        config,
        num_programs=config.num_programs // heads.num_kv,
        max_programs=config.max_programs // heads.num_kv,
        num_pooled=config.num_pooled // heads.num_kv,
    )
    served = serve(monkeypatch, one_head, context_lens, max_tokens)
    tiles = {
        (i_r, i_split): size
        for i_r, n in enumerate(context_lens)
        for i_split, size in enumerate(tiles_of_splits(one_head, len(context_lens), num_splits, n))
    }
    assert sorted(split for splits in served for split in splits) == sorted(tiles)
    loads = [sum(tiles[split] for split in splits) for splits in served if splits]
    assert len(loads) == min(len(served), len(tiles))
    mean = sum(loads) / len(loads)
    is_equal = len(set(context_lens)) == 1
    assert max(loads) <= (MOST_IMBALANCE * mean if is_equal else mean + max(tiles.values()))


@pytest.mark.parametrize(
    ("num_requests", "max_tokens", "is_pooled"),
    [(16, 1024, False), (64, 4096, False), (16, 16384, True), (64, 16384, True), (64, LONG, True)],
)
def test_where_there_is_a_pool(num_requests: int, max_tokens: int, is_pooled: bool) -> None:
    """E2: a pool where page tables have room for splits that would be idle. Oracle: a table."""
    _, _, num_pooled = shipped_pool(GEOMETRIES["27B"], num_requests, max_tokens)
    assert (num_pooled > 0) == is_pooled


@pytest.mark.parametrize("num_pairs", [9, 64, 65, 1024])
@pytest.mark.parametrize("packed_rows", [8, 32, 64])
def test_grids_stay_small(packed_rows: int, num_pairs: int) -> None:
    """E2: the widest page tables take no larger grids. Oracle: three to a multiprocessor."""
    config = decode_config(torch.bfloat16, 256, packed_rows, num_pairs)
    num_splits = num_decode_splits(config, num_pairs, 4096 * 64)
    assert 0 < num_pooled_programs(config, num_pairs, num_splits) <= 3 * NUM_SMS


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 4, 8])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_pool_at_real_sizes(geometry: str, rows: int) -> None:
    """E2: the shipped pools, some contexts long. Oracle: fp64 attention, a program a split."""
    heads, device = GEOMETRIES[geometry], torch.device("cuda")
    for num_requests in (5, 16, 70):
        context_lens = [max(rows, 37 * r % 700) for r in range(num_requests - 3)]
        context_lens += [0, 20_000, 9_001]
        packed_rows = heads.num_q // heads.num_kv * rows
        num_pairs = num_requests * heads.num_kv
        config = decode_config(torch.bfloat16, heads.dim, packed_rows, num_pairs)
        # However few their splits are.
        config = replace(config, num_pooled=config.num_pooled or NUM_SMS, few_rounds=0)
        check_pool(heads, context_lens, rows, torch.bfloat16, device, config)
