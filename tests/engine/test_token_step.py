"""E5, E4: what a decode step derives from its packed rows, and which plans cover which."""

from __future__ import annotations

from dataclasses import fields, replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.sampler import SamplingPlan
from engine.sampling_rows import SamplingTable
from engine.slot_tables import SlotTables
from engine.token_step import (
    BAD_TOKEN,
    GREEDY,
    SAMPLED,
    SCORED,
    choose_tokens,
    covering_plan,
    prepare_rows,
)
from graphs.kernels.kernel_set import TORCH_SAMPLE
from graphs.rows import Row, pack_rows

CPU = torch.device("cpu")
PAGE_SIZE = 8

plans = st.builds(
    SamplingPlan,
    is_all_greedy=st.booleans(),
    has_penalties=st.booleans(),
    has_bias=st.booleans(),
    has_min_tokens=st.booleans(),
    has_truncation=st.booleans(),
    is_top_k_small=st.booleans(),
    num_top_logprobs=st.sampled_from([None, 0, 20]),
)


def test_rows_become_forward_inputs() -> None:
    """E5: tokens from the host and from the device, pages, lengths, padding.

    Oracle: the numbers by hand.
    """
    tables = SlotTables(4, 6, CPU)
    tables.page_table[2] = torch.tensor([7, 8, 0, 0, 0, 0])
    tables.last_tokens[:] = torch.tensor([0, 11, 22, 33, 44])
    rows = [
        Row(slot=2, position=16, page=9, output_index=5),
        Row(slot=4, position=3, page=1, output_index=0, token_id=99),
    ]
    packed = pack_rows(rows, 3, is_pinned=False)
    got = prepare_rows(packed, tables.page_table, tables.last_tokens, PAGE_SIZE, 4)
    assert got.token_ids.tolist() == [22, 99, 0]
    assert got.positions.tolist() == [16, 3, 0]
    assert got.kv_slots.tolist() == [9 * PAGE_SIZE, PAGE_SIZE + 3, 0]
    assert got.page_table.tolist() == [[7, 8, 9, 0], [1, 0, 0, 0], [0, 0, 0, 0]]
    assert got.context_lens.tolist() == [17, 4, 1]
    assert got.state_slots.tolist() == [2, 4, 0]
    assert got.output_indexes.tolist() == [5, 0, 0]
    assert tables.page_table[2, 2] == 9, "the next step of the slot reads this page"


def test_a_chosen_token_is_the_next_ones_input() -> None:
    """E5, E4: greedy tokens are noted per slot; bad logits give no token. Oracle: argmax."""
    tables, table = SlotTables(3, 1, CPU), SamplingTable(3, 5, CPU)
    logits = torch.tensor([[0.0, 1.0, 9.0, 2.0, 3.0], [torch.nan, 1, 2, 3, 4], [5.0, 1, 2, 3, 4]])
    slots = torch.tensor([3, 1, 2])
    chosen = choose_tokens(
        logits, table, tables.last_tokens, slots, torch.zeros(3).long(), GREEDY, TORCH_SAMPLE
    )
    assert chosen.token_ids.tolist() == [2, BAD_TOKEN, 0]
    assert tables.last_tokens.tolist() == [0, 0, 0, 2]
    assert chosen.logprobs is None


def test_only_a_plan_with_penalties_counts() -> None:
    """E4: counts on the device after a step, padding rows left out. Oracle: counts by hand."""
    for plan in (GREEDY, replace(GREEDY, has_penalties=True)):
        tables, table = SlotTables(2, 1, CPU), SamplingTable(2, 4, CPU)
        logits = torch.tensor([[0.0, 1.0, 9.0, 2.0], [0.0, 1.0, 0.0, 0.0]])
        for _ in range(2):
            choose_tokens(
                logits,
                table,
                tables.last_tokens,
                torch.tensor([2, 0]),
                torch.zeros(2).long(),
                plan,
                TORCH_SAMPLE,
            )
        assert table.output_counts[2].tolist() == [0, 0, 2 * plan.has_penalties, 0]
        assert not table.output_counts[:2].any()


@given(plans)
def test_prepared_plans_cover_what_they_do(wanted: SamplingPlan) -> None:
    """E4, E5: the three captured plans serve any batch but one whose rows all have a small top_k
    in a plan that is bound to it. Oracle: the definition of each flag."""
    plan = covering_plan((GREEDY, SAMPLED, SCORED), wanted)
    for field in fields(SamplingPlan):
        given, needed = getattr(plan, field.name), getattr(wanted, field.name)
        if field.name == "is_all_greedy" or field.name == "is_top_k_small":
            assert not given or needed
        elif field.name == "num_top_logprobs":
            assert needed is None or (given is not None and given >= needed)
        else:
            assert given or not needed
    assert plan in (GREEDY, SAMPLED, SCORED)
    is_plain = wanted == replace(GREEDY, is_top_k_small=wanted.is_top_k_small)
    assert (plan == GREEDY) is is_plain
