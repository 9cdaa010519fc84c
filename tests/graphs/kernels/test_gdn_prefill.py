"""E2: the GDN prefill kernels on pools with poisoned slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from graphs.kernels.gdn.prefill import gdn_prefill
from tests.graphs.gdn_driver import (
    GdnDriver,
    Geometry,
    Rows,
    Setup,
    relative_error,
    spread_slots,
)
from tests.tolerances import KERNEL_BF16_RTOL, KERNEL_FP32_RTOL

TINY = Geometry(2, 6, 16, 32, 4)
ODD = [
    Geometry(1, 1, 48, 16, 3),
    Geometry(1, 2, 16, 80, 2),
    pytest.param(TINY, marks=pytest.mark.sanitize),
]
SIZE_27B = Geometry(16, 48, 128, 128, 4)
SIZE_35B = Geometry(16, 32, 128, 128, 4)
WIDE = Geometry(1, 2, 256, 256, 4)
# The interpreter multiplies bf16 matrices as if their bits were integers.
LOW_DTYPE = {"cpu": torch.float16, "cuda": torch.bfloat16}
STATE_DTYPES = [torch.float32, torch.bfloat16, torch.float16]
Part = tuple[int, Rows, int, int]  # slot, rows, first row, end
Expected = tuple[Tensor, Tensor, dict[int, Tensor]]  # outputs, last state, states before chunks


pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def make_driver(
    geometry: Geometry,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    state_dtype: torch.dtype = torch.float32,
    num_slots: int = 5,
) -> GdnDriver:
    setup = Setup(geometry, device, dtype, state_dtype, prefill=gdn_prefill)
    return GdnDriver(setup, num_slots)


def fresh_parts(driver: GdnDriver, lens: list[int]) -> list[Part]:
    """Requests from position 0, in slots 1, 2, ..."""
    return [(1 + i, driver.make_rows(num_rows), 0, num_rows) for i, num_rows in enumerate(lens)]


def expect_part(driver: GdnDriver, part: Part, chunks: Sequence[int]) -> Expected:
    """fp64 outputs and last state of a fresh request, and the states before some chunks."""
    _, rows, _, num_rows = part
    boundaries = [64 * chunk for chunk in chunks if 0 < 64 * chunk < num_rows]
    states = {stop // 64: driver.expect(rows, stop)[1] for stop in boundaries}
    return *driver.expect(rows, num_rows), states


def check_parts(
    driver: GdnDriver, parts: list[Part], expectations: list[Expected], tolerance: float
) -> None:
    """One call over fresh requests: outputs, states, rings, snapshots."""
    # Final states are rounded once more, to the dtype of the pool.
    state_tolerance = max(tolerance, torch.finfo(driver.state_pool.dtype).eps)
    outputs, states = driver.prefill(parts)
    first_chunk = 0
    for part, got, expectation in zip(parts, outputs, expectations, strict=True):
        slot, rows, _, num_rows = part
        expected, state, boundary_states = expectation
        # The norm blows up the rounding errors of a row whose outputs are nearly zero.
        if num_rows > 1 or driver.setup.dtype is torch.float32:
            assert relative_error(got, expected) < tolerance
        assert relative_error(driver.state_pool[slot], state) < state_tolerance
        assert torch.equal(*driver.ring_of(slot, rows, num_rows))
        assert not states[first_chunk].any()
        for chunk, boundary_state in boundary_states.items():
            assert relative_error(states[first_chunk + chunk], boundary_state) < tolerance
        first_chunk += (num_rows + 63) // 64
    everything = torch.cat([expected for expected, *_ in expectations])
    assert relative_error(torch.cat(outputs), everything) < tolerance


def check_prefill(driver: GdnDriver, lens: list[int], tolerance: float) -> None:
    """One call over fresh requests, the states before all chunks checked."""
    parts = fresh_parts(driver, lens)
    expectations = [expect_part(driver, part, range(8)) for part in parts]
    check_parts(driver, parts, expectations, tolerance)


@pytest.mark.parametrize("geometry", ODD, ids=str)
def test_prefill_follows_the_recurrence(geometry: Geometry, device: torch.device) -> None:
    """E2: 1, 63, 64, 65 and 130 fresh rows in one call, head dims that fill no tile.

    Oracle: fp64 recurrence, at the end and at every chunk boundary.
    """
    driver = make_driver(geometry, device, num_slots=6)
    check_prefill(driver, [63, 1, 130, 64, 65], KERNEL_FP32_RTOL)


def test_a_long_prompt(device: torch.device) -> None:
    """E2: 500 rows, eight chunks. Oracle: fp64 recurrence."""
    check_prefill(make_driver(Geometry(1, 1, 16, 16, 4), device), [500], KERNEL_FP32_RTOL)


@pytest.mark.sanitize
def test_low_precision_inputs(device: torch.device) -> None:
    """E2: a model in low precision. Oracle: fp64 recurrence on the same low inputs."""
    driver = make_driver(Geometry(1, 2, 64, 32, 4), device, LOW_DTYPE[device.type])
    check_prefill(driver, [130, 65], KERNEL_BF16_RTOL)


@pytest.mark.gpu
@pytest.mark.parametrize("geometry", [SIZE_27B, SIZE_35B, WIDE], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_real_sizes(geometry: Geometry, dtype: torch.dtype) -> None:
    """E2: head dims and head counts of real models, many chunks, each state dtype.

    Oracle: fp64 recurrence, computed once for all state dtypes.
    """
    tolerance = KERNEL_FP32_RTOL if dtype is torch.float32 else KERNEL_BF16_RTOL
    driver = make_driver(geometry, torch.device("cuda"), dtype)
    parts = fresh_parts(driver, [500, 63, 65, 1])
    expectations = [expect_part(driver, part, [1, 7]) for part in parts]
    for state_dtype in STATE_DTYPES:
        driver.state_pool = torch.full_like(driver.state_pool, torch.nan, dtype=state_dtype)
        driver.conv_pool.fill_(torch.nan)
        check_parts(driver, parts, expectations, tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("slot_stride", [3 * 2**28, 2**31 + 64])
def test_offsets_past_31_bits(slot_stride: int) -> None:
    """E2: slots so far apart that no 32-bit number holds their offsets. Oracle: fp64 recurrence."""
    bf16, lens = torch.bfloat16, [65, 70, 130] if slot_stride < 2**31 else [130]
    driver = make_driver(SIZE_35B, torch.device("cuda"), bf16, bf16, num_slots=1 + len(lens))
    driver.state_pool = spread_slots(driver.state_pool, slot_stride)
    driver.conv_pool = spread_slots(driver.conv_pool, slot_stride)
    check_prefill(driver, lens, KERNEL_BF16_RTOL)
    slot = len(lens)
    rows = driver.make_rows(70)
    driver.prefill([(slot, rows, 0, 67)])
    outputs, _ = driver.prefill([(slot, rows, 67, 70)])
    assert relative_error(outputs[0], driver.expect(rows, 70)[0][67:]) < KERNEL_BF16_RTOL
    assert driver.state_pool[0].isnan().all() and driver.conv_pool[0].isnan().all()
    del driver
    torch.cuda.empty_cache()


@pytest.mark.parametrize("state_dtype", STATE_DTYPES, ids=str)
def test_resumed_prefill(state_dtype: torch.dtype, device: torch.device) -> None:
    """E2: 100 rows and then 30 are 130 rows, the state rounded once between the two calls.

    Oracle: fp64 recurrence over all rows; two slots, of which one starts afresh in the second
    call. Errors up to the rounding of the stored state.
    """
    driver = make_driver(Geometry(1, 2, 16, 32, 4), device, state_dtype=state_dtype)
    first, second = driver.make_rows(130), driver.make_rows(70)
    tolerance = max(KERNEL_FP32_RTOL, torch.finfo(state_dtype).eps)
    outputs, _ = driver.prefill([(3, first, 0, 100)])
    assert relative_error(outputs[0], driver.expect(first, 100)[0]) < KERNEL_FP32_RTOL
    outputs, states = driver.prefill([(2, second, 0, 70), (3, first, 100, 130)])
    for slot, rows, num_rows, start, got in (
        (2, second, 70, 0, outputs[0]),
        (3, first, 130, 100, outputs[1]),
    ):
        expected, state = driver.expect(rows, num_rows)
        assert relative_error(got, expected[start:]) < tolerance
        assert relative_error(driver.state_pool[slot], state) < tolerance
        assert torch.equal(*driver.ring_of(slot, rows, num_rows))
    assert relative_error(states[2], driver.expect(first, 100)[1]) < tolerance


@pytest.mark.parametrize("start", [1, 2, 3])
def test_the_window_reaches_back_into_the_ring(start: int, device: torch.device) -> None:
    """E2: fewer rows so far than the window is long, then few again. Oracle: fp64 recurrence."""
    driver = make_driver(TINY, device)
    rows = driver.make_rows(start + 2)
    driver.prefill([(4, rows, 0, start)])
    outputs, _ = driver.prefill([(4, rows, start, start + 2)])
    expected, state = driver.expect(rows, start + 2)
    assert relative_error(outputs[0], expected[start:]) < KERNEL_FP32_RTOL
    assert relative_error(driver.state_pool[4], state) < KERNEL_FP32_RTOL
    assert torch.equal(*driver.ring_of(4, rows, start + 2))


def with_gates(rows: Rows, a: Tensor, b: Tensor) -> Rows:
    a, b = (x.to(rows.a.device).expand_as(rows.a).contiguous() for x in (a, b))
    return replace(rows, a=a, b=b)


@pytest.mark.parametrize("spread", [0.0, 1e-3, 0.1])
def test_nearly_parallel_keys(spread: float, device: torch.device) -> None:
    """E2: all keys alike, beta near 1, no decay: series for the inverse lose all digits here.

    Oracle: fp64 recurrence.
    """
    driver = make_driver(TINY, device)
    rows = driver.make_rows(130)
    keys = slice(32, 64)
    rows.conv_in[:, keys] = rows.conv_in[:1, keys] + spread * rows.conv_in[:, keys]
    # Keys may not come out of the conv near zero, where a small spread is a large one.
    driver.conv[keys] = 1.0
    rows = with_gates(rows, torch.tensor(-20.0), torch.tensor(8.0))
    outputs, _ = driver.prefill([(1, rows, 0, 130)])
    expected, state = driver.expect(rows, 130)
    assert relative_error(outputs[0], expected) < KERNEL_FP32_RTOL
    assert relative_error(driver.state_pool[1], state) < KERNEL_FP32_RTOL


@pytest.mark.parametrize("key_scale", [1e-3, 20.0])
def test_half_precision_holds_keys_of_any_length(key_scale: float, device: torch.device) -> None:
    """E2: fp16 with very short and long keys beside large values. Oracle: fp64 recurrence."""
    geometry = Geometry(1, 1, 16, 16, 4)
    driver = make_driver(geometry, device, torch.float16)
    driver.conv.zero_()
    driver.conv[:, -1] = 1.0
    rows = driver.make_rows(5)
    rows.conv_in[:, 16:32] *= key_scale
    rows.conv_in[:, 32:] = 400.0
    (got,), _ = driver.prefill([(1, rows, 0, 5)])
    expected, state = driver.expect(rows, 5)
    assert relative_error(driver.state_pool[1], state) < KERNEL_BF16_RTOL
    assert relative_error(got, expected) < KERNEL_BF16_RTOL


def test_strong_decay(device: torch.device) -> None:
    """E2: sums of log decays of 20,000 in a chunk, rows of hardly any decay among them.

    Oracle: fp64 recurrence.
    """
    driver = make_driver(TINY, device)
    driver.a_log += 3.0
    rows = driver.make_rows(130)
    rows = with_gates(rows, torch.where(torch.arange(130) % 8 < 2, 60.0, -8.0)[:, None], rows.b)
    outputs, states = driver.prefill([(1, rows, 0, 130)])
    expected, state = driver.expect(rows, 130)
    assert relative_error(outputs[0], expected) < KERNEL_FP32_RTOL
    assert relative_error(driver.state_pool[1], state) < KERNEL_FP32_RTOL
    assert states.isfinite().all()


def test_only_requests_with_rows_and_a_slot_change_pools(device: torch.device) -> None:
    """E2: the padding slot, idle slots, a request without rows; padding rows give zeros.

    Oracle: a copy of the pools, NaN and all; the fp64 recurrence for the request that counts.
    """
    driver = make_driver(TINY, device)
    rows, padding = driver.make_rows(70), driver.make_rows(9)
    driver.state_pool[0], driver.conv_pool[0] = 3.0, 3.0
    before = driver.state_pool.clone(), driver.conv_pool.clone()
    outputs, _ = driver.prefill(
        [(0, padding, 0, 5), (4, padding, 0, 0), (2, rows, 0, 70), (0, padding, 2, 9)]
    )
    expected, state = driver.expect(rows, 70)
    assert relative_error(outputs[2], expected) < KERNEL_FP32_RTOL
    assert relative_error(driver.state_pool[2], state) < KERNEL_FP32_RTOL
    idle = [0, 1, 3, 4]
    assert torch.equal(driver.state_pool[idle].view(torch.uint8), before[0][idle].view(torch.uint8))
    assert torch.equal(driver.conv_pool[idle].view(torch.uint8), before[1][idle].view(torch.uint8))


def test_padding_rows_give_zeros(device: torch.device) -> None:
    """E2: rows after the last request, and no rows at all for anyone. Oracle: zeros."""
    driver = make_driver(TINY, device)
    rows = driver.make_rows(9)
    for num_rows in (2, 0):
        out, _ = gdn_prefill(
            rows.projected(0, 9),
            torch.arange(9, device=device),
            torch.tensor([0, num_rows], device=device),
            torch.tensor([[0, 0], [0, num_rows]], device=device),
            torch.tensor([0, min(num_rows, 1)], device=device),
            torch.tensor([1], device=device),
            driver.conv,
            driver.a_log,
            driver.dt_bias,
            driver.norm,
            driver.conv_pool,
            driver.state_pool,
            TINY.num_k_heads,
            1e-6,
        )
        assert out[:num_rows].isfinite().all() and out[:num_rows].any(1).all()
        assert not out[num_rows:].any()


def test_rows_and_slots_with_strides(device: torch.device) -> None:
    """E2: a wider projection and pools of all layers, sliced, give the same bits.

    Oracle: the same two calls on contiguous tensors.
    """
    driver = make_driver(TINY, device)
    rows = driver.make_rows(70)
    width = rows.projected(0, 1).shape[1]

    def strided(projected: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        wide = torch.full((projected.shape[0], width + 7), torch.nan, device=device)
        wide[:, :width] = projected
        return gdn_prefill(wide[:, :width], *rest)

    parts = [(2, rows, 0, 10)], [(2, rows, 10, 70)]
    expected = [driver.prefill(part)[0][0] for part in parts]
    other = make_driver(TINY, device)
    for name in ("conv", "a_log", "dt_bias", "norm"):
        setattr(other, name, getattr(driver, name))
    other.setup = replace(other.setup, prefill=strided)
    layers_first = torch.stack([other.state_pool, other.state_pool], dim=1)
    rings_first = torch.stack([other.conv_pool, other.conv_pool], dim=1)
    other.state_pool, other.conv_pool = layers_first[:, 1], rings_first[:, 1]
    got = [other.prefill(part)[0][0] for part in parts]
    assert torch.equal(torch.cat(got), torch.cat(expected))
    assert torch.equal(other.state_pool[2], driver.state_pool[2])
    assert torch.equal(other.conv_pool[2], driver.conv_pool[2])
    assert layers_first[:, 0].isnan().all() and rings_first[:, 0].isnan().all()
