"""The per-slot sampling tables: what a row holds after set_row."""

from __future__ import annotations

import pytest
import torch

from engine.request import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, SamplingParams
from engine.sampling_rows import (
    MAX_EOS_TOKEN_IDS,
    PADDING_SLOT,
    SamplingTable,
    sampling_bytes_per_slot,
)

CPU = torch.device("cpu")
PENALISED = SamplingParams(presence_penalty=0.5)


def set_row(
    table: SamplingTable,
    slot: int,
    params: SamplingParams,
    *,
    seed: int = 0,
    eos_ids: tuple[int, ...] = (),
    prompt: tuple[int, ...] = (),
    output: tuple[int, ...] = (),
) -> None:
    table.set_row(
        slot,
        params,
        seed=seed,
        eos_ids=eos_ids,
        prompt_token_ids=prompt,
        output_token_ids=output,
    )


def read_row(table: SamplingTable, slot: int) -> dict[str, float]:
    rows = table.gather(torch.tensor([slot]))
    return {name: value.item() for name, value in rows._asdict().items()}


NEUTRAL = {
    "temperature": 1.0,
    "top_p": 1.0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "top_k": 40,
    "seed": 0,
    "min_tokens": 0,
    "is_greedy": True,
}


def test_parameters_reach_the_rows_of_their_slot() -> None:
    """E4: Oracle: the parameters given; other slots and the padding slot stay neutral."""
    table = SamplingTable(3, 40, CPU)
    params = SamplingParams(
        temperature=0.5,
        top_p=0.75,
        min_p=0.25,
        top_k=7,
        presence_penalty=1.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.25,
        min_tokens=4,
    )
    set_row(table, 2, params, seed=99)
    assert read_row(table, 2) == {
        "temperature": 0.5,
        "top_p": 0.75,
        "min_p": 0.25,
        "presence_penalty": 1.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.25,
        "top_k": 7,
        "seed": 99,
        "min_tokens": 4,
        "is_greedy": False,
    }
    for slot in (PADDING_SLOT, 1, 3):
        assert read_row(table, slot) == NEUTRAL


def test_a_greedy_row_is_never_truncated() -> None:
    """E4: Oracle: temperature 0 chooses the best token whatever the filters say."""
    table = SamplingTable(1, 40, CPU)
    set_row(table, 1, SamplingParams(temperature=0.0, top_k=3, top_p=0.1, min_p=0.9))
    assert read_row(table, 1) == NEUTRAL


@pytest.mark.parametrize("top_k", [-1, 0, 41, 2**31 - 1])
def test_top_k_off_means_the_whole_vocabulary(top_k: int) -> None:
    """E4: Oracle: the documented values that turn top_k off, and any beyond the vocabulary."""
    table = SamplingTable(1, 40, CPU)
    set_row(table, 1, SamplingParams(top_k=top_k))
    assert read_row(table, 1)["top_k"] == 40


@pytest.mark.parametrize(
    ("seed", "stored"), [(-1, -1), (2**64 - 1, -1), (2**63, -(2**63)), (-(2**63), -(2**63))]
)
def test_every_seed_keeps_its_64_bits(seed: int, stored: int) -> None:
    """E4: Oracle: two's complement."""
    table = SamplingTable(1, 40, CPU)
    set_row(table, 1, SamplingParams(), seed=seed)
    assert read_row(table, 1)["seed"] == stored


def test_extreme_but_legal_penalties_stay_usable() -> None:
    """E4: Oracle: the least repetition penalty float64 allows is 0 in float32."""
    table = SamplingTable(1, 40, CPU)
    set_row(table, 1, SamplingParams(repetition_penalty=1e-300))
    assert 0 < read_row(table, 1)["repetition_penalty"] < 1e-5


def test_a_shorter_bias_leaves_nothing_of_a_longer_one() -> None:
    """E4: Oracle: the second request's bias alone, as a dense vector."""
    table = SamplingTable(1, 2000, CPU)
    longest = dict.fromkeys(range(MAX_LOGIT_BIAS), 1.0)
    set_row(table, 1, SamplingParams(logit_bias=longest))
    dense = torch.zeros(2000).scatter_add(0, table.bias_ids[1], table.bias_values[1])
    assert dense.sum() == MAX_LOGIT_BIAS
    set_row(table, 1, SamplingParams(logit_bias={1999: -100.0, 3: 0.5}))
    dense = torch.zeros(2000).scatter_add(0, table.bias_ids[1], table.bias_values[1])
    assert dense.nonzero().flatten().tolist() == [3, 1999]
    assert dense[[3, 1999]].tolist() == [0.5, -100.0]


def test_masked_ids_are_stop_ids_and_eos_ids() -> None:
    """E4: Oracle: the ids given; EOS ends nothing under ignore_eos, so it is not masked."""
    table = SamplingTable(2, 400, CPU)
    stops = list(range(MAX_STOP_TOKEN_IDS))
    eos_ids = tuple(range(100, 100 + MAX_EOS_TOKEN_IDS))
    set_row(table, 1, SamplingParams(stop_token_ids=stops), eos_ids=eos_ids)
    assert set(table.masked_ids[1].tolist()) == {*stops, *eos_ids}
    set_row(table, 2, SamplingParams(stop_token_ids=[7], ignore_eos=True), eos_ids=eos_ids)
    assert set(table.masked_ids[2].tolist()) == {7, -1}


def test_too_many_eos_ids_are_a_user_error() -> None:
    """E4: Oracle: ValueError that names the field."""
    table = SamplingTable(1, 400, CPU)
    with pytest.raises(ValueError, match="eos_token_id"):
        set_row(table, 1, SamplingParams(), eos_ids=tuple(range(MAX_EOS_TOKEN_IDS + 1)))


def test_resuming_restores_what_was_counted() -> None:
    """E4: Oracle: the table that counted the same tokens step by step."""
    prompt, output = (1, 5, 5, 9), (2, 5, 2, 2)
    stepwise, resumed = SamplingTable(2, 10, CPU), SamplingTable(2, 10, CPU)
    set_row(stepwise, 1, PENALISED, prompt=prompt)
    for token_id in output:
        stepwise.count_tokens(torch.tensor([1]), torch.tensor([token_id]))
    set_row(resumed, 1, PENALISED, prompt=(3,), output=(3, 3))
    set_row(resumed, 1, PENALISED, prompt=prompt, output=output)
    assert resumed.output_counts[1].tolist() == [0, 0, 3, 0, 0, 1, 0, 0, 0, 0]
    assert torch.equal(stepwise.output_counts, resumed.output_counts)
    assert torch.equal(stepwise.in_prompt, resumed.in_prompt)
    assert resumed.in_prompt[1].nonzero().flatten().tolist() == [1, 5, 9]


def test_counting_takes_repeats_and_drops_padding() -> None:
    """V6: one step may commit several tokens of a slot. Oracle: a plain count."""
    table = SamplingTable(2, 10, CPU)
    slots = torch.tensor([1, 2, 1, 0, 1, 0])
    table.count_tokens(slots, torch.tensor([4, 4, 4, 4, 7, 0]))
    expected = torch.zeros(3, 10, dtype=torch.int32)
    expected[1, 4], expected[1, 7], expected[2, 4] = 2, 1, 1
    assert torch.equal(table.output_counts, expected)


def test_tables_keep_their_addresses() -> None:
    """E4: captured graphs read the tables in place. Oracle: data pointers before and after."""
    table = SamplingTable(2, 10, CPU)
    tensors = [table.floats, table.ints, table.bias_ids, table.bias_values, table.masked_ids]
    tensors += [table.output_counts, table.in_prompt]
    before = [tensor.data_ptr() for tensor in tensors]
    set_row(table, 1, PENALISED, prompt=(1,), output=(2,))
    table.count_tokens(torch.tensor([1]), torch.tensor([3]))
    tensors = [table.floats, table.ints, table.bias_ids, table.bias_values, table.masked_ids]
    tensors += [table.output_counts, table.in_prompt]
    assert [tensor.data_ptr() for tensor in tensors] == before


@pytest.mark.parametrize("vocab_size", [10, 8192])
def test_bytes_per_slot_are_the_real_ones(vocab_size: int) -> None:
    """V15: Oracle: the bytes of the allocated tensors."""
    table = SamplingTable(3, vocab_size, CPU)
    tensors = [table.floats, table.ints, table.bias_ids, table.bias_values, table.masked_ids]
    tensors += [table.output_counts, table.in_prompt]
    assert sum(tensor.nbytes for tensor in tensors) == 4 * sampling_bytes_per_slot(vocab_size)
