"""One decode step from packed rows to chosen tokens, all on the device.

The host sends slots, positions and pages; which tokens the rows hold, the device knows from the
step before. So a step can be launched while the one before it still runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from engine.batch import MIN_TABLE_PAGES
from engine.models.hybrid import ForwardFunctions, HybridModel
from engine.request import MAX_TOP_LOGPROBS
from engine.sampler import SamplingPlan, sample
from engine.sampling_rows import SamplingTable
from engine.slot_tables import SlotTables
from graphs.inputs import ForwardInputs, Kind
from graphs.kernels.kernel_set import SampleKernels
from graphs.rows import RowField

BAD_TOKEN = -1
GREEDY = SamplingPlan(
    is_all_greedy=True,
    has_penalties=False,
    has_bias=False,
    has_min_tokens=False,
    has_truncation=False,
    is_top_k_small=False,
    num_top_logprobs=None,
)
SAMPLED = replace(
    GREEDY,
    is_all_greedy=False,
    has_penalties=True,
    has_bias=True,
    has_min_tokens=True,
    has_truncation=True,
)
SCORED = replace(SAMPLED, num_top_logprobs=MAX_TOP_LOGPROBS)


class Chosen(NamedTuple):
    """What a step chose, on the device.

    token_ids: [T] int64, BAD_TOKEN where a row had no finite logits. num_committed: [R] int64, in
    a verify step: how many rows of each request are committed; what others chose means nothing.
    The rest as in `engine.sampler.Sampled`.
    """

    token_ids: Tensor
    logprobs: Tensor | None
    top_ids: Tensor | None
    top_logprobs: Tensor | None
    num_committed: Tensor | None = None

    def each(self, change: Callable[[Tensor], Tensor]) -> Chosen:
        """The same fields, each that is there changed."""
        return Chosen(
            change(self.token_ids),
            None if self.logprobs is None else change(self.logprobs),
            None if self.top_ids is None else change(self.top_ids),
            None if self.top_logprobs is None else change(self.top_logprobs),
            None if self.num_committed is None else change(self.num_committed),
        )


class PreparedRows(NamedTuple):
    """What a step derives from its packed rows: fields of `ForwardInputs`, and what rows choose.

    output_indexes: [T] int64, index of the output token that each row chooses.
    """

    token_ids: Tensor
    positions: Tensor
    kv_slots: Tensor
    page_table: Tensor
    context_lens: Tensor
    state_slots: Tensor
    output_indexes: Tensor


class StepInputs:
    """Forward inputs of steps of one kind, whose rows are prepared on the device."""

    def __init__(self, kind: Kind, rows_per_request: int, device: torch.device) -> None:
        self._kind, self._rows_per_request = kind, rows_per_request
        # Allocated once: captured steps keep their addresses.
        self._nothing = torch.empty(0, dtype=torch.int64, device=device)
        self._no_chunks = torch.empty(0, 2, dtype=torch.int64, device=device)

    def build(self, prepared: PreparedRows) -> ForwardInputs:
        """The inputs of a forward that gives the logits of all rows."""
        return ForwardInputs(
            kind=self._kind,
            rows_per_request=self._rows_per_request,
            token_ids=prepared.token_ids,
            positions=prepared.positions,
            kv_slots=prepared.kv_slots,
            page_table=prepared.page_table,
            context_lens=prepared.context_lens,
            state_slots=prepared.state_slots,
            logit_rows=None,
            row_starts=self._nothing,
            chunks=self._no_chunks,
            chunk_starts=self._nothing,
        )


PrepareFunction = Callable[[Tensor, Tensor, Tensor, int, int], PreparedRows]
ChooseFunction = Callable[
    [Tensor, SamplingTable, Tensor, Tensor, Tensor, SamplingPlan, SampleKernels], Chosen
]


@dataclass(frozen=True)
class StepFunctions:
    """The regions of a step, each compiled or as it is.

    `choose` chooses by the plans that the decode family prepares, `choose_any` by any plan.
    """

    forward: ForwardFunctions
    prepare: PrepareFunction
    choose: ChooseFunction
    choose_any: ChooseFunction
    kernels: SampleKernels


def prepare_rows(
    rows: Tensor, page_table: Tensor, last_tokens: Tensor, page_size: int, num_pages: int
) -> PreparedRows:
    """Forward inputs of decode rows [fields, R]; notes the page of each row in `page_table`.

    num_pages: how many pages of each request the forward is given.
    """
    slots, positions, pages = (rows[f] for f in (RowField.SLOT, RowField.POSITION, RowField.PAGE))
    token_ids = rows[RowField.TOKEN_ID]
    page_table[slots, positions // page_size] = pages
    return PreparedRows(
        token_ids=torch.where(token_ids < 0, last_tokens[slots], token_ids),
        positions=positions,
        kv_slots=pages * page_size + positions % page_size,
        page_table=page_table[slots, :num_pages],
        context_lens=positions + 1,
        state_slots=slots,
        output_indexes=rows[RowField.OUTPUT_INDEX],
    )


def choose_tokens(
    logits: Tensor,
    table: SamplingTable,
    last_tokens: Tensor,
    slots: Tensor,
    output_indexes: Tensor,
    plan: SamplingPlan,
    kernels: SampleKernels,
) -> Chosen:
    """Choose a token for each row of logits [R, vocab] and note it as its slot's last one."""
    sampled = sample(logits, table, slots, output_indexes, plan, kernels)
    last_tokens[slots] = sampled.token_ids
    if plan.has_penalties:
        table.count_tokens(slots, sampled.token_ids)
    token_ids = torch.where(sampled.is_bad, BAD_TOKEN, sampled.token_ids)
    return Chosen(token_ids, sampled.logprobs, sampled.top_ids, sampled.top_logprobs)


def covering_plan(prepared: Sequence[SamplingPlan], wanted: SamplingPlan) -> SamplingPlan:
    """The first prepared plan that does all that is wanted, or else the wanted one itself."""
    return next((plan for plan in prepared if covers(plan, wanted)), wanted)


def covers(plan: SamplingPlan, wanted: SamplingPlan) -> bool:
    """Whether `plan` gives every row the token that `wanted` gives it, and reports as much."""
    num_top = -1 if plan.num_top_logprobs is None else plan.num_top_logprobs
    return (
        (wanted.is_all_greedy or not plan.is_all_greedy)
        and (plan.has_penalties or not wanted.has_penalties)
        and (plan.has_bias or not wanted.has_bias)
        and (plan.has_min_tokens or not wanted.has_min_tokens)
        and (plan.has_truncation or not wanted.has_truncation)
        and (not plan.is_top_k_small or wanted.is_top_k_small)
        and (wanted.num_top_logprobs is None or num_top >= wanted.num_top_logprobs)
    )


class TokenStep:
    """The `step` of the decode family.

    `prepared`: the plans that functions.choose knows.
    """

    def __init__(
        self,
        model: HybridModel,
        functions: StepFunctions,
        tables: SlotTables,
        sampling: SamplingTable,
        page_size: int,
        prepared: Sequence[SamplingPlan],
    ) -> None:
        self._prepared = frozenset(prepared)
        self._model, self._functions = model, functions
        self._tables, self._sampling, self._page_size = tables, sampling, page_size
        self._inputs = StepInputs(Kind.DECODE, 1, tables.last_tokens.device)

    @torch.inference_mode()
    def __call__(self, rows: Tensor, plan: SamplingPlan) -> Chosen:
        """Packed rows [fields, R] in, the tokens of all of them out."""
        logits, prepared = self.forward(rows)
        functions = self._functions
        choose = functions.choose if plan in self._prepared else functions.choose_any
        return choose(
            logits,
            self._sampling,
            self._tables.last_tokens,
            prepared.state_slots,
            prepared.output_indexes,
            plan,
            functions.kernels,
        )

    @torch.inference_mode()
    def forward(self, rows: Tensor) -> tuple[Tensor, PreparedRows]:
        """The logits [R, vocab] of packed rows [fields, R]."""
        tables = self._tables
        prepared = self._functions.prepare(
            rows,
            tables.page_table,
            tables.last_tokens,
            self._page_size,
            num_table_pages(rows, tables, self._page_size),
        )
        return self._model(self._inputs.build(prepared), self._functions.forward), prepared


def num_table_pages(rows: Tensor, tables: SlotTables, page_size: int) -> int:
    """How many pages of each request a step is given.

    All pages on CUDA: shapes must not follow the rows. On the CPU, those in use.
    """
    width = tables.page_table.shape[1]
    if rows.device.type != "cpu":
        return width
    last_page = int(rows[RowField.POSITION].max()) // page_size
    return min(max(last_page + 1, MIN_TABLE_PAGES), width)
