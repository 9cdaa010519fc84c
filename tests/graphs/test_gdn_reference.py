"""E2, V14: the GDN decode step and the chunked prefill on pools with poisoned slots."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from graphs.kernels.gdn import reference
from tests.oracle.gated_delta import gdn_sequence
from tests.tolerances import KERNEL_FP32_RTOL

NUM_SLOTS = 5


@dataclass(frozen=True)
class Geometry:
    """Key heads, value heads, key dim, value dim, conv taps."""

    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    num_taps: int

    @property
    def conv_dim(self) -> int:
        return 2 * self.num_k_heads * self.head_k_dim + self.num_v_heads * self.head_v_dim


GEOMETRIES = [Geometry(2, 6, 16, 8, 4), Geometry(1, 1, 8, 32, 3), Geometry(2, 4, 32, 32, 4)]


@dataclass(frozen=True)
class Rows:
    """Random inputs of one request, [T, ...]."""

    conv_in: Tensor
    a: Tensor
    b: Tensor

    def part(self, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.conv_in[start:stop], self.a[start:stop], self.b[start:stop]


@dataclass(frozen=True)
class Weights:
    """The parameters that the core reads, and its pools, full of NaN."""

    conv: Tensor
    a_log: Tensor
    dt_bias: Tensor
    conv_pool: Tensor
    state_pool: Tensor


def make_weights(geometry: Geometry) -> Weights:
    heads = geometry.num_v_heads
    return Weights(
        conv=torch.randn(geometry.conv_dim, geometry.num_taps) * 0.5,
        a_log=torch.randn(heads) * 0.5,
        dt_bias=torch.randn(heads),
        conv_pool=torch.full((NUM_SLOTS, geometry.num_taps - 1, geometry.conv_dim), torch.nan),
        state_pool=torch.full(
            (NUM_SLOTS, heads, geometry.head_v_dim, geometry.head_k_dim), torch.nan
        ),
    )


def make_rows(geometry: Geometry, num_rows: int) -> Rows:
    heads = geometry.num_v_heads
    return Rows(
        torch.randn(num_rows, geometry.conv_dim),
        torch.randn(num_rows, heads) * 2,
        torch.randn(num_rows, heads) * 2,
    )


def prefill(
    geometry: Geometry, weights: Weights, parts: list[tuple[int, bool, Rows, int, int]]
) -> list[Tensor]:
    """One prefill call over (slot, is_fresh, rows, start, stop) parts, and a padding row."""
    pieces = [rows.part(start, stop) for _, _, rows, start, stop in parts]
    lens = [stop - start for *_, start, stop in parts]
    padding = make_rows(geometry, 3)
    conv_in, a, b = (
        torch.cat([*(piece[index] for piece in pieces), extra])
        for index, extra in enumerate((padding.conv_in, padding.a, padding.b))
    )
    out = reference.gdn_prefill(
        conv_in,
        a,
        b,
        weights.conv,
        weights.a_log,
        weights.dt_bias,
        weights.conv_pool,
        weights.state_pool,
        torch.tensor([slot for slot, *_ in parts] + [0]),
        torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist(), sum(lens)]),
        torch.tensor([fresh for _, fresh, *_ in parts] + [True]),
        geometry.num_k_heads,
    )
    assert not out[sum(lens) :].any()
    return list(out[: sum(lens)].split(lens))


def decode(
    geometry: Geometry, weights: Weights, slots: list[int], requests: list[Rows], row: int
) -> Tensor:
    """One decode call of each request's row `row`."""
    conv_in, a, b = (
        torch.cat([rows.part(row, row + 1)[index] for rows in requests]) for index in range(3)
    )
    return reference.gdn_decode(
        conv_in,
        a,
        b,
        weights.conv,
        weights.a_log,
        weights.dt_bias,
        weights.conv_pool,
        weights.state_pool,
        torch.tensor(slots),
        geometry.num_k_heads,
    )


def relative_error(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


def oracle_of(geometry: Geometry, weights: Weights, rows: Rows, stop: int) -> tuple[Tensor, ...]:
    return gdn_sequence(
        *rows.part(0, stop),
        weights.conv,
        weights.a_log,
        weights.dt_bias,
        geometry.num_k_heads,
        geometry.head_k_dim,
    )


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("cuts", [[1], [63, 65], [64, 128, 129], [7, 77, 200]], ids=str)
def test_prefill_in_chunks_then_decode(geometry: Geometry, cuts: list[int]) -> None:
    """E2, V14: any cut of the prompt, then decode. Oracle: fp64 recurrence over all tokens."""
    torch.manual_seed(0)
    weights = make_weights(geometry)
    num_rows = cuts[-1] + 4
    first, second = make_rows(geometry, num_rows), make_rows(geometry, num_rows)
    start = 0
    got_first, got_second = [], []
    for cut in cuts:
        parts = [(3, start == 0, first, start, cut), (1, start == 0, second, start, cut)]
        outputs = prefill(geometry, weights, parts)
        got_first.append(outputs[0])
        got_second.append(outputs[1])
        start = cut
    for row in range(start, num_rows):
        out = decode(geometry, weights, [1, 3], [second, first], row)
        got_second.append(out[:1])
        got_first.append(out[1:])
    for slot, rows, got in ((3, first, got_first), (1, second, got_second)):
        expected, state, window = oracle_of(geometry, weights, rows, num_rows)
        assert relative_error(torch.cat(got), expected) < KERNEL_FP32_RTOL
        assert relative_error(weights.state_pool[slot], state) < KERNEL_FP32_RTOL
        assert torch.equal(weights.conv_pool[slot].double(), window)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_only_the_named_slots_change(phase: str) -> None:
    """E2: idle slots keep their NaN, bit for bit. Oracle: a copy of the pools."""
    torch.manual_seed(0)
    geometry = GEOMETRIES[0]
    weights = make_weights(geometry)
    rows = make_rows(geometry, 20)
    prefill(geometry, weights, [(2, True, rows, 0, 19)])
    if phase == "decode":
        weights.conv_pool[0], weights.state_pool[0] = 0.0, 0.0
        # Two padding rows share the padding slot.
        decode(geometry, weights, [2, 0, 0], [rows, rows, rows], 19)
    for slot in (1, 3, 4):
        assert weights.conv_pool[slot].isnan().all()
        assert weights.state_pool[slot].isnan().all()
    assert weights.state_pool[2].isfinite().all()


def test_low_precision_states_round_once_per_step() -> None:
    """V10: a bf16 state is what fp32 arithmetic on the stored bf16 state rounds to.

    Oracle: the fp32 decode step on a copy of the state, rounded.
    """
    torch.manual_seed(0)
    geometry = GEOMETRIES[0]
    weights = make_weights(geometry)
    rows = make_rows(geometry, 10)
    prefill(geometry, weights, [(1, True, rows, 0, 9)])
    low_state = weights.state_pool.bfloat16()
    low = Weights(
        weights.conv, weights.a_log, weights.dt_bias, weights.conv_pool.clone(), low_state
    )
    weights.state_pool[1] = low.state_pool[1].float()
    expected = decode(geometry, weights, [1], [rows], 9)
    got = decode(geometry, low, [1], [rows], 9)
    assert torch.equal(got, expected)
    assert torch.equal(low.state_pool[1], weights.state_pool[1].bfloat16())
