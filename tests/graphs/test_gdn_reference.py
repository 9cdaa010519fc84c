"""E2, V14: the GDN decode step and the chunked prefill on pools with poisoned slots."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from graphs.kernels.gdn.reference import gdn_decode
from tests.graphs.allocations import largest_allocation
from tests.graphs.gdn_driver import GdnDriver, Geometry, Setup, relative_error
from tests.tolerances import KERNEL_FP32_RTOL

GEOMETRIES = [Geometry(2, 6, 16, 8, 4), Geometry(1, 1, 8, 32, 3), Geometry(2, 4, 32, 32, 4)]


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("cuts", [[1], [63, 65], [64, 128, 129], [7, 77, 200]], ids=str)
def test_prefill_in_chunks_then_decode(geometry: Geometry, cuts: list[int]) -> None:
    """E2, V14: any cut of the prompt, then decode. Oracle: fp64 recurrence over all tokens."""
    torch.manual_seed(0)
    driver = GdnDriver(Setup(geometry))
    num_rows = cuts[-1] + 4
    first, second = driver.make_rows(num_rows), driver.make_rows(num_rows)
    start = 0
    got_first, got_second = [], []
    for cut in cuts:
        outputs, _ = driver.prefill([(3, first, start, cut), (1, second, start, cut)])
        got_first.append(outputs[0])
        got_second.append(outputs[1])
        start = cut
    for row in range(start, num_rows):
        out = driver.decode([1, 3], [second, first], row)
        got_second.append(out[:1])
        got_first.append(out[1:])
    for slot, rows, got in ((3, first, got_first), (1, second, got_second)):
        expected, state = driver.expect(rows, num_rows)
        assert relative_error(torch.cat(got), expected) < KERNEL_FP32_RTOL
        assert relative_error(driver.state_pool[slot], state) < KERNEL_FP32_RTOL
        assert torch.equal(*driver.ring_of(slot, rows, num_rows))


def test_states_before_each_chunk_are_returned() -> None:
    """E4: what a snapshot at a chunk boundary would hold. Oracle: fp64 state after its rows."""
    torch.manual_seed(0)
    driver = GdnDriver(Setup(GEOMETRIES[0]))
    first, second = driver.make_rows(130), driver.make_rows(70)
    _, states = driver.prefill([(2, first, 0, 130), (1, second, 0, 70)])
    assert not states[0].any() and not states[3].any()
    for chunk, rows, num_rows in ((1, first, 64), (2, first, 128), (4, second, 64)):
        _, expected = driver.expect(rows, num_rows)
        assert relative_error(states[chunk], expected) < KERNEL_FP32_RTOL


@pytest.mark.parametrize("num_requests", [1, 2])
def test_a_compiled_decode_step_copies_no_pool(num_requests: int, tmp_path: Path) -> None:
    """E5: the pools are written in place. Oracle: the profiler's record of allocations."""
    decode = torch.compile(gdn_decode, fullgraph=True)
    driver = GdnDriver(Setup(GEOMETRIES[0], decode=decode), num_slots=4096)
    slots, rows = list(range(num_requests)), driver.make_rows(6)
    taken = largest_allocation(lambda: driver.decode(slots, [rows] * num_requests, 5), tmp_path)
    assert 0 < taken < driver.conv_pool.nbytes / 4


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_only_the_named_slots_change(phase: str) -> None:
    """E2: idle slots keep their NaN, bit for bit. Oracle: a copy of the pools."""
    torch.manual_seed(0)
    driver = GdnDriver(Setup(GEOMETRIES[0]))
    rows = driver.make_rows(20)
    driver.prefill([(2, rows, 0, 19)])
    if phase == "decode":
        driver.conv_pool[0], driver.state_pool[0] = 0.0, 0.0
        # Two padding rows share the padding slot.
        driver.decode([2, 0, 0], [rows, rows, rows], 19)
    for slot in (1, 3, 4):
        assert driver.conv_pool[slot].isnan().all()
        assert driver.state_pool[slot].isnan().all()
    assert driver.state_pool[2].isfinite().all()


def test_low_precision_states_round_once_per_step() -> None:
    """V10: a bf16 state is what fp32 arithmetic on the stored bf16 state rounds to.

    Oracle: the fp32 decode step on a copy of the state, rounded.
    """
    torch.manual_seed(0)
    driver = GdnDriver(Setup(GEOMETRIES[0]))
    rows = driver.make_rows(10)
    driver.prefill([(1, rows, 0, 9)])
    low_pool = driver.state_pool.bfloat16()
    conv_pool = driver.conv_pool.clone()
    driver.state_pool[1] = low_pool[1].float()
    expected_state = driver.state_pool
    expected = driver.decode([1], [rows], 9)
    driver.state_pool, driver.conv_pool = low_pool, conv_pool
    got = driver.decode([1], [rows], 9)
    assert torch.equal(got, expected)
    assert torch.equal(driver.state_pool[1], expected_state[1].bfloat16())
