"""What the device knows of each slot's request, so that a step need not wait for the host."""

from __future__ import annotations

import torch
from torch import Tensor


class SlotTables:
    """The pages and the last chosen token of every slot; slot 0 is padding.

    page_table: [1 + num_slots, max_pages] int64, pages of the slot's request in order; entries
    that its tokens have not reached yet are stale. last_tokens: [1 + num_slots] int64. Both keep
    their addresses; writes are ordered by the stream.
    """

    def __init__(self, num_slots: int, max_pages: int, device: torch.device) -> None:
        self.page_table = torch.zeros(1 + num_slots, max_pages, dtype=torch.int64, device=device)
        self.last_tokens = torch.zeros(1 + num_slots, dtype=torch.int64, device=device)

    def tensors(self) -> tuple[Tensor, Tensor]:
        """All tensors, for those who keep their addresses."""
        return self.page_table, self.last_tokens

    def set_pages(self, slots: Tensor, pages: Tensor) -> None:
        """Write the first pages [R, P] of `slots` [R]; equal slots must have equal pages."""
        self.page_table[:, : pages.shape[1]].index_copy_(0, slots, pages)


def table_bytes(num_slots: int, max_pages: int) -> int:
    """Device bytes of `SlotTables`."""
    return (1 + num_slots) * (max_pages + 1) * 8
