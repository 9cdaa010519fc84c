"""The best token of each row, against torch."""

from __future__ import annotations

import pytest
import torch

from graphs.kernels.sample import configs, reference
from graphs.kernels.sample.ops import argmax

pytestmark = pytest.mark.usefixtures("poisoned_memory")

SIZES = [1, 63, 65, pytest.param(500, marks=pytest.mark.sanitize), 5003]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
INFINITY = float("inf")


@pytest.mark.parametrize("vocab_size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "num_programs"), [(1, 2048), (3, 2048), (3, 4)])
def test_the_first_of_the_best(
    num_rows: int,
    num_programs: int,
    vocab_size: int,
    dtype: torch.dtype,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """E4: few distinct values, so that the best comes often, in one block or many of a program.

    Oracle: torch's argmax.
    """
    monkeypatch.setattr(configs, "ARGMAX_PROGRAMS", num_programs)
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randint(-9, 0, (num_rows, vocab_size), generator=generator).to(device, dtype)
    token_ids, is_bad = argmax(logits)
    assert token_ids.dtype == torch.int64 and is_bad.dtype == torch.bool
    assert torch.equal(token_ids, logits.float().argmax(-1))
    assert not is_bad.any()


@pytest.mark.parametrize("place", [0, 2047, 2048, 5002])
def test_one_best_token_anywhere(place: int, device: torch.device) -> None:
    """E4: at the ends of blocks, after equal zeros of both signs. Oracle: its place."""
    logits = torch.zeros(2, 5003, device=device)
    logits[:, 1::2] = -0.0
    assert argmax(logits)[0].tolist() == [0, 0]
    logits[1, place] = 1e-30
    assert argmax(logits)[0].tolist() == [0, place]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [5, 5003])
def test_bad_rows_are_the_references(
    vocab_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    """E4: NaN, +inf, -inf, at one place or everywhere. Oracle: the reference."""
    logits = torch.randn(8, vocab_size, generator=torch.Generator().manual_seed(1))
    for row, value in enumerate([torch.nan, INFINITY, -INFINITY]):
        logits[row] = value
        logits[4 + row, -1] = value
    logits = logits.to(device, dtype)
    token_ids, is_bad = argmax(logits)
    expected_ids, expected_bad = reference.argmax(logits)
    assert torch.equal(is_bad, expected_bad) and torch.equal(token_ids, expected_ids)
    assert is_bad.tolist() == [True, True, True, False, True, True, False, False]


def test_a_row_does_not_depend_on_the_batch(device: torch.device) -> None:
    """E4: Oracle: every row alone, from strided memory; no rows give no tokens."""
    logits = torch.randn(4, 501, generator=torch.Generator().manual_seed(2)).to(device)
    token_ids, _ = argmax(logits)
    for row in range(4):
        wide = torch.stack([logits[row], torch.full_like(logits[row], torch.nan)], 1)
        assert argmax(wide.t()[:1])[0] == token_ids[row]
    assert argmax(logits[:0])[0].shape == (0,)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 2, 16, 64, 200])
def test_whole_vocabularies(num_rows: int) -> None:
    """E4: bf16 logits of a real vocabulary, with ties. Oracle: the reference."""
    logits = torch.randn(num_rows, 248320, device="cuda").mul_(3).bfloat16()
    token_ids, is_bad = argmax(logits)
    expected_ids, expected_bad = reference.argmax(logits)
    assert torch.equal(token_ids, expected_ids) and torch.equal(is_bad, expected_bad)
