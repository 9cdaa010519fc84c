"""What one step runs, as plain values, and the tensors made from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from engine.cache.pools import PADDING_INDEX
from engine.request_state import RequestState
from engine.transfer import upload
from graphs.inputs import CHUNK_ROWS, ForwardInputs, Kind

# Compiled code is specialised for a dimension of 1; tables never have one that small.
MIN_TABLE_PAGES = 2
MIN_PREFILL_REQUESTS = 2
MIN_PREFILL_CHUNKS = 2
PREFILL_ROW_MULTIPLE = 16
# On CUDA prefills have more rows than a kernel for few rows takes: short prompts run what longer
# ones do. The weights take as long to read, and fewer shapes are to be compiled.
MIN_CUDA_PREFILL_ROWS = 80


@dataclass(frozen=True)
class BatchEntry:
    """One request's rows: its tokens at positions start to start + num_rows - 1.

    `samples`: the last row chooses a token. `output_index`: output tokens before that one,
    including those that steps in flight choose; the state may lag behind. The token of a
    decode row is the one that its slot chose last: it may be on the device alone. Tokens of
    prefill rows are always known. `num_scored`: this many leading rows report the
    log-probability of the prompt token that follows them. In a verify step the first row holds the
    pending token and drafts follow, of which at most `max_drafts` may be committed.
    """

    state: RequestState
    start: int
    num_rows: int
    samples: bool
    output_index: int
    num_scored: int = 0
    max_drafts: int = 0

    @property
    def slot(self) -> int:
        """The GDN slot; a scheduled request always owns one."""
        assert self.state.slot is not None
        return self.state.slot


@dataclass(frozen=True)
class Batch:
    """One step. All entries share `kind`; `admitted` are requests new in their slot."""

    kind: Kind
    entries: tuple[BatchEntry, ...]
    admitted: tuple[RequestState, ...] = ()

    @property
    def num_rows(self) -> int:
        return sum(entry.num_rows for entry in self.entries)

    @property
    def sampling_entries(self) -> list[BatchEntry]:
        """Entries that choose a token, in the order of the step's results."""
        return [entry for entry in self.entries if entry.samples]


def build_inputs(batch: Batch, page_size: int, device: torch.device) -> ForwardInputs:
    """The tensors of one step (see `ForwardInputs`), padded for its kind.

    logit_rows are the sampling rows in entry order, then the scored rows in entry order.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    kv_slots: list[int] = []
    row_starts = [0]
    sampled_rows: list[int] = []
    scored_rows: list[int] = []
    for entry in batch.entries:
        first = row_starts[-1]
        stop = entry.start + entry.num_rows
        token_ids += entry.state.tokens_between(entry.start, stop)
        positions += range(entry.start, stop)
        pages = entry.state.pages
        kv_slots += [
            pages[position // page_size] * page_size + position % page_size
            for position in range(entry.start, stop)
        ]
        row_starts.append(first + entry.num_rows)
        if entry.samples:
            sampled_rows.append(row_starts[-1] - 1)
        scored_rows += range(first, first + entry.num_scored)
    is_prefill = batch.kind is Kind.PREFILL
    num_extra_rows = padded_rows(len(token_ids), device) - len(token_ids) if is_prefill else 0
    num_extra_requests = max(MIN_PREFILL_REQUESTS - len(batch.entries), 0) if is_prefill else 0
    padding_rows = [PADDING_INDEX] * num_extra_rows
    padding_requests = [0] * num_extra_requests
    row_starts += row_starts[-1:] * num_extra_requests
    chunks, chunk_starts = build_chunks(row_starts) if is_prefill else ([], [])

    def on_device(values: Sequence[object]) -> torch.Tensor:
        return upload(values, device)

    return ForwardInputs(
        kind=batch.kind,
        token_ids=on_device(token_ids + padding_rows),
        positions=on_device(positions + padding_rows),
        kv_slots=on_device(kv_slots + padding_rows),
        page_table=on_device(build_page_table(batch, page_size, num_extra_requests)),
        context_lens=on_device(
            [entry.start + entry.num_rows for entry in batch.entries] + padding_requests
        ),
        state_slots=on_device(
            [entry.slot for entry in batch.entries] + [PADDING_INDEX] * num_extra_requests
        ),
        logit_rows=on_device(sampled_rows + scored_rows),
        row_starts=on_device(row_starts),
        chunks=on_device(chunks),
        chunk_starts=on_device(chunk_starts),
    )


def padded_rows(num_rows: int, device: torch.device) -> int:
    """How many rows a prefill of `num_rows` is padded to."""
    least = MIN_CUDA_PREFILL_ROWS if device.type == "cuda" else 1
    return -(-max(num_rows, least) // PREFILL_ROW_MULTIPLE) * PREFILL_ROW_MULTIPLE


def build_chunks(
    row_starts: Sequence[int], min_chunks: int = MIN_PREFILL_CHUNKS
) -> tuple[list[list[int]], list[int]]:
    """The chunk table and first chunks of `ForwardInputs`, from the first row of each request."""
    chunks: list[list[int]] = []
    chunk_starts = [0]
    for index, (first, stop) in enumerate(pairwise(row_starts)):
        chunks += [[index, row] for row in range(first, stop, CHUNK_ROWS)]
        chunk_starts.append(len(chunks))
    num_missing = max(min_chunks - len(chunks), 0)
    return chunks + [[len(row_starts) - 2, row_starts[-1]]] * num_missing, chunk_starts


def build_page_table(batch: Batch, page_size: int, num_extra_requests: int) -> list[list[int]]:
    """Each request's used pages, filled up with the padding page to a common width."""
    used = [
        entry.state.pages[: -(-(entry.start + entry.num_rows) // page_size)]
        for entry in batch.entries
    ]
    width = max(MIN_TABLE_PAGES, *(len(pages) for pages in used))
    table = [pages + [PADDING_INDEX] * (width - len(pages)) for pages in used]
    return table + [[PADDING_INDEX] * width] * num_extra_requests


@dataclass(frozen=True)
class StepResult:
    """What a step chose, on the host: the tokens of each sampling entry, all in order.

    `scores`: per entry of the batch with num_scored > 0, in entry order, one item per scored
    row: (log-probability, its likeliest tokens). The likeliest come untrimmed. A verify step
    also has, per sampling entry, `num_committed`, how many tokens are its, and `draft_ids`, what
    it scored; other steps have one token an entry.
    """

    token_ids: list[int]
    is_bad: list[bool]
    logprobs: list[float] | None
    tops: list[list[tuple[int, float]]] | None
    scores: list[list[tuple[float, list[tuple[int, float]]]]]
    num_committed: list[int] | None = None
    draft_ids: list[list[int]] | None = None
