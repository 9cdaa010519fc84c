"""E2: the tables that prefill kernels walk."""

from __future__ import annotations

import pytest

from engine.batch import build_chunks
from graphs.inputs import CHUNK_ROWS
from graphs.kernels.attention import ops as attention_ops
from graphs.kernels.gdn import prefill as gdn_prefill
from graphs.kernels.gdn import reference as gdn_reference


@pytest.mark.parametrize(
    ("row_starts", "chunks", "chunk_starts"),
    [
        ([0, 64, 129], [[0, 0], [1, 64], [1, 128]], [0, 1, 3]),
        ([0, 1, 1, 66], [[0, 0], [2, 1], [2, 65]], [0, 1, 1, 3]),
        # Filled up to two with chunks that hold no rows.
        ([0, 3, 3], [[0, 0], [1, 3]], [0, 1, 1]),
        ([0, 0], [[0, 0], [0, 0]], [0, 0]),
    ],
)
def test_chunks(row_starts: list[int], chunks: list[list[int]], chunk_starts: list[int]) -> None:
    """E2: no chunk spans requests; requests without rows have none. Oracle: tables by hand."""
    assert build_chunks(row_starts) == (chunks, chunk_starts)


def test_everyone_means_the_same_by_a_chunk() -> None:
    """E2: the host's table against what each kernel assumes. Oracle: CHUNK_ROWS."""
    sizes = {CHUNK_ROWS, attention_ops.CHUNK, gdn_prefill.CHUNK, gdn_reference.CHUNK}
    assert sizes == {64}
