"""What a scheduler may do at most."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SchedulerLimits:
    """Caps in force: requests running and waiting, prompt tokens per step, request length.

    `max_steps_in_flight`: launched and undrained steps; 1 is without overlap. `num_drafts`: of a
    request in one step; with any, every decode step is a verify step.
    """

    max_running_requests: int
    max_queued_requests: int
    max_prefill_tokens: int
    max_request_tokens: int
    page_size: int
    max_steps_in_flight: int = 1
    num_drafts: int = 0

    @property
    def rows_per_request(self) -> int:
        """Of a decode or verify step: the pending token's and its drafts'."""
        return 1 + self.num_drafts
