"""What one forward reads: plain tensors, built by the runner, never found in a context."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from torch import Tensor

# Rows of a chunk of prefill: what the chunked delta rule takes at a time.
CHUNK_ROWS = 64


class Kind(StrEnum):
    """What the rows of a batch are. Dispatch is by kind, never by shape.

    PREFILL: a slice of the prompt, any number of rows per request. DECODE: one row per
    request. VERIFY: a pending token and its drafts, the same number of rows per request.
    """

    PREFILL = "prefill"
    DECODE = "decode"
    VERIFY = "verify"


@dataclass(frozen=True)
class ForwardInputs:
    """The inputs of one forward over T rows of R requests.

    Rows of one request are contiguous and in order. Padding rows write to the padding page
    and the padding slot only; their outputs mean nothing.

    token_ids, positions: [T] int64. kv_slots: [T] int64, page * page_size + offset where the
    row's key and value go. page_table: [R, P] int64, pages of each request in order, filled up
    with the padding page. context_lens: [R] int64, tokens in the KV cache after this forward.
    state_slots: [R] int64, the GDN slot of each request; one whose first row is at position 0
    starts from a zero GDN state, whatever its slot holds. rows_per_request: of a DECODE or VERIFY
    step, of which T = R * rows_per_request. logit_rows: [N] int64, rows whose
    logits are wanted, None for all of them. PREFILL only: row_starts [R + 1] int64, first row of
    each request;
    chunks [NC, 2] int64, request and first row of every run of up to CHUNK_ROWS rows of one
    request, in order, filled up at the end with (last request, its end), which holds no rows;
    chunk_starts [R + 1] int64, first chunk of each request.
    """

    kind: Kind
    token_ids: Tensor
    positions: Tensor
    kv_slots: Tensor
    page_table: Tensor
    context_lens: Tensor
    state_slots: Tensor
    logit_rows: Tensor | None
    row_starts: Tensor
    chunks: Tensor
    chunk_starts: Tensor
    rows_per_request: int = 1
