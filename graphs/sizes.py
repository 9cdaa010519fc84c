"""The batch sizes that a graph family has a graph for."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

SMALL_SIZES = (1, 2, 4)
SIZE_STEP = 8


def family_sizes(max_requests: int) -> tuple[int, ...]:
    """1, 2, 4, 8, 16, 24, ... in steps of 8, and max_requests itself, ascending."""
    assert max_requests > 0
    below = [size for size in SMALL_SIZES if size < max_requests]
    return (*below, *range(SIZE_STEP, max_requests, SIZE_STEP), max_requests)


def padded_size(sizes: Sequence[int], num_requests: int) -> int:
    """The smallest of the ascending sizes that holds num_requests."""
    assert 0 < num_requests <= sizes[-1], f"{num_requests} requests, at most {sizes[-1]}"
    return sizes[bisect_left(sizes, num_requests)]
