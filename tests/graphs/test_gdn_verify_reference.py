"""V8 to V11, V14: verify and commit in plain torch, against the decode step in plain torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from graphs.kernels.gdn.reference import conv_prefill
from graphs.kernels.gdn.verify_reference import causal_conv1d_verify, gdn_commit, gdn_verify
from tests.graphs.allocations import largest_allocation
from tests.graphs.gdn_driver import (
    GdnDriver,
    Geometry,
    Setup,
)
from tests.graphs.gdn_verify_checks import check_accepts, check_session, check_verify_and_commit
from tests.tolerances import KERNEL_FP32_RTOL

GEOMETRIES = [
    Geometry(2, 6, 16, 8, 4),
    Geometry(1, 1, 8, 32, 3),
    Geometry(2, 4, 32, 32, 4),
    Geometry(2, 4, 128, 128, 4),
]
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = [(FP32, FP32), (FP32, BF16), (FP32, FP16), (BF16, FP32), (BF16, BF16), (FP16, FP16)]


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize(("dtype", "state_dtype"), DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [2, 4, 8])
def test_rows_and_commits_are_those_of_stepwise_decode(
    geometry: Geometry, dtype: torch.dtype, state_dtype: torch.dtype, num_rows: int
) -> None:
    """V8 to V11: fewer and more rows than the window, every accept count, three state dtypes.

    Oracle: `gdn_decode` row by row, torch.equal; copies of the pools.
    """
    torch.manual_seed(0)
    driver = GdnDriver(Setup(geometry, dtype=dtype, state_dtype=state_dtype))
    driver.conv_pool[0], driver.state_pool[0] = 0.0, 0.0
    check_verify_and_commit(driver, [1, 3, 70], num_rows, spare_rows=1)


@pytest.mark.parametrize("state_dtype", [FP32, BF16, FP16], ids=str)
def test_random_accepts_are_stepwise_decode(state_dtype: torch.dtype) -> None:
    """V9, V10, C-S10: 512 tokens. Oracle: `gdn_decode` row by row, torch.equal."""
    torch.manual_seed(1)
    check_accepts(GdnDriver(Setup(GEOMETRIES[0], state_dtype=state_dtype)), 512, 4)


def test_a_session_follows_the_recurrence() -> None:
    """V14: Oracle: fp64 recurrence over each request's tokens so far."""
    torch.manual_seed(2)
    check_session(GdnDriver(Setup(GEOMETRIES[0])), KERNEL_FP32_RTOL)


@pytest.mark.parametrize("num_rows", [2, 4, 9])
def test_the_conv_of_a_verify_step_is_that_of_a_prefill(num_rows: int) -> None:
    """V11: fewer and more rows than the window. Oracle: the same rows prefilled."""
    torch.manual_seed(3)
    conv_in, weight = torch.randn(2, num_rows + 3, 10), torch.randn(10, 4)
    rows = causal_conv1d_verify(conv_in[:, 3:], conv_in[:, :3], weight)
    for request in range(2):
        expected = conv_prefill(conv_in[request, 3:], conv_in[request, :3], weight)
        got = torch.stack([row[request] for row in rows])
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_a_compiled_step_copies_no_pool(tmp_path: Path) -> None:
    """E5: the pools are read, and written, in place. Oracle: the profiler's allocations.

    Compiled they also compute what they do uncompiled, up to fp32 rounding.
    """
    torch._dynamo.reset()
    torch.manual_seed(4)
    compiled = [torch.compile(run, fullgraph=True) for run in (gdn_verify, gdn_commit)]
    setup = Setup(GEOMETRIES[0], state_dtype=BF16, verify=compiled[0], commit=compiled[1])
    driver = GdnDriver(setup, num_slots=4096)
    rows, stash = driver.make_rows(9), driver.make_stash(2, 2)
    driver.prefill([(3, rows, 0, 5), (2, rows, 0, 6)])

    def step() -> torch.Tensor:
        out = driver.verify([3, 2], [rows, rows], [5, 6], 2, stash)
        driver.commit([3, 2], [5, 6], [0, 0], stash)
        return out

    assert 0 < largest_allocation(step, tmp_path) < driver.conv_pool.nbytes / 4
    eager = GdnDriver(Setup(GEOMETRIES[0], state_dtype=BF16), num_slots=1)
    for name in ("conv", "a_log", "dt_bias", "norm", "conv_pool", "state_pool"):
        setattr(eager, name, getattr(driver, name))
    other = driver.make_stash(2, 2)
    expected = eager.verify([3, 2], [rows, rows], [5, 6], 2, other)
    torch.testing.assert_close(step(), expected, rtol=KERNEL_FP32_RTOL, atol=1e-5)
    for left, right in zip(stash, other, strict=True):
        torch.testing.assert_close(left, right, rtol=KERNEL_FP32_RTOL, atol=1e-6)
