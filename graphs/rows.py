"""The rows of a decode or verify step, packed so that one copy takes them to the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

# In the field TOKEN_ID: the token that the row's slot chose last, which only the device knows.
LAST_TOKEN = -1
# In the field TOKEN_ID of a verify step: the row has no draft. It is scored and never committed.
NO_DRAFT = -2
# Likewise: the row's draft is made on the device, within the step.
DEVICE_DRAFT = -3


class RowField(IntEnum):
    """The rows of a packed tensor [fields, T]; zeros make a padding row.

    SLOT: of the row's request. POSITION: in its sequence. PAGE: the KV page that holds this
    position. OUTPUT_INDEX: index of the output token that the row chooses. TOKEN_ID: the row's
    token, LAST_TOKEN, NO_DRAFT or DEVICE_DRAFT.
    """

    SLOT = 0
    POSITION = 1
    PAGE = 2
    OUTPUT_INDEX = 3
    TOKEN_ID = 4


@dataclass(frozen=True)
class Row:
    """One row on the host; see `RowField`."""

    slot: int
    position: int
    page: int
    output_index: int
    token_id: int = LAST_TOKEN

    def fields(self) -> tuple[int, ...]:
        """In the order of `RowField`."""
        return self.slot, self.position, self.page, self.output_index, self.token_id


PADDING_ROW = Row(slot=0, position=0, page=0, output_index=0, token_id=0)


def pack_rows(rows: Sequence[Row], num_rows: int, *, is_pinned: bool) -> Tensor:
    """[fields, num_rows] int64 in host memory, filled up with padding rows.

    `is_pinned`: the copy to the device may then run behind the host's back.
    """
    padding = [PADDING_ROW] * (num_rows - len(rows))
    columns = list(zip(*(row.fields() for row in (*rows, *padding)), strict=True))
    return torch.tensor(columns, dtype=torch.int64, pin_memory=is_pinned)
