"""How well drafts did: the totals of an engine, by position."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class DraftCounts:
    """Totals over all verify steps since the start.

    `num_drafts`: times that a request had drafts scored in a step. `num_draft_tokens` and
    `num_accepted_tokens`: drafts that were scored, and those that became part of the output.
    `num_accepted_per_position`: of the latter, by their place among the drafts of their step; as
    long as a step may have drafts.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_per_position: list[int] = field(default_factory=list)

    def add(self, num_drafted: int, num_accepted: int) -> None:
        """Count what one step did for one request; num_accepted is at most num_drafted."""
        if num_drafted == 0:
            return
        self.num_drafts += 1
        self.num_draft_tokens += num_drafted
        self.num_accepted_tokens += num_accepted
        for position in range(num_accepted):
            self.num_accepted_per_position[position] += 1
