"""V8 to V11, V14: the GDN verify and commit kernels against stepwise decode, bit by bit."""

from __future__ import annotations

import pytest
import torch

from graphs.kernels.gdn.commit import gdn_commit
from graphs.kernels.gdn.decode import gdn_decode
from graphs.kernels.gdn.verify import gdn_verify
from tests.graphs.gdn_driver import (
    EPS,
    GdnDriver,
    Geometry,
    Setup,
    spread_slots,
)
from tests.graphs.gdn_verify_checks import check_accepts, check_session, check_verify_and_commit
from tests.tolerances import KERNEL_BF16_RTOL, KERNEL_FP32_RTOL

GROUPED = Geometry(2, 6, 16, 8, 4)  # three value heads per key head
SINGLE = Geometry(1, 1, 8, 32, 3)
TWO_BLOCKS = Geometry(1, 2, 24, 48, 4)  # padded, and more rows of V than one tile has
SIZE_27B = Geometry(16, 48, 128, 128, 4)
CUDA = torch.device("cuda")
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def make_driver(
    geometry: Geometry,
    device: torch.device,
    dtype: torch.dtype = FP32,
    state_dtype: torch.dtype = FP32,
    num_slots: int = 5,
) -> GdnDriver:
    setup = Setup(
        geometry, device, dtype, state_dtype, gdn_decode, verify=gdn_verify, commit=gdn_commit
    )
    return GdnDriver(setup, num_slots)


@pytest.mark.parametrize(
    ("geometry", "num_rows", "spare_rows", "starts", "dtype", "state_dtype"),
    [
        pytest.param(GROUPED, 4, 0, [70], FP32, FP32, marks=pytest.mark.sanitize),
        (SINGLE, 2, 1, [3, 1, 70], FP16, FP16),
        (SINGLE, 8, 0, [1, 5], FP32, BF16),
        (TWO_BLOCKS, 4, 0, [3], FP32, FP16),
    ],
)
def test_rows_and_commits_are_those_of_stepwise_decode(
    geometry: Geometry,
    num_rows: int,
    spare_rows: int,
    starts: list[int],
    dtype: torch.dtype,
    state_dtype: torch.dtype,
    device: torch.device,
) -> None:
    """V8 to V11: fewer and more rows than the window, every accept count, three state dtypes.

    Oracle: `gdn_decode` row by row; copies of the pools.
    """
    torch.manual_seed(0)
    driver = make_driver(geometry, device, dtype, state_dtype, len(starts) + 2)
    check_verify_and_commit(driver, starts, num_rows, spare_rows=spare_rows)


def test_random_accepts_are_stepwise_decode(device: torch.device) -> None:
    """V9, V10, C-S10: Oracle: `gdn_decode` row by row, torch.equal."""
    torch.manual_seed(1)
    check_accepts(make_driver(SINGLE, device, FP16, FP16), 24, 4)


def test_a_session_follows_the_recurrence(device: torch.device) -> None:
    """V14: Oracle: fp64 recurrence over each request's tokens so far."""
    torch.manual_seed(2)
    check_session(make_driver(Geometry(1, 2, 8, 16, 4), device), KERNEL_FP32_RTOL)


def test_a_request_at_position_0_starts_from_zero(device: torch.device) -> None:
    """V9: whatever its slot holds. Oracle: `gdn_decode` row by row on the same NaN."""
    torch.manual_seed(3)
    driver = make_driver(SINGLE, device)
    rows, stash = driver.make_rows(3), driver.make_stash(1, 3)
    out = driver.verify([2], [rows], [0], 3, stash)
    driver.commit([2], [0], [3], stash)
    other = make_driver(SINGLE, device)
    other.conv, other.a_log, other.dt_bias = driver.conv, driver.a_log, driver.dt_bias
    other.norm = driver.norm
    expected = torch.cat([other.decode([2], [rows], row) for row in range(3)])
    assert torch.equal(out[0], expected)
    assert torch.equal(driver.state_pool[2], other.state_pool[2])
    assert torch.equal(driver.conv_pool[2], other.conv_pool[2])


def test_projected_may_be_a_slice_of_a_wider_matrix(device: torch.device) -> None:
    """V8: Oracle: the same rows, dense."""
    torch.manual_seed(4)
    driver = make_driver(Geometry(1, 2, 8, 16, 4), device)
    rows, stash = driver.make_rows(5), driver.make_stash(1, 2)
    driver.prefill([(2, rows, 0, 3)])
    expected = driver.verify([2], [rows], [3], 2, stash)
    projected = rows.projected(3, 5)
    wide = torch.full((2, 500), torch.nan, device=device)
    wide[:, : projected.shape[1]] = projected
    other = driver.make_stash(1, 2)
    out = gdn_verify(
        wide[:, : projected.shape[1]],
        torch.tensor([3, 4], device=device),
        torch.tensor([2], device=device),
        driver.conv,
        driver.a_log,
        driver.dt_bias,
        driver.norm,
        driver.conv_pool,
        driver.state_pool,
        *other.layer(0),
        1,
        EPS,
        2,
    )
    assert torch.equal(out, expected[0])
    assert all(torch.equal(left, right) for left, right in zip(stash, other, strict=True))


@pytest.mark.parametrize("index", range(5))
def test_another_stash_layout_is_refused(index: int, device: torch.device) -> None:
    """V8: transposed in memory, a stash would be misread. Oracle: an assertion fails."""
    driver = make_driver(GROUPED, device)
    rows, stash = driver.make_rows(2), list(driver.make_stash(1, 2))
    stash[index] = stash[index].mT.contiguous().mT
    with pytest.raises(AssertionError):
        driver.verify([2], [rows], [0], 2, type(driver.make_stash(1, 2))(*stash))
    with pytest.raises(AssertionError):
        driver.commit([2], [0], [1], type(driver.make_stash(1, 2))(*stash))


@pytest.mark.gpu
@pytest.mark.parametrize("state_dtype", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("num_rows", [2, 4, 8])
def test_real_sizes(num_rows: int, dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    """V9, V10: the 27B geometry. Oracle: `gdn_decode` row by row; copies of the pools."""
    torch.manual_seed(5)
    driver = make_driver(SIZE_27B, CUDA, dtype, state_dtype, 5)
    check_verify_and_commit(driver, [1, 3, 70], num_rows)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "geometry",
    [Geometry(4, 8, 64, 64, 4), Geometry(2, 4, 256, 256, 4), Geometry(2, 4, 64, 16, 4)],
    ids=str,
)
def test_other_head_dims(geometry: Geometry) -> None:
    """V9: tiles of other shapes, one warp too. Oracle: `gdn_decode` row by row."""
    torch.manual_seed(6)
    check_verify_and_commit(make_driver(geometry, CUDA, BF16, FP32, 5), [1, 3, 70], 4)


@pytest.mark.gpu
@pytest.mark.parametrize("state_dtype", [FP32, BF16], ids=str)
def test_16k_tokens_of_random_accepts(state_dtype: torch.dtype) -> None:
    """V9, V10, C-S10: Oracle: `gdn_decode` row by row, torch.equal."""
    torch.manual_seed(7)
    check_accepts(make_driver(Geometry(1, 2, 128, 128, 4), CUDA, BF16, state_dtype), 16384, 4)


@pytest.mark.gpu
def test_a_session_of_a_real_size() -> None:
    """V14: bf16. Oracle: fp64 recurrence over each request's tokens so far."""
    torch.manual_seed(8)
    check_session(make_driver(SIZE_27B, CUDA, BF16), KERNEL_BF16_RTOL)


@pytest.mark.gpu
def test_more_requests_than_a_grid_axis_holds() -> None:
    """V9: 11,001 requests of six heads. Oracle: `gdn_decode` row by row; copies of the pools."""
    torch.manual_seed(9)
    num_requests = 11_000
    driver = make_driver(GROUPED, CUDA, BF16, FP32, num_requests + 2)
    check_verify_and_commit(driver, [1 + index % 5 for index in range(num_requests)], 2)


@pytest.mark.gpu
def test_offsets_past_31_bits() -> None:
    """V9: slots 2^31 elements apart. Oracle: `gdn_decode` row by row, on pools laid out densely."""
    torch.manual_seed(10)
    driver = make_driver(SIZE_27B, CUDA, BF16, BF16, 2)
    rows, stash = driver.make_rows(7), driver.make_stash(1, 4)
    driver.prefill([(1, rows, 0, 3)])
    dense = driver.conv_pool, driver.state_pool
    driver.conv_pool, driver.state_pool = (spread_slots(pool, 2**31 + 64) for pool in dense)
    out = driver.verify([1], [rows], [3], 4, stash)
    driver.commit([1], [3], [4], stash)
    spread = driver.conv_pool[1].clone(), driver.state_pool[1].clone()
    driver.conv_pool, driver.state_pool = dense
    expected = torch.cat([driver.decode([1], [rows], row) for row in range(3, 7)])
    assert torch.equal(out[0], expected)
    assert torch.equal(spread[0], dense[0][1]) and torch.equal(spread[1], dense[1][1])
    del driver.conv_pool, driver.state_pool
    torch.cuda.empty_cache()
