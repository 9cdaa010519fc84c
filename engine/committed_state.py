"""All state of requests that a verify step may change by committed rows alone, in one list.

A verify step scores rows that may be rejected. What each kind of state does about it is said
here: it is advanced once it is known how many rows are committed, or it is written for every row
and what is beyond the committed ones is never read. A new kind of state belongs in this list.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.cache.pools import PADDING_INDEX, CachePools, LinearVerifyScratch
from engine.sampler import SamplingPlan
from engine.sampling_rows import SamplingTable
from engine.slot_tables import SlotTables

GdnCommit = Callable[..., None]


class CommittedRows(NamedTuple):
    """What is committed of each of R requests, on the device.

    slots: [R] int64, the padding slot where there is no request. positions: [R] int64 of the first
    row. num_committed: [R] int64, leading rows that became part of the request. token_ids:
    [R, k + 1] int64, the token that each row chose.
    """

    slots: Tensor
    positions: Tensor
    num_committed: Tensor
    token_ids: Tensor


class CommittedState(Protocol):
    """One kind of state. `name` is for tests and messages."""

    @property
    def name(self) -> str: ...

    def commit(self, rows: CommittedRows, plan: SamplingPlan) -> None:
        """Advance it by the committed rows; static shapes, nothing read back."""
        ...


class GdnState:
    """Conv rings and recurrent states: read by the step, and replayed from its scratch here."""

    name = "gdn"

    def __init__(
        self, pools: CachePools, scratch: LinearVerifyScratch, num_k_heads: int, commit: GdnCommit
    ) -> None:
        self._pools, self._scratch, self._num_k_heads = pools, scratch, num_k_heads
        self._commit = commit

    def commit(self, rows: CommittedRows, plan: SamplingPlan) -> None:
        """One launch for all layers."""
        self._commit(
            *self._scratch.stash,
            rows.positions,
            rows.num_committed,
            rows.slots,
            self._pools.conv,
            self._pools.state,
            self._num_k_heads,
        )


class KvPages:
    """Keys and values: written for every row. The host steps back to the committed length.

    Rows of the next step begin there and overwrite what was rejected before anything reads it.
    Within a step, rows before a rejected one give it a weight of zero: only where its values are
    not finite can it reach them, and then the request ends as one with bad logits.
    """

    name = "kv"

    def commit(self, rows: CommittedRows, plan: SamplingPlan) -> None:
        """Nothing on the device."""


class PendingTokens:
    """The token that each slot chose last."""

    name = "pending token"

    def __init__(self, tables: SlotTables) -> None:
        self._last_tokens = tables.last_tokens

    def commit(self, rows: CommittedRows, plan: SamplingPlan) -> None:
        """The last committed one."""
        last = rows.token_ids.gather(1, rows.num_committed[:, None] - 1)
        self._last_tokens[rows.slots] = last[:, 0]


class TokenCounts:
    """How often each token was generated, for penalties."""

    name = "counts"

    def __init__(self, table: SamplingTable) -> None:
        self._table = table

    def commit(self, rows: CommittedRows, plan: SamplingPlan) -> None:
        """Committed tokens count; those of other rows are sent to the padding slot."""
        if not plan.has_penalties:
            return
        indexes = torch.arange(rows.token_ids.shape[1], device=rows.slots.device)
        is_committed = indexes < rows.num_committed[:, None]
        slots = torch.where(is_committed, rows.slots[:, None], PADDING_INDEX)
        self._table.count_tokens(slots.flatten(), rows.token_ids.flatten())


class SamplingNoise:
    """The noise is a function of seed and output index: it has no state to advance."""

    name = "noise"

    def commit(self, rows: CommittedRows, plan: SamplingPlan) -> None:
        """Nothing at all."""


def committed_states(
    pools: CachePools,
    scratch: LinearVerifyScratch,
    tables: SlotTables,
    table: SamplingTable,
    num_k_heads: int,
    commit_gdn: GdnCommit,
) -> tuple[CommittedState, ...]:
    """Every kind of state that a request has on the device."""
    return (
        GdnState(pools, scratch, num_k_heads, commit_gdn),
        KvPages(),
        PendingTokens(tables),
        TokenCounts(table),
        SamplingNoise(),
    )
