"""E2, V10: the GDN decode kernel on pools with poisoned slots."""

from __future__ import annotations

import pytest
import torch

from graphs.kernels.gdn.decode import gdn_decode
from graphs.kernels.gdn.reference import gdn_prefill
from tests.graphs.gdn_driver import GdnDriver, Geometry, Setup, relative_error, spread_slots
from tests.tolerances import KERNEL_BF16_RTOL, KERNEL_FP32_RTOL

TINY = [Geometry(2, 6, 16, 8, 4), Geometry(1, 1, 8, 32, 3), Geometry(1, 2, 24, 48, 4)]
SIZE_27B = Geometry(16, 48, 128, 128, 4)
SIZE_35B = Geometry(16, 32, 128, 128, 4)
# The interpreter cuts fp32 off to bf16 instead of rounding; fp16 it rounds.
LOW_DTYPE = {"cpu": torch.float16, "cuda": torch.bfloat16}
STATE_DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SANITIZED = pytest.param(TINY[0], marks=pytest.mark.sanitize)
SANITIZED_STATE = pytest.param(torch.bfloat16, marks=pytest.mark.sanitize)


pytestmark = pytest.mark.usefixtures("poisoned_memory")


def check_steps(driver: GdnDriver, prompt_rows: int, num_steps: int, tolerance: float) -> None:
    """Two requests and padding rows between them, prefilled by the reference, then decoded."""
    num_rows = prompt_rows + num_steps
    first, second = driver.make_rows(num_rows), driver.make_rows(num_rows)
    driver.prefill([(3, first, 0, prompt_rows), (1, second, 0, prompt_rows)])
    idle = [slot for slot in range(driver.state_pool.shape[0]) if slot not in (1, 3)]
    before = driver.state_pool[idle].clone(), driver.conv_pool[idle].clone()
    outputs = [
        driver.decode([3, 0, 1, 0], [first, second, second, first], row)
        for row in range(prompt_rows, num_rows)
    ]
    for slot, request, rows in ((3, 0, first), (1, 2, second)):
        expected, state = driver.expect(rows, num_rows)
        got = torch.stack([out[request] for out in outputs])
        assert relative_error(got, expected[prompt_rows:]) < tolerance
        assert relative_error(driver.state_pool[slot], state) < tolerance
        assert torch.equal(*driver.ring_of(slot, rows, num_rows))
    assert torch.equal(driver.state_pool[idle].view(torch.uint8), before[0].view(torch.uint8))
    assert torch.equal(driver.conv_pool[idle].view(torch.uint8), before[1].view(torch.uint8))


@pytest.mark.parametrize("geometry", [SANITIZED, *TINY[1:]], ids=str)
@pytest.mark.parametrize("prompt_rows", [1, 2, 9])
def test_decode_follows_the_recurrence(
    geometry: Geometry, prompt_rows: int, device: torch.device
) -> None:
    """E2: prompts shorter and longer than the window, NaN in idle slots, padding rows.

    Oracle: fp64 recurrence over all tokens; a copy of the idle slots.
    """
    torch.manual_seed(0)
    driver = GdnDriver(Setup(geometry, device, decode=gdn_decode))
    check_steps(driver, prompt_rows, 6, KERNEL_FP32_RTOL)


@pytest.mark.parametrize("state_dtype", [torch.float32, SANITIZED_STATE, torch.float16], ids=str)
def test_low_precision_inputs_and_states(state_dtype: torch.dtype, device: torch.device) -> None:
    """E2: half-precision activations with each state dtype. Oracle: fp64 recurrence."""
    torch.manual_seed(1)
    setup = Setup(TINY[0], device, LOW_DTYPE[device.type], state_dtype, decode=gdn_decode)
    check_steps(GdnDriver(setup), 5, 4, KERNEL_BF16_RTOL)


@pytest.mark.gpu
@pytest.mark.parametrize("geometry", [SIZE_27B, SIZE_35B], ids=str)
@pytest.mark.parametrize("state_dtype", STATE_DTYPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_real_sizes(geometry: Geometry, state_dtype: torch.dtype, dtype: torch.dtype) -> None:
    """E2: the geometries people serve. Oracle: fp64 recurrence."""
    torch.manual_seed(2)
    setup = Setup(geometry, torch.device("cuda"), dtype, state_dtype, decode=gdn_decode)
    is_exact = dtype is torch.float32 and state_dtype is torch.float32
    check_steps(GdnDriver(setup), 6, 6, KERNEL_FP32_RTOL if is_exact else KERNEL_BF16_RTOL)


def check_batch(geometry: Geometry, batch: int, dtype: torch.dtype, tolerance: float) -> None:
    """Four tokens from position 0 of requests in shuffled slots, every ninth one padding."""
    setup = Setup(geometry, torch.device("cuda"), dtype, decode=gdn_decode)
    driver = GdnDriver(setup, batch + 2)
    slots = (torch.randperm(batch + 1)[:batch] + 1).tolist()
    slots[4::9] = [0] * len(slots[4::9])
    requests = [driver.make_rows(4) for _ in slots]
    outputs = torch.stack([driver.decode(slots, requests, row) for row in range(4)], dim=1)
    real = [request for request, slot in enumerate(slots) if slot != 0]
    expected = []
    for request in real:
        slot, rows = slots[request], requests[request]
        out, state = driver.expect(rows, 4)
        expected.append(out)
        assert relative_error(driver.state_pool[slot], state) < tolerance
        assert torch.equal(*driver.ring_of(slot, rows, 4))
    # Together: the norm blows up the rounding errors of the few outputs that are nearly zero.
    assert relative_error(outputs[real], torch.stack(expected)) < tolerance
    idle = [slot for slot in range(batch + 2) if slot == 0 or slot not in slots]
    assert driver.state_pool[idle].isnan().all() and driver.conv_pool[idle].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize(("geometry", "batch"), [(SIZE_35B, 63), (SIZE_27B, 65), (TINY[0], 500)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_large_batches(geometry: Geometry, batch: int, dtype: torch.dtype) -> None:
    """E2: 63, 65 and 500 requests. Oracle: fp64 recurrence; NaN where no request is."""
    torch.manual_seed(6)
    tolerance = KERNEL_FP32_RTOL if dtype is torch.float32 else KERNEL_BF16_RTOL
    check_batch(geometry, batch, dtype, tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("slot_stride", [3 * 2**28, 2**31 + 64])
def test_offsets_past_31_bits(slot_stride: int) -> None:
    """E2: slots so far apart that no 32-bit number holds their offsets. Oracle: fp64 recurrence."""
    torch.manual_seed(7)
    bf16, num_slots = torch.bfloat16, 4 if slot_stride < 2**31 else 2
    driver = GdnDriver(Setup(SIZE_35B, torch.device("cuda"), bf16, bf16, gdn_decode), num_slots)
    driver.state_pool = spread_slots(driver.state_pool, slot_stride)
    driver.conv_pool = spread_slots(driver.conv_pool, slot_stride)
    rows = driver.make_rows(6)
    outputs = [driver.decode([num_slots - 1, 0], [rows, rows], row)[0] for row in range(6)]
    expected, state = driver.expect(rows, 6)
    assert relative_error(torch.stack(outputs), expected) < KERNEL_BF16_RTOL
    assert relative_error(driver.state_pool[-1], state) < KERNEL_BF16_RTOL
    assert driver.state_pool[:-1].isnan().all() and driver.conv_pool[:-1].isnan().all()
    del driver
    torch.cuda.empty_cache()


@pytest.mark.parametrize("name", ["projected", "conv_weight", "conv_pool", "state_pool"])
def test_other_layouts_are_refused(name: str, device: torch.device) -> None:
    """E2: transposed in memory, an argument would be misread. Oracle: an assertion fails."""
    driver = GdnDriver(Setup(TINY[0], device, decode=gdn_decode))
    tensors = {
        "projected": driver.make_rows(2).projected(0, 2),
        "positions": torch.zeros(2, dtype=torch.int64, device=device),
        "state_slots": torch.tensor([1, 2], device=device),
        "conv_weight": driver.conv,
        "a_log": driver.a_log,
        "dt_bias": driver.dt_bias,
        "norm_weight": driver.norm,
        "conv_pool": driver.conv_pool,
        "state_pool": driver.state_pool,
    }
    gdn_decode(**tensors, num_k_heads=2, eps=1e-6)
    tensors[name] = tensors[name].mT.contiguous().mT
    with pytest.raises(AssertionError):
        gdn_decode(**tensors, num_k_heads=2, eps=1e-6)


def test_low_precision_states_round_once_per_step(device: torch.device) -> None:
    """V10: a low-precision state is what fp32 arithmetic on the stored state rounds to.

    Oracle: the same kernel on an fp32 copy of the state, rounded; equal in every bit.
    """
    torch.manual_seed(3)
    driver = GdnDriver(Setup(TINY[0], device, decode=gdn_decode))
    rows = driver.make_rows(10)
    driver.prefill([(1, rows, 0, 9)])
    low_pool = driver.state_pool.to(LOW_DTYPE[device.type])
    conv_pool = driver.conv_pool.clone()
    driver.state_pool[1] = low_pool[1].float()
    fp32_pool = driver.state_pool
    expected = driver.decode([1], [rows], 9)
    driver.state_pool, driver.conv_pool = low_pool, conv_pool
    assert torch.equal(driver.decode([1], [rows], 9), expected)
    assert torch.equal(driver.state_pool[1], fp32_pool[1].to(low_pool.dtype))


def test_a_row_has_the_same_bits_in_any_batch(device: torch.device) -> None:
    """V10: alone or between others. Oracle: the same request decoded alone, torch.equal."""
    torch.manual_seed(4)
    driver = GdnDriver(Setup(TINY[2], device, decode=gdn_decode))
    rows, other = driver.make_rows(8), driver.make_rows(8)
    driver.prefill([(1, rows, 0, 7), (2, rows, 0, 7), (4, other, 0, 7)])
    alone = driver.decode([1], [rows], 7)
    together = driver.decode([4, 2, 0], [other, rows, other], 7)
    assert torch.equal(together[1], alone[0])
    assert torch.equal(driver.state_pool[1], driver.state_pool[2])


def test_the_reference_and_the_kernel_agree_on_a_strided_input(device: torch.device) -> None:
    """E2: `projected` as a slice of a wider matrix. Oracle: the same rows, contiguous."""
    torch.manual_seed(5)
    driver = GdnDriver(Setup(TINY[0], device, decode=gdn_decode, prefill=gdn_prefill))
    rows = driver.make_rows(4)
    driver.prefill([(1, rows, 0, 3), (2, rows, 0, 3)])
    expected = driver.decode([1], [rows], 3)
    wide = torch.full((1, 500), torch.nan, device=device)
    projected = rows.projected(3, 4)
    wide[:, : projected.shape[1]] = projected
    got = gdn_decode(
        wide[:, : projected.shape[1]],
        torch.tensor([3], device=device),
        torch.tensor([2], device=device),
        driver.conv,
        driver.a_log,
        driver.dt_bias,
        driver.norm,
        driver.conv_pool,
        driver.state_pool,
        2,
        1e-6,
    )
    assert torch.equal(got, expected)
