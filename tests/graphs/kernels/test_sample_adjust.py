"""Penalties, bias and mask on the GPU, against the reference: equal, not close."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from graphs.kernels.sample import reference
from graphs.kernels.sample.ops import adjust_logits
from graphs.kernels.sample.rows import RowParams, SlotAdjustments
from tests.graphs.kernels.sample_cases import neutral_rows

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    # The interpreter's arithmetic on bad rows.
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
]

SIZES = [1, 63, 65, pytest.param(500, marks=pytest.mark.sanitize), 3001]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
INFINITY = float("inf")
NUM_SLOTS = 9
EVERYTHING = {"has_penalties": True, "has_bias": True, "has_min_tokens": True}


def random_tables(vocab_size: int, device: torch.device) -> SlotAdjustments:
    """Biases and masks of some slots, counts of all; unused entries as the engine leaves them."""
    generator = torch.Generator().manual_seed(vocab_size)
    num_biases, num_masked = 40, 21
    bias_ids = torch.arange(num_biases).remainder(vocab_size).repeat(NUM_SLOTS, 1)
    bias_values = torch.zeros(NUM_SLOTS, num_biases)
    masked_ids = torch.full((NUM_SLOTS, num_masked), -1)
    for slot in range(1, NUM_SLOTS):
        ids = torch.randperm(vocab_size, generator=generator)[: 5 * slot]
        bias_ids[slot, : len(ids)] = ids
        bias_values[slot, : len(ids)] = torch.randn(len(ids), generator=generator) * 9
        # A masked id may come twice, and be biased as well.
        ids = torch.randint(vocab_size, (2 * slot,), generator=generator)
        masked_ids[slot, : len(ids)] = ids
        masked_ids[slot, 2 * slot] = ids[0]
    shape = (NUM_SLOTS, vocab_size)
    counts = torch.randint(-3, 4, shape, generator=generator).clamp(min=0).int()
    in_prompt = torch.rand(shape, generator=generator) < 0.3
    return SlotAdjustments(
        *(value.to(device) for value in (bias_ids, bias_values, masked_ids, counts, in_prompt))
    )


def random_rows(num_rows: int, vocab_size: int, device: torch.device) -> RowParams:
    """Each parameter neutral in some rows."""
    generator = torch.Generator().manual_seed(num_rows)
    numbers = torch.rand(4, num_rows, generator=generator).to(device)
    rows = neutral_rows(num_rows, vocab_size, device)
    is_on = [torch.arange(num_rows, device=device) % step != 0 for step in (2, 3, 4, 5)]
    return rows._replace(
        temperature=torch.where(is_on[3], 0.1 + numbers[0], 1.0),
        presence_penalty=torch.where(is_on[0], 2 * numbers[1] - 1, 0.0),
        frequency_penalty=torch.where(is_on[1], 2 * numbers[2] - 1, 0.0),
        repetition_penalty=torch.where(is_on[2], 0.5 + numbers[3], 1.0),
        min_tokens=torch.arange(num_rows, device=device) % 3,
    )


def random_logits(
    num_rows: int, vocab_size: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    generator = torch.Generator().manual_seed(vocab_size + 1)
    return (torch.randn(num_rows, vocab_size, generator=generator) * 6).to(device, dtype)


def check(logits: Tensor, rows: RowParams, tables: SlotAdjustments, **uses: bool) -> Tensor:
    """The op's scores, which must be the reference's in rows that are not bad."""
    num_rows = len(logits)
    slots = torch.arange(num_rows, device=logits.device) * 4 % NUM_SLOTS
    positions = torch.ones_like(slots)
    scaled, is_bad = adjust_logits(logits, slots, positions, rows, tables, **uses)
    expected, expected_bad = reference.adjust_logits(logits, slots, positions, rows, tables, **uses)
    assert scaled.dtype == torch.float32 and is_bad.dtype == torch.bool
    assert torch.equal(is_bad, expected_bad)
    assert torch.equal(scaled[~is_bad], expected[~is_bad])
    return scaled


@pytest.mark.parametrize("vocab_size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_everything_at_once(vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
    """E4: all mixes of parameters. Oracle: the reference, bit for bit."""
    logits = random_logits(12, vocab_size, dtype, device)
    check(
        logits, random_rows(12, vocab_size, device), random_tables(vocab_size, device), **EVERYTHING
    )


@pytest.mark.parametrize("use", [None, *EVERYTHING])
def test_each_alone(use: str | None, device: torch.device) -> None:
    """E4: what is not planned changes nothing. Oracle: the reference."""
    uses = {name: name == use for name in EVERYTHING}
    tables, rows = random_tables(500, device), random_rows(9, 500, device)
    logits = random_logits(9, 500, torch.bfloat16, device)
    scaled = check(logits, rows, tables, **uses)
    plain = (logits.float() - logits.float().amax(-1, keepdim=True)) / rows.temperature[:, None]
    assert torch.equal(scaled, plain) is (use is None)


def test_neutral_rows_keep_their_bits(device: torch.device) -> None:
    """E4: whatever the counts of their slots are. Oracle: the logits less their maximum."""
    logits = random_logits(5, 501, torch.float32, device)
    tables = random_tables(501, device)._replace(
        output_counts=torch.full((NUM_SLOTS, 501), 2**30, dtype=torch.int32, device=device),
        bias_values=torch.zeros(NUM_SLOTS, 40, device=device),
    )
    scaled = check(logits, neutral_rows(5, 501, device), tables, **EVERYTHING)
    assert torch.equal(scaled, logits - logits.amax(-1, keepdim=True))


def test_peaks_that_move(device: torch.device) -> None:
    """E4: bias makes the peak, takes it away, and the mask hides it. Oracle: by hand."""
    logits = torch.zeros(3, 300, device=device)
    logits[:, 200] = 5.0
    tables = random_tables(300, device)
    tables.bias_values.zero_()
    tables.masked_ids.fill_(-1)
    tables.bias_ids[0, 0], tables.bias_values[0, 0] = 7, 9.0
    tables.bias_ids[4, 3], tables.bias_values[4, 3] = 200, -100.0
    tables.masked_ids[8, 2] = 200
    rows = neutral_rows(3, 300, device)
    rows = rows._replace(min_tokens=torch.full_like(rows.min_tokens, 2))
    scaled = check(logits, rows, tables, **EVERYTHING)
    assert scaled[0, 7] == 0.0 and scaled[0, 200] == -4.0 and scaled[0, 0] == -9.0
    assert scaled[1, 200] == -95.0 and scaled[1, 0] == 0.0
    assert scaled[2, 200] == -INFINITY and scaled[2, 299] == 0.0


@pytest.mark.parametrize("vocab_size", [5, 3001])
def test_bad_rows_are_the_references(vocab_size: int, device: torch.device) -> None:
    """E4: NaN, +inf, -inf, at one place or everywhere, masked places too; every token masked.

    Oracle: the reference.
    """
    logits = random_logits(9, vocab_size, torch.float32, device)
    tables, rows = random_tables(vocab_size, device), random_rows(9, vocab_size, device)
    tables.masked_ids[8, :6] = torch.tensor([0, 1, 2, 3, 4, 4], device=device)
    rows.min_tokens[:] = 9
    for row, value in enumerate([torch.nan, INFINITY, -INFINITY]):
        logits[row] = value
        logits[3 + row, -1] = value
        logits[6 + row, tables.masked_ids[(6 + row) * 4 % NUM_SLOTS, 0].clamp(min=0)] = value
    check(logits, rows, tables, **EVERYTHING)


def test_a_row_does_not_depend_on_the_batch(device: torch.device) -> None:
    """E4: Oracle: every row alone, from strided memory; no rows give no scores."""
    logits = random_logits(4, 501, torch.bfloat16, device)
    tables, rows = random_tables(501, device), random_rows(4, 501, device)
    slots, positions = (
        torch.tensor([5, 2, 8, 2], device=device),
        torch.tensor([0, 1, 2, 0], device=device),
    )
    together, _ = adjust_logits(logits, slots, positions, rows, tables, **EVERYTHING)
    for row in range(4):
        wide = torch.stack([logits[row], torch.full_like(logits[row], torch.nan)], 1).t()[:1]
        # Columns of a table, as the parameters of rows may be.
        part = RowParams(*(torch.stack([value, value], 1)[row : row + 1, 0] for value in rows))
        here = slice(row, row + 1)
        alone, _ = adjust_logits(wide, slots[here], positions[here], part, tables, **EVERYTHING)
        assert torch.equal(alone, together[here])
    none = neutral_rows(0, 501, device)
    scaled, is_bad = adjust_logits(logits[:0], slots[:0], slots[:0], none, tables, **EVERYTHING)
    assert scaled.shape == (0, 501) and is_bad.shape == (0,)


def random_drafts(num_rows: int, vocab_size: int, device: torch.device) -> Tensor:
    """Row tokens of few kinds, so that drafts repeat; some rows have none."""
    generator = torch.Generator().manual_seed(num_rows)
    tokens = torch.randint(min(vocab_size, 3), (num_rows,), generator=generator)
    tokens[torch.rand(num_rows, generator=generator) < 0.2] = -2
    tokens[-1] = vocab_size - 1
    return tokens.to(device)


def check_drafts(
    logits: Tensor, row_tokens: Tensor, rows: RowParams, tables: SlotAdjustments, rows_each: int
) -> Tensor:
    """Scores of requests of `rows_each` rows, which are the reference's."""
    slots = torch.arange(len(logits), device=logits.device) // rows_each * 4 % NUM_SLOTS
    positions = torch.arange(len(logits), device=logits.device) % 3
    arguments = (logits, slots, positions, rows, tables)
    verify = {"row_tokens": row_tokens, "rows_per_request": rows_each}
    scaled, is_bad = adjust_logits(*arguments, **EVERYTHING, **verify)
    expected, expected_bad = reference.adjust_logits(*arguments, **EVERYTHING, **verify)
    assert torch.equal(is_bad, expected_bad)
    assert torch.equal(scaled[~is_bad], expected[~is_bad])
    return scaled


@pytest.mark.parametrize("rows_each", [1, 2, 4, 8])
@pytest.mark.parametrize("vocab_size", [1, 65, 500])
def test_drafts_count_as_generated(vocab_size: int, rows_each: int, device: torch.device) -> None:
    """V6, C-E3: a row's penalties see its request's drafts up to it. Oracle: the reference."""
    num_rows = 2 * rows_each
    logits = random_logits(num_rows, vocab_size, torch.bfloat16, device)
    rows, tables = random_rows(num_rows, vocab_size, device), random_tables(vocab_size, device)
    check_drafts(
        logits, random_drafts(num_rows, vocab_size, device), rows, tables, rows_each=rows_each
    )


@pytest.mark.parametrize("adjust", [adjust_logits, reference.adjust_logits])
def test_counted_drafts_are_those_of_one_row_after_another(
    adjust: Callable[..., tuple[Tensor, Tensor]], device: torch.device
) -> None:
    """V6, C-E3: two requests of four rows, repeating drafts. Oracle: each row alone, its drafts
    counted in the table; the request's first row is there already.
    """
    drafts = torch.tensor([[9, 2, 2, 2], [2, 4, -2, 4]], device=device)
    logits = random_logits(8, 65, torch.float32, device)
    rows, tables = random_rows(8, 65, device), random_tables(65, device)
    rows.frequency_penalty[:] = 1.5
    slots = torch.tensor([1, 1, 1, 1, 2, 2, 2, 2], device=device)
    positions = torch.zeros_like(slots)
    together, _ = adjust(
        logits,
        slots,
        positions,
        rows,
        tables,
        **EVERYTHING,
        row_tokens=drafts.flatten(),
        rows_per_request=4,
    )
    for row in range(8):
        counts = tables.output_counts.clone()
        for token_id in drafts[row // 4, 1 : row % 4 + 1].tolist():
            if token_id >= 0:
                counts[slots[row], token_id] += 1
        here = slice(row, row + 1)
        alone, _ = adjust(
            logits[here],
            slots[here],
            positions[here],
            RowParams(*(value[here] for value in rows)),
            tables._replace(output_counts=counts),
            **EVERYTHING,
        )
        assert torch.equal(alone, together[here])


@pytest.mark.gpu
def test_verify_rows_of_whole_vocabularies() -> None:
    """V6: 64 requests of 4 rows, a real vocabulary. Oracle: the reference, bit for bit."""
    device = torch.device("cuda")
    tables = random_tables(248320, device)
    for rows_each in (4, 8):
        check_drafts(
            random_logits(256, 248320, torch.bfloat16, device),
            random_drafts(256, 248320, device),
            random_rows(256, 248320, device),
            tables,
            rows_each,
        )


@pytest.mark.gpu
def test_whole_vocabularies() -> None:
    """E4: 64 rows of a real vocabulary. Oracle: the reference, bit for bit."""
    device = torch.device("cuda")
    logits = random_logits(64, 248320, torch.bfloat16, device)
    check(logits, random_rows(64, 248320, device), random_tables(248320, device), **EVERYTHING)
