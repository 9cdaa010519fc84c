"""Noise computed inside kernels, against the reference's integers and float64 logarithms."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from graphs.kernels.sample import reference
from graphs.kernels.sample.noise_kernel import LOWEST_NOISE, LOWEST_UNIFORM
from graphs.kernels.sample.scan_kernel import LIMIT_SCALE
from tests import tolerances
from tests.graphs.kernels.sample_cases import (
    kernel_block_words,
    kernel_noise,
    kernel_words,
    noise_from_words,
)

SEEDS = st.integers(-(2**63), 2**63 - 1)
POSITIONS = st.integers(0, 2**32 - 1)


@pytest.mark.sanitize
def test_words_of_extreme_counters(device: torch.device) -> None:
    """E4: every bit of seeds, positions and ids counts. Oracle: the reference's integers."""
    seeds = torch.tensor([0, -1, 2**63 - 1, -(2**63), 2**32, 7], device=device)
    positions = torch.tensor([0, 2**32 - 1, 2**31, 1, 2**31 - 1, 77], device=device)
    token_ids = torch.tensor([[0, 1, 2**22 - 1, 248319, 2**31 - 1]], device=device)
    expected = reference.token_words(seeds, positions, token_ids)
    assert torch.equal(kernel_words(seeds, positions, token_ids), expected)


# The fixture holds nothing that an example could change.
@settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(rows=st.lists(st.tuples(SEEDS, POSITIONS), min_size=1, max_size=4))
def test_words_are_the_references(rows: list[tuple[int, int]], device: torch.device) -> None:
    """E4: any seed and position. Oracle: the reference's integers, bit for bit."""
    seeds, positions = torch.tensor(rows, device=device).t().contiguous().unbind(0)
    token_ids = torch.arange(0, 248320, 1213, device=device)[None]
    expected = reference.token_words(seeds, positions, token_ids)
    assert torch.equal(kernel_words(seeds, positions, token_ids), expected)


@pytest.mark.sanitize
@pytest.mark.parametrize("first", [0, 64, 248320 - 2048])
@pytest.mark.parametrize("block", [64, 2048])
def test_words_of_tokens_in_a_row(first: int, block: int, device: torch.device) -> None:
    """E4: blocks of the passes over rows. Oracle: the reference's integers, token by token."""
    seeds = torch.tensor([0, -1, 2**40 + 5], device=device)
    positions = torch.tensor([3, 2**32 - 1, 0], device=device)
    token_ids = torch.arange(first, first + block, device=device)[None]
    expected = reference.token_words(seeds, positions, token_ids)
    assert torch.equal(kernel_block_words(seeds, positions, first, block), expected)


def noise_error(noise: Tensor, words: Tensor) -> Tensor:
    """How far noise is from float64 arithmetic on the same uniform values, absolute.

    That is the relative error of the exponential whose logarithm it is.
    """
    uniform = reference.uniform_from_words(words).double()
    return (noise.double() + torch.log(-torch.log1p(-uniform))).abs()


def test_noise_of_every_magnitude(device: torch.device) -> None:
    """E4: words around every power of two, from both ends, 0 and 2^32 - 1 among them.

    Oracle: float64 log and log1p; all noise is finite.
    """
    near = [2**bit + offset for bit in range(32) for offset in range(-3, 4)]
    ends = [word if word >= 0 else 2**32 + word for word in near]
    words = torch.tensor(sorted({*ends, *(2**32 - 1 - word for word in ends)}), device=device)
    assert words[0] == 0 and words[-1] == 2**32 - 1
    noise = noise_from_words(words)
    assert torch.isfinite(noise).all()
    assert noise_error(noise, words).max() < tolerances.KERNEL_FP32_RTOL


def test_bounds_of_noise(device: torch.device) -> None:
    """E4: passes over rows leave out no token that may be the best. Oracle: float64 logarithms."""
    spread = [int(1.001**exponent) for exponent in range(22_180)]
    ends = {0, *spread}
    words = torch.tensor(sorted({*ends, *(2**32 - 1 - word for word in ends)}), device=device)
    assert words[0] == 0 and words[-1] == 2**32 - 1
    noise = noise_from_words(words).double()
    uniform = reference.uniform_from_words(words).double()
    slack = math.log(LIMIT_SCALE.value) / 10
    assert uniform.min() == LOWEST_UNIFORM.value
    assert noise.min() > LOWEST_NOISE.value
    assert (noise <= slack - uniform.log()).all()


def test_noise_of_many_tokens(device: torch.device) -> None:
    """E4: Oracle: float64 arithmetic on the reference's words."""
    seeds = torch.arange(8, device=device)
    token_ids = torch.arange(5000, device=device)[None]
    noise = kernel_noise(seeds, seeds + 3, token_ids)
    words = reference.token_words(seeds, seeds + 3, token_ids)
    assert noise_error(noise, words).max() < tolerances.KERNEL_FP32_RTOL
    expected = reference.gumbel_noise(seeds, seeds + 3, token_ids)
    torch.testing.assert_close(noise, expected, rtol=0, atol=tolerances.KERNEL_FP32_RTOL)
