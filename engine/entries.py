"""The rows that a step takes of one request."""

from __future__ import annotations

from engine.batch import BatchEntry
from engine.commit import is_length_reached, num_outputs_left
from engine.request_state import RequestState
from engine.scheduler_limits import SchedulerLimits


def prefill_entry(state: RequestState, budget: int, limits: SchedulerLimits) -> BatchEntry:
    """As many of the rows to prefill as the budget allows; the last of all chooses a token."""
    start = state.num_launched
    num_left = state.num_prefill - start
    num_rows = min(num_left, budget)
    num_scored = 0
    if state.params.prompt_logprobs is not None:
        num_scored = max(min(start + num_rows, state.num_prompt - 1) - start, 0)
    samples = num_rows == num_left and not is_complete(state, limits)
    return BatchEntry(state, start, num_rows, samples, state.next_output_index, num_scored)


def decode_entry(state: RequestState, limits: SchedulerLimits) -> BatchEntry:
    """The next row of a request, or with drafts the rows of a verify step."""
    index = state.next_output_index
    num_left = num_outputs_left(state, index, limits.max_request_tokens)
    return BatchEntry(
        state,
        start=state.num_launched,
        num_rows=limits.rows_per_request,
        samples=True,
        output_index=index,
        max_drafts=min(limits.num_drafts, num_left - 1),
    )


def is_complete(state: RequestState, limits: SchedulerLimits) -> bool:
    """Whether the tokens in flight reach the request's length: no other may be chosen."""
    return is_length_reached(state, state.next_output_index, limits.max_request_tokens)
