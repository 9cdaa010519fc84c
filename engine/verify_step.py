"""One verify step from packed rows to committed tokens, all on the device.

The rows of a request are its pending token and its drafts, in order. All of them are scored in
one forward that only reads the live GDN state; then drafts are accepted, and the state of every
request is advanced by what is committed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.cache.pools import PADDING_INDEX
from engine.committed_state import CommittedRows, CommittedState
from engine.models.hybrid import ForwardFunctions, HybridModel
from engine.sampler import SamplingPlan
from engine.sampling_rows import SamplingTable
from engine.slot_tables import SlotTables
from engine.spec_protocol import DraftRows, VerifyChoice, VerifyRows
from engine.token_step import BAD_TOKEN, Chosen, PreparedRows, StepInputs, num_table_pages
from graphs.inputs import ForwardInputs, Kind
from graphs.kernels.kernel_set import SampleKernels
from graphs.rows import DEVICE_DRAFT, LAST_TOKEN, RowField

ChooseVerified = Callable[
    [Tensor, VerifyRows, SamplingTable, SamplingPlan, SampleKernels], VerifyChoice
]
TakeFeatures = Callable[[Tensor, ForwardInputs, Tensor], None]


class DeviceDrafts(Protocol):
    """Who makes drafts within the step; see `SpecRuntime`."""

    def draft(self, rows: DraftRows) -> Tensor: ...

    def take_choice(self, slots: Tensor, choice: VerifyChoice) -> None: ...


class PreparedVerify(NamedTuple):
    """What a verify step derives from its packed rows, of T rows of R requests.

    `rows` as in a decode step, the packed `slots` [T], `drafts` [R, k + 1] as in
    `VerifyRows.token_ids`, and `first_positions` [R] of each request's first row.
    """

    rows: PreparedRows
    slots: Tensor
    drafts: Tensor
    first_positions: Tensor


PrepareVerify = Callable[[Tensor, Tensor, Tensor, int, int, int], PreparedVerify]


@dataclass(frozen=True)
class VerifyFunctions:
    """The regions of a verify step, each compiled or as it is; see `StepFunctions`."""

    forward: ForwardFunctions
    prepare: PrepareVerify
    choose: ChooseVerified
    choose_any: ChooseVerified
    kernels: SampleKernels


def prepare_verify_rows(
    rows: Tensor,
    page_table: Tensor,
    last_tokens: Tensor,
    page_size: int,
    num_pages: int,
    rows_per_request: int,
) -> PreparedVerify:
    """Forward inputs of packed rows [fields, R * rows_per_request]; notes rows' pages.

    num_pages: how many pages of each request the forward is given. Rows without a draft are scored
    with the pending token: they must give something finite, and nothing reads it.
    """
    slots, positions, pages = (rows[f] for f in (RowField.SLOT, RowField.POSITION, RowField.PAGE))
    page_table[slots, positions // page_size] = pages
    given = rows[RowField.TOKEN_ID]
    # Rows of padding are spread over the padding page, as if they were a request's first: all of
    # them see something, and none sees what was never written.
    offsets = torch.arange(rows.shape[1], device=rows.device) % rows_per_request
    positions = torch.where(slots == PADDING_INDEX, offsets, positions)
    token_ids = torch.where(given == LAST_TOKEN, last_tokens[slots], given)
    drafts = token_ids.view(-1, rows_per_request)
    state_slots = slots.view(-1, rows_per_request)[:, 0].contiguous()
    return PreparedVerify(
        rows=PreparedRows(
            token_ids=scored_tokens(drafts),
            positions=positions,
            kv_slots=pages * page_size + positions % page_size,
            page_table=page_table[state_slots, :num_pages],
            context_lens=positions.view(-1, rows_per_request)[:, -1] + 1,
            state_slots=state_slots,
            output_indexes=rows[RowField.OUTPUT_INDEX],
        ),
        slots=slots,
        drafts=drafts,
        first_positions=positions.view(-1, rows_per_request)[:, 0].contiguous(),
    )


def scored_tokens(drafts: Tensor) -> Tensor:
    """The tokens [R * (k + 1)] that rows are scored with: the pending one where there is none."""
    return torch.where(drafts < 0, drafts[:, :1], drafts).flatten()


def with_drafts(prepared: PreparedVerify, device_drafts: DeviceDrafts) -> PreparedVerify:
    """The same rows with the drafts that are made here, where the host wants some."""
    pending = prepared.drafts[:, :1]
    made = device_drafts.draft(
        DraftRows(
            slots=prepared.rows.state_slots,
            positions=prepared.first_positions,
            token_ids=pending.squeeze(1),
            kv_slots=prepared.rows.kv_slots.view_as(prepared.drafts),
            page_table=prepared.rows.page_table,
        )
    )
    is_made = prepared.drafts == DEVICE_DRAFT
    drafts = torch.where(is_made, torch.cat([pending, made], dim=1), prepared.drafts)
    rows = prepared.rows._replace(token_ids=scored_tokens(drafts))
    return prepared._replace(rows=rows, drafts=drafts)


class VerifyStep:
    """The `step` of the verify family. `prepared`: the plans that functions.choose knows."""

    def __init__(  # noqa: PLR0913
        self,
        model: HybridModel,
        functions: VerifyFunctions,
        tables: SlotTables,
        sampling: SamplingTable,
        states: Sequence[CommittedState],
        *,
        page_size: int,
        rows_per_request: int,
        prepared: Sequence[SamplingPlan],
        take_features: TakeFeatures | None = None,
        device_drafts: DeviceDrafts | None = None,
    ) -> None:
        self._take_features, self._device_drafts = take_features, device_drafts
        self._model, self._functions = model, functions
        self._tables, self._sampling, self._states = tables, sampling, tuple(states)
        self._page_size, self._rows_per_request = page_size, rows_per_request
        self._prepared = frozenset(prepared)
        self._inputs = StepInputs(Kind.VERIFY, rows_per_request, tables.last_tokens.device)

    @torch.inference_mode()
    def __call__(self, rows: Tensor, plan: SamplingPlan) -> Chosen:
        """Packed rows [fields, T] in; what they chose, and how much of it is committed."""
        logits, prepared = self.forward(rows)
        functions = self._functions
        choose = functions.choose if plan in self._prepared else functions.choose_any
        choice = choose(
            logits,
            VerifyRows(prepared.drafts, prepared.slots, prepared.rows.output_indexes),
            self._sampling,
            plan,
            functions.kernels,
        )
        if self._device_drafts is not None:
            self._device_drafts.take_choice(prepared.rows.state_slots, choice)
        sampled = choice.sampled
        committed = CommittedRows(
            slots=prepared.rows.state_slots,
            positions=prepared.first_positions,
            num_committed=choice.num_committed,
            token_ids=sampled.token_ids.view(-1, self._rows_per_request),
        )
        for state in self._states:
            state.commit(committed, plan)
        return Chosen(
            torch.where(sampled.is_bad, BAD_TOKEN, sampled.token_ids),
            sampled.logprobs,
            sampled.top_ids,
            sampled.top_logprobs,
            choice.num_committed,
        )

    @torch.inference_mode()
    def forward(self, rows: Tensor) -> tuple[Tensor, PreparedVerify]:
        """The logits [T, vocab] of packed rows [fields, T]; changes no GDN state."""
        tables = self._tables
        prepared = self._functions.prepare(
            rows,
            tables.page_table,
            tables.last_tokens,
            self._page_size,
            num_table_pages(rows, tables, self._page_size),
            self._rows_per_request,
        )
        if self._device_drafts is not None:
            prepared = with_drafts(prepared, self._device_drafts)
        inputs = self._inputs.build(prepared.rows)
        hidden = self._model.hidden(inputs, self._functions.forward)
        if self._take_features is not None:
            self._take_features(self._model.features(hidden), inputs, prepared.slots)
        return self._model.logits(hidden, None, self._functions.forward), prepared
