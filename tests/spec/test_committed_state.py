"""C-S14, V8: each kind of state after a commit is that of so many decode steps, and no other.

Every kind that `committed_states` lists has its check here, by name: a new one fails until it has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.attention.paged import TORCH_PAGED
from engine.cache.pools import CachePools, allocate_pools
from engine.committed_state import CommittedState, committed_states
from engine.loader import load_weights
from engine.model_config import ModelConfig, load_model_config
from engine.models.build import build_model, plan_weights
from engine.models.hybrid import EAGER, HybridModel
from engine.request import SamplingParams
from engine.sampler import SamplingPlan
from engine.sampling_rows import SamplingTable
from engine.slot_tables import SlotTables
from engine.spec_protocol import VerifyChoice, VerifyRows
from engine.token_step import SAMPLED, StepFunctions, TokenStep, choose_tokens, prepare_rows
from engine.verify_step import VerifyFunctions, VerifyStep, prepare_verify_rows
from graphs.kernels.kernel_set import TORCH_KERNELS, TORCH_SAMPLE, SampleKernels
from graphs.rows import NO_DRAFT, Row, pack_rows
from spec.rejection import choose_argmax
from tests.engine.request_trace import save_checkpoint
from tests.tolerances import LOGITS_FP32

NUM_SLOTS = 3
PAGE_SIZE = 8
PAGES_PER_SLOT = 4
NUM_DRAFTS = 3
CPU = torch.device("cpu")
PARAMS = SamplingParams(temperature=0.0, presence_penalty=0.4, repetition_penalty=1.1)


@dataclass
class Bench:
    """A model with slots of its own, and both kinds of steps on them."""

    model: HybridModel
    pools: CachePools
    tables: SlotTables
    table: SamplingTable

    @property
    def states(self) -> tuple[CommittedState, ...]:
        assert self.pools.scratch is not None
        return committed_states(
            self.pools,
            self.pools.scratch,
            self.tables,
            self.table,
            self.model.config.num_k_heads_gdn,
            TORCH_KERNELS.gdn_commit,
        )

    def decode(self, rows: list[Row]) -> list[int]:
        step = TokenStep(
            self.model,
            StepFunctions(EAGER, prepare_rows, choose_tokens, choose_tokens, TORCH_SAMPLE),
            self.tables,
            self.table,
            PAGE_SIZE,
            (SAMPLED,),
        )
        tokens: list[int] = step(
            pack_rows(rows, len(rows), is_pinned=False), SAMPLED
        ).token_ids.tolist()
        return tokens

    def verify(self, rows: list[Row], num_committed: list[int]) -> None:
        """A step of which so many rows are committed, whatever was drafted."""

        def choose(
            logits: Tensor,
            verify_rows: VerifyRows,
            table: SamplingTable,
            plan: SamplingPlan,
            kernels: SampleKernels,
        ) -> VerifyChoice:
            choice = choose_argmax(logits, verify_rows, table, plan, kernels)
            return VerifyChoice(choice.sampled, torch.tensor(num_committed))

        step = VerifyStep(
            self.model,
            VerifyFunctions(EAGER, prepare_verify_rows, choose, choose, TORCH_SAMPLE),
            self.tables,
            self.table,
            self.states,
            page_size=PAGE_SIZE,
            rows_per_request=1 + NUM_DRAFTS,
            prepared=(),
        )
        step(pack_rows(rows, len(rows), is_pinned=False), SAMPLED)


def build(folder: Path, config: ModelConfig) -> Bench:
    pools = allocate_pools(
        config,
        num_pages=NUM_SLOTS * PAGES_PER_SLOT,
        page_size=PAGE_SIZE,
        num_slots=NUM_SLOTS,
        dtype=torch.float32,
        state_dtype=torch.float32,
        device=CPU,
        rows_per_request=1 + NUM_DRAFTS,
    )
    for tensor in (pools.keys, pools.values):
        tensor.zero_()
    model = build_model(config, pools, TORCH_PAGED, TORCH_KERNELS, torch.float32, CPU)
    load_weights(folder, lambda names: plan_weights(model, names), CPU, progress=False)
    table = SamplingTable(NUM_SLOTS, config.vocab_size, CPU)
    for slot in range(1, NUM_SLOTS + 1):
        table.set_row(
            slot, PARAMS, seed=slot, eos_ids=(), prompt_token_ids=[slot], output_token_ids=[]
        )
    bench = Bench(model, pools, SlotTables(NUM_SLOTS, PAGES_PER_SLOT, CPU), table)
    for slot in range(1, NUM_SLOTS + 1):  # each slot holds a first token
        bench.decode([row(slot, 0, 0, slot)])
    return bench


def row(slot: int, position: int, output_index: int, token_id: int = -1) -> Row:
    page = 1 + (slot - 1) * PAGES_PER_SLOT + position // PAGE_SIZE
    return Row(slot, position, page, output_index, token_id)


def check_gdn(seen: Bench, expected: Bench) -> None:
    for left, right in (
        (seen.pools.conv, expected.pools.conv),
        (seen.pools.state, expected.pools.state),
    ):
        torch.testing.assert_close(left[:, 1:], right[:, 1:], atol=LOGITS_FP32, rtol=0)


def check_kv(seen: Bench, expected: Bench) -> None:
    """What a next step may read; what lies beyond is overwritten before."""
    for left, right in (
        (seen.pools.keys, expected.pools.keys),
        (seen.pools.values, expected.pools.values),
    ):
        written = right[:, 1:] != 0
        torch.testing.assert_close(
            left[:, 1:][written], right[:, 1:][written], atol=LOGITS_FP32, rtol=0
        )


def check_pending(seen: Bench, expected: Bench) -> None:
    assert torch.equal(seen.tables.last_tokens[1:], expected.tables.last_tokens[1:])


def check_counts(seen: Bench, expected: Bench) -> None:
    assert torch.equal(seen.table.output_counts[1:], expected.table.output_counts[1:])
    assert int(seen.table.output_counts[1:].sum()) > 0


def check_noise(seen: Bench, expected: Bench) -> None:
    """No state: what a row draws follows from the table's seed and the row's output index."""
    assert torch.equal(seen.table.ints[1:], expected.table.ints[1:])


CHECKS: dict[str, Callable[[Bench, Bench], None]] = {
    "gdn": check_gdn,
    "kv": check_kv,
    "pending token": check_pending,
    "counts": check_counts,
    "noise": check_noise,
}


@pytest.mark.parametrize("num_committed", [(1, 2, 3), (4, 1, 2), (3, 4, 4)])
def test_every_state_holds_the_committed_rows(
    num_committed: tuple[int, ...], tmp_path: Path
) -> None:
    """C-S14, V8. Oracle: decode steps of the same tokens, one at a time.

    Drafts are what decode chooses, so that all of them may be committed; fewer are, and the rest
    must leave no trace.
    """
    save_checkpoint("qwen3_5_text", tmp_path)
    config = load_model_config(tmp_path)
    seen, expected = build(tmp_path, config), build(tmp_path, config)
    assert {state.name for state in seen.states} == CHECKS.keys()
    guide = build(tmp_path, config)
    rows = []
    for slot, count in enumerate(num_committed, start=1):
        chosen = [int(guide.tables.last_tokens[slot])]
        for index in range(NUM_DRAFTS):
            chosen += guide.decode([row(slot, 1 + index, 1 + index)])
        tokens = [-1, *chosen[1:]]
        rows += [row(slot, 1 + i, 1 + i, token) for i, token in enumerate(tokens)]
        for index in range(count):
            expected.decode([row(slot, 1 + index, 1 + index)])
    seen.verify(rows, list(num_committed))
    for state in seen.states:
        CHECKS[state.name](seen, expected)


def test_rows_without_a_draft_leave_no_trace(tmp_path: Path) -> None:
    """C-S2, C-S5: a step of the same rows with none usable is one decode step.

    Oracle: that step.
    """
    save_checkpoint("qwen3_5_text", tmp_path)
    config = load_model_config(tmp_path)
    seen, expected = build(tmp_path, config), build(tmp_path, config)
    slots = range(1, NUM_SLOTS + 1)
    rows = [
        row(slot, 1 + i, 1 + i, -1 if i == 0 else NO_DRAFT)
        for slot in slots
        for i in range(1 + NUM_DRAFTS)
    ]
    seen.verify(rows, [1] * NUM_SLOTS)
    for slot in slots:
        expected.decode([row(slot, 1, 1)])
    for check in CHECKS.values():
        check(seen, expected)
