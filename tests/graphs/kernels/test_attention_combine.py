"""Programs of a launch that add up one another's splits.

Interpreted, programs run one after another, and one that waited would wait for ever. So waiting
is tested on CUDA alone. What programs do once they have met is tested here as well: they run
twice over the same memory, do not wait, and find the second time what they left the first.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import permutations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from graphs.kernels.attention import decode_kernel, ops
from graphs.kernels.attention.combine_kernel import meet
from graphs.kernels.attention.configs import Combine, DecodeConfig
from graphs.kernels.launch import launch
from tests.graphs.kernels.attention_cases import (
    GEOMETRIES,
    PADDED_DIM,
    PLAIN,
    SIX,
    Heads,
    PagedContext,
    bits,
    build_context,
    poison_memory,
    random_qkv,
)
from tests.graphs.kernels.test_attention_decode import LOW_BITS, check_decode

CASES = [(SIX, 1), (PLAIN, 2), (PADDED_DIM, 3)]


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    poison_memory(monkeypatch)


def config_of(combines: Combine, heads: Heads) -> DecodeConfig:
    """Up to 8 splits of tiles of 16, for 5 requests; slices that programs do not share evenly."""
    return DecodeConfig(
        16, 4, 2, 40 * heads.num_kv, short_tokens=32, block_s=8, combines=combines,
        combined_dims=16,
    )  # fmt: skip


@dataclass(frozen=True)
class Rows:
    """Rows to decode, and the counters as the last launch left them."""

    context: PagedContext
    lens: Tensor
    q: Tensor
    qkv: Tensor
    arrivals: Tensor

    def decode(self, config: DecodeConfig) -> Tensor:
        """The bits of the result."""
        out = torch.empty(self.q.flatten(1).shape, device=self.q.device)
        pools = (self.context.k_pool, self.context.v_pool)
        table = self.context.page_table
        rows = self.q.shape[0] // table.shape[0]
        ops.launch_decode(
            self.q, self.qkv, pools, table, self.lens, rows, self.arrivals, out, config
        )
        return bits(out)

    @property
    def is_settled(self) -> bool:
        return not bool((self.arrivals & LOW_BITS).any())


def build_rows(heads: Heads, context_lens: list[int], rows: int, device: torch.device) -> Rows:
    """A few rows of each request, fp32."""
    num_rows, num_pairs = len(context_lens) * rows, len(context_lens) * heads.num_kv
    context = build_context(heads, context_lens, torch.float32, device)
    return Rows(
        context,
        context.lens,
        torch.randn(num_rows, heads.num_q, heads.dim, device=device),
        random_qkv(heads, num_rows, torch.float32, device),
        torch.zeros(num_pairs, dtype=torch.int32, device=device),
    )


def awkward_rows(heads: Heads, rows: int) -> Rows:
    """Uneven contexts and a padding request; the first skips where kernels are not interpreted."""
    if torch.cuda.is_available():
        pytest.skip("another layout rounds otherwise, and programs come in any order")
    return build_rows(heads, [65, rows, 0, 150, 31], rows, torch.device("cpu"))


@pytest.mark.parametrize(("heads", "rows"), CASES, ids=str)
def test_the_last_program_combines(heads: Heads, rows: int) -> None:
    """E2: launch after launch, verify. Oracle: the kernel that only combines."""
    batch = awkward_rows(heads, rows)
    expected = batch.decode(config_of(Combine.SECOND_KERNEL, heads))
    for _ in range(3):
        assert torch.equal(batch.decode(config_of(Combine.LAST_PROGRAM, heads)), expected)
        assert batch.is_settled
    has_met = (batch.arrivals < 0).view(-1, heads.num_kv)  # signs change with every launch
    assert has_met.tolist() == [[n] * heads.num_kv for n in (True, False, False, True, True)]


@triton.jit
def go_on(p_arrivals, i_split, num_used, WAITS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Meet nobody."""
    return True


@pytest.mark.parametrize(("heads", "rows"), CASES, ids=str)
def test_programs_that_met_combine_every_slice(
    heads: Heads, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E2: slices of different contexts, verify. Oracle: the kernel that only combines."""
    batch = awkward_rows(heads, rows)
    expected = batch.decode(config_of(Combine.SECOND_KERNEL, heads))
    monkeypatch.setattr(ops, "empty_partials", cache(ops.empty_partials))
    monkeypatch.setattr(ops, "programs_at_once", lambda device: 1000)
    monkeypatch.setattr(decode_kernel, "meet", go_on)
    results = [batch.decode(config_of(Combine.TOGETHER, heads)) for _ in range(2)]
    assert not torch.equal(results[0], expected)
    assert torch.equal(results[1], expected)


@triton.jit
def meet_kernel(order_ptr, arrivals_ptr, is_last_ptr, num_used):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    i_split = tl.load(order_ptr + tl.program_id(0))
    is_last = meet(arrivals_ptr, i_split, num_used, False)
    tl.store(is_last_ptr + tl.program_id(0), is_last.to(tl.int32))


@pytest.mark.parametrize("num_used", [2, 3, 4])
def test_exactly_the_last_one_is_told(num_used: int) -> None:
    """E2: every order of arrival at one counter. Oracle: the order."""
    if torch.cuda.is_available():
        pytest.skip("programs arrive in order only where they are interpreted")
    arrivals = torch.zeros(1, dtype=torch.int32)
    for order in permutations(range(num_used)):
        is_last = torch.zeros(num_used, dtype=torch.int32)
        splits = torch.tensor(order, dtype=torch.int32)
        launch(meet_kernel)[(num_used,)](splits, arrivals, is_last, num_used)
        assert is_last.tolist() == [0] * (num_used - 1) + [1]
        assert not (arrivals & LOW_BITS).any()


def test_nobody_waits_for_programs_that_have_yet_to_start(device: torch.device) -> None:
    """E2: more programs than run at once. Oracle: the contract, and fp64 attention."""
    at_once = ops.programs_at_once(device)
    together, last = (config_of(c, PLAIN) for c in (Combine.TOGETHER, Combine.LAST_PROGRAM))
    assert ops.who_combines(together, at_once, device) is Combine.TOGETHER
    assert ops.who_combines(together, at_once + 1, device) is Combine.SECOND_KERNEL
    assert ops.who_combines(last, at_once + 1, device) is Combine.LAST_PROGRAM
    num_requests = at_once // PLAIN.num_kv + 1
    config = DecodeConfig(16, 4, 2, 4000, short_tokens=32, combines=Combine.TOGETHER)
    check_decode(PLAIN, [40] * num_requests, 1, torch.float32, device, config)


@triton.jit
def exchange_kernel(source_ptr, slots_ptr, arrivals_ptr, out_ptr, num_used, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Program i leaves row i of source in slots, and adds up column block i of what all left."""
    i = tl.program_id(0)
    o = tl.arange(0, BLOCK)
    tl.store(slots_ptr + i * BLOCK + o, tl.load(source_ptr + i * BLOCK + o))
    meet(arrivals_ptr, i, num_used, True)
    b_sum = tl.zeros([BLOCK], tl.int32)
    for j in range(num_used):
        b_sum += tl.load(slots_ptr + j * BLOCK + o, cache_modifier=".cg")
    tl.store(out_ptr + i * BLOCK + o, b_sum)


@pytest.mark.gpu
def test_programs_wait_for_one_another() -> None:
    """E2: launches in a row of as many programs as SMs, fewer, more. Oracle: integer sums."""
    num_sms = ops.programs_at_once(torch.device("cuda"))
    arrivals = torch.zeros(1, dtype=torch.int32, device="cuda")
    slots = torch.zeros(num_sms, 1024, dtype=torch.int32, device="cuda")
    for number in range(300):
        num_used = (num_sms, 2, 33)[number % 3]
        source = torch.randint(0, 1000, (num_used, 1024), dtype=torch.int32, device="cuda")
        out = torch.empty_like(source)
        launch(exchange_kernel)[(num_used,)](source, slots, arrivals, out, num_used, BLOCK=1024)
        assert torch.equal(out, source.sum(0, dtype=torch.int32).expand_as(out))
    assert not (arrivals & LOW_BITS).any()


@pytest.mark.gpu
@pytest.mark.parametrize("combines", [Combine.LAST_PROGRAM, Combine.TOGETHER])
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_real_sizes(geometry: str, rows: int, combines: Combine) -> None:
    """E2: a grid full of splits, with one split, with unused ones. Oracle: fp64 attention."""
    config = DecodeConfig(64, 8, 3, 132, combines=combines, combined_dims=64)
    for context_lens in ([9000], [5000, 70], [rows], [0, 9000]):
        check_decode(
            GEOMETRIES[geometry], context_lens, rows, torch.bfloat16, torch.device("cuda"), config
        )


@pytest.mark.gpu
@pytest.mark.parametrize("combines", [Combine.LAST_PROGRAM, Combine.TOGETHER])
def test_replays(combines: Combine) -> None:
    """E2, E5: captured launches with the same counters, replayed. Oracle: the first run."""
    batch = build_rows(GEOMETRIES["27B"], [3000], 1, torch.device("cuda"))
    config = DecodeConfig(16, 4, 2, 132, combines=combines)
    expected = batch.decode(config)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [batch.decode(config) for _ in range(3)]
    for _ in range(200):
        for result in results:
            result.fill_(0)
        graph.replay()
        assert all(torch.equal(result, expected) for result in results)
    assert batch.is_settled
