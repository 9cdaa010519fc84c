"""What a draft method is told of the requests in a batch, before a step and after its drain."""

from __future__ import annotations

from engine.batch import Batch, BatchEntry, StepResult
from engine.spec_protocol import DraftRequest, SpecRuntime, VerifyOutcome
from graphs.inputs import Kind


def draft_request(entry: BatchEntry) -> DraftRequest:
    """The request of an entry, as it is now."""
    return DraftRequest(
        request_id=entry.state.request_id,
        slot=entry.slot,
        prompt_token_ids=entry.state.request.prompt_token_ids,
        output_token_ids=entry.state.output_token_ids,
        max_drafts=entry.max_drafts,
    )


def tell_drained(spec: SpecRuntime, batch: Batch, result: StepResult) -> None:
    """After a drain: what became of drafts, or which requests decode from now on."""
    if batch.kind is Kind.VERIFY:
        spec.finish_step(verify_outcomes(batch, result))
        return
    for entry in batch.sampling_entries:
        if not entry.state.is_over:
            spec.finish_prefill(draft_request(entry))


def verify_outcomes(batch: Batch, result: StepResult) -> list[VerifyOutcome]:
    """What a drained verify step did for each of its requests."""
    assert result.draft_ids is not None and result.num_committed is not None
    outcomes, first = [], 0
    for entry, draft_ids, count in zip(
        batch.entries, result.draft_ids, result.num_committed, strict=True
    ):
        token_ids = result.token_ids[first : first + count]
        outcomes.append(VerifyOutcome(entry.state.request_id, draft_ids, token_ids))
        first += count
    return outcomes
