"""Verify steps over a target that is a table: its logits follow from the last token alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.sampler import SamplingPlan, sample
from engine.sampling_rows import PADDING_SLOT, SamplingTable
from engine.spec_protocol import VerifyChoice, VerifyRows
from graphs.kernels.kernel_set import TORCH_SAMPLE
from tests.engine.sampling_cases import build_table
from tests.oracle.sampling import Row

Choose = Callable[[Tensor, VerifyRows], VerifyChoice]
_SEED = 1  # its column of SamplingTable.ints


def random_target(vocab: int, scale: float, seed: int) -> Tensor:
    """Logits [V, V] float32 by last token."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(vocab, vocab, generator=generator) * scale


def table_of_copies(row: Row, prompt: list[int], num_copies: int, vocab: int) -> SamplingTable:
    """One request in slots 1 .. num_copies, each with a seed of its own."""
    first = build_table([row], [prompt], [[]], vocab)
    table = SamplingTable(num_copies, vocab, first.floats.device)
    for copies, one in zip(table.tensors()[:-1], first.tensors()[:-1], strict=True):
        copies[1:] = one[1]
    table.ints[1:, _SEED] = row.seed + torch.arange(num_copies)
    return table


def choose_plain(table: SamplingTable, plan: SamplingPlan) -> Choose:
    """Decode steps: one row a request, sampled."""

    def choose(logits: Tensor, rows: VerifyRows) -> VerifyChoice:
        sampled = sample(logits, table, rows.slots, rows.output_indexes, plan, TORCH_SAMPLE)
        return VerifyChoice(sampled, torch.ones(len(rows.token_ids), dtype=torch.int64))

    return choose


class VerifyLoop:
    """All slots of a table, in step after step; it commits as a drain does.

    outputs: [N, room] the tokens committed first. counts: [N] how many there are. pending: [N].
    Requests go on after their end and beyond the room, so that all have enough.
    """

    def __init__(self, target: Tensor, table: SamplingTable, pending: Tensor, room: int) -> None:
        self.pending = pending
        self.counts = torch.zeros_like(pending)
        self._target, self._table, self._room = target, table, room
        self._outputs = torch.full((len(pending), room + 1), -1)

    @property
    def outputs(self) -> Tensor:
        return self._outputs[:, : self._room]

    @property
    def is_full(self) -> bool:
        return bool((self.counts >= self._room).all())

    def step(self, drafts: Tensor, choose: Choose) -> VerifyChoice:
        """One verify step of drafts [N, k]."""
        token_ids = torch.cat([self.pending[:, None], drafts], 1)
        num_requests, num_rows = token_ids.shape
        slots = torch.arange(1, num_requests + 1).repeat_interleave(num_rows)
        order = torch.arange(num_rows)
        indexes = self.counts[:, None] + order
        logits = self._target[token_ids.clamp(min=0)].flatten(0, 1)
        choice = choose(logits, VerifyRows(token_ids, slots, indexes.flatten()))
        assert (choice.num_committed >= 1).all() and (choice.num_committed <= num_rows).all()
        tokens = choice.sampled.token_ids.view(num_requests, num_rows)
        is_committed = order < choice.num_committed[:, None]
        places = torch.where(is_committed, indexes, self._room).clamp(max=self._room)
        self._outputs.scatter_(1, places, tokens)
        counted = torch.where(is_committed.flatten(), slots, PADDING_SLOT)
        self._table.count_tokens(counted, tokens.flatten())
        self.counts = self.counts + choice.num_committed
        self.pending = tokens.gather(1, choice.num_committed[:, None] - 1)[:, 0]
        return choice


def run_plain(
    target: Tensor, table: SamplingTable, plan: SamplingPlan, pending: Tensor, room: int
) -> Tensor:
    """[N, room]: what decode steps choose, one token a step."""
    loop = VerifyLoop(target, table, pending, room)
    nothing = torch.zeros(len(pending), 0, dtype=torch.int64)
    while not loop.is_full:
        loop.step(nothing, choose_plain(table, plan))
    return loop.outputs
