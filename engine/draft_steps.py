"""What a draft method is told of the requests in a batch, before a step and after its drain."""

from __future__ import annotations

from collections.abc import Sequence

from engine.batch import Batch, BatchEntry, StepResult
from engine.request import RequestUpdate
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


def release_ended(spec: SpecRuntime, updates: Sequence[RequestUpdate]) -> None:
    """Let the draft method forget requests whose last updates these are."""
    for update in updates:
        if update.finish_reason is not None:
            spec.release(update.request_id)


def verify_outcomes(batch: Batch, result: StepResult) -> list[VerifyOutcome]:
    """What a drained verify step did for each of its requests."""
    assert result.draft_ids is not None
    return [
        VerifyOutcome(
            request_id=entry.state.request_id,
            draft_ids=draft_ids,
            token_ids=entry.state.output_token_ids[entry.output_index :],
        )
        for entry, draft_ids in zip(batch.entries, result.draft_ids, strict=True)
    ]
