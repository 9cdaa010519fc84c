"""E5: padded sizes, packed rows and uncaptured families, which the CPU runs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from graphs.family import GraphFamily
from graphs.inputs import Kind
from graphs.rows import LAST_TOKEN, PADDING_ROW, Row, RowField, pack_rows
from graphs.sizes import family_sizes, padded_size

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("max_requests", "sizes"),
    [
        (1, (1,)),
        (2, (1, 2)),
        (5, (1, 2, 4, 5)),
        (8, (1, 2, 4, 8)),
        (20, (1, 2, 4, 8, 16, 20)),
        (64, (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)),
    ],
)
def test_sizes(max_requests: int, sizes: tuple[int, ...]) -> None:
    """E5: 1, 2, 4, then steps of 8, the largest batch included. Oracle: lists by hand."""
    assert family_sizes(max_requests) == sizes


@given(st.integers(1, 300), st.data())
def test_a_batch_gets_the_smallest_size_that_holds_it(
    max_requests: int, data: st.DataObject
) -> None:
    """E5. Oracle: the minimum over all sizes; fewer than 8 rows of padding."""
    num_requests = data.draw(st.integers(1, max_requests))
    sizes = family_sizes(max_requests)
    size = padded_size(sizes, num_requests)
    assert size == min(s for s in sizes if s >= num_requests)
    assert size - num_requests < 8


def test_packed_rows_are_filled_up_with_padding() -> None:
    """E5: every field in its place, zeros behind. Oracle: the rows' own attributes."""
    rows = [Row(slot=3, position=40, page=9, output_index=2), Row(1, 0, 5, 0, token_id=77)]
    packed = pack_rows(rows, 4, is_pinned=False)
    assert packed.shape == (len(RowField), 4) and packed.dtype == torch.int64
    assert packed[RowField.SLOT].tolist() == [3, 1, 0, 0]
    assert packed[RowField.POSITION].tolist() == [40, 0, 0, 0]
    assert packed[RowField.PAGE].tolist() == [9, 5, 0, 0]
    assert packed[RowField.OUTPUT_INDEX].tolist() == [2, 0, 0, 0]
    assert packed[RowField.TOKEN_ID].tolist() == [LAST_TOKEN, 77, 0, 0]
    assert not any(PADDING_ROW.fields())


def make_family(rows_per_request: int) -> tuple[GraphFamily[str, Tensor], list[tuple[int, str]]]:
    calls: list[tuple[int, str]] = []

    def step(rows: Tensor, variant: str) -> Tensor:
        calls.append((rows.shape[1], variant))
        return rows[RowField.POSITION] * 2

    kind = Kind.DECODE if rows_per_request == 1 else Kind.VERIFY
    family = GraphFamily(kind, rows_per_request, (1, 2, 4), ("a", "b"), step, device=CPU)
    return family, calls


@pytest.mark.parametrize("rows_per_request", [1, 4])
def test_uncaptured_steps_are_padded_like_captured_ones(rows_per_request: int) -> None:
    """E5: decode and verify alike. Oracle: what the step was called with, and its outputs."""
    family, calls = make_family(rows_per_request)
    rows = [Row(slot=1 + i // rows_per_request, position=i, page=1, output_index=0)
            for i in range(3 * rows_per_request)]  # fmt: skip
    out = family.run(rows, "b")
    assert calls == [(4 * rows_per_request, "b")]
    assert out[: len(rows)].tolist() == [2 * i for i in range(len(rows))]
    assert not out[len(rows) :].any()


def test_every_size_and_variant_is_compiled_and_none_captured_on_the_cpu() -> None:
    """E5. Oracle: the calls of the step, by hand."""
    family, calls = make_family(1)
    family.compile()
    family.capture()
    assert sorted(calls) == [(n, v) for n in (1, 2, 4) for v in ("a", "b")]
    assert family.num_captured == 0


def test_more_requests_than_planned_are_a_bug() -> None:
    """E5: dispatch never falls back to another shape. Oracle: an assertion."""
    family, _ = make_family(1)
    with pytest.raises(AssertionError, match="at most 4"):
        family.run([PADDING_ROW] * 5, "a")
