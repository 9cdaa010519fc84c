"""What committing a token does to its request: text, stops, log-probabilities, the update."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection

from engine.batch import Batch, BatchEntry, StepResult
from engine.draft_counts import DraftCounts
from engine.request import FinishReason, RequestUpdate, TokenLogprob
from engine.request_state import RequestState

logger = logging.getLogger(__name__)


def commit_verified(
    batch: Batch,
    result: StepResult,
    counts: DraftCounts,
    eos_token_ids: Collection[int],
    max_request_tokens: int,
) -> None:
    """Append the tokens that a verify step accepted, of each request up to the one that ends it.

    The request's rows beyond them are rolled back, and its drafts counted.
    """
    assert result.num_committed is not None and result.draft_ids is not None
    first = 0
    for entry, num_committed, draft_ids in zip(
        batch.entries, result.num_committed, result.draft_ids, strict=True
    ):
        state = entry.state
        state.land(entry.num_rows, samples=True, num_rejected=entry.num_rows - num_committed)
        num_before = len(state.output_token_ids)
        for index in range(first, first + num_committed):
            if not state.is_over:
                commit_token(state, result, index, eos_token_ids, max_request_tokens)
        first += num_committed
        num_new = len(state.output_token_ids) - num_before
        # A run that a token ends is cut at it, whether or not that token was drafted.
        last_draft = draft_ids[num_committed - 1 : num_committed]
        is_last_drafted = state.is_over and last_draft == state.output_token_ids[-1:]
        num_accepted = min(num_new, num_committed - 1 + is_last_drafted)
        state.num_drafted += len(draft_ids)
        state.num_accepted += num_accepted
        counts.add(len(draft_ids), num_accepted)


def commit_token(
    state: RequestState,
    result: StepResult,
    index: int,
    eos_token_ids: Collection[int],
    max_request_tokens: int,
) -> None:
    """Append the index-th sampled token of a step and decide whether the request is over.

    The first boundary wins, in this order: EOS, stop token, stop string, length. The token
    that completes a stop is part of the output; nothing after it ever is.
    """
    if result.is_bad[index]:
        fail(state, "the model produced no finite logits for this request")
        return
    token_id = result.token_ids[index]
    params = state.params
    state.output_token_ids.append(token_id)
    state.num_undelivered += 1
    if params.logprobs is not None:
        assert result.logprobs is not None
        top = result.tops[index][: params.logprobs] if result.tops and params.logprobs else []
        state.undelivered_logprobs.append(TokenLogprob(token_id, result.logprobs[index], top))
    num_output = len(state.output_token_ids)
    can_stop = num_output > params.min_tokens
    if can_stop and not params.ignore_eos and token_id in eos_token_ids:
        state.finish_reason = FinishReason.STOP
    elif can_stop and token_id in params.stop_token_ids:
        state.finish_reason, state.stop_reason = FinishReason.STOP, token_id
    elif (stop_string := find_stop_string(state, token_id)) is not None:
        state.finish_reason, state.stop_reason = FinishReason.STOP, stop_string
    elif state.finish_reason is None and is_length_reached(state, num_output, max_request_tokens):
        state.finish_reason = FinishReason.LENGTH


def is_length_reached(state: RequestState, num_output: int, max_request_tokens: int) -> bool:
    """Whether a request ends with its num_output-th output token, whatever that token is."""
    is_full = state.num_prompt + num_output >= max_request_tokens
    return is_full or num_output == state.params.max_tokens


def num_outputs_left(state: RequestState, num_output: int, max_request_tokens: int) -> int:
    """How many tokens a request may still choose after num_output."""
    num_left = max_request_tokens - state.num_prompt - num_output
    max_tokens = state.params.max_tokens
    return num_left if max_tokens is None else min(num_left, max_tokens - num_output)


def find_stop_string(state: RequestState, token_id: int) -> str | None:
    """The stop string that this token completes; a tokenizer fault fails the request alone."""
    if state.output_text is None:
        return None
    try:
        state.output_text.push(token_id)
    except Exception:
        logger.exception("detokenizing failed for request %s", state.request_id)
        fail(state, "the tokenizer failed on this request's output")
        return None
    return state.output_text.stop_string


def commit_scores(entry: BatchEntry, scores: list[tuple[float, list[tuple[int, float]]]]) -> None:
    """Record the log-probabilities of the prompt tokens that follow the scored rows."""
    state = entry.state
    num_top = state.params.prompt_logprobs
    assert num_top is not None
    if not state.prompt_logprobs:
        state.prompt_logprobs.append(None)
    for row, (logprob, top) in enumerate(scores, start=entry.start):
        if math.isnan(logprob):
            fail(state, "the model produced no finite logits for this request's prompt")
            return
        if row + 1 == len(state.prompt_logprobs):
            token_id = state.request.prompt_token_ids[row + 1]
            state.prompt_logprobs.append(TokenLogprob(token_id, logprob, top[:num_top]))


def fail(state: RequestState, error: str | None = None) -> None:
    """End a request with an error of its own."""
    state.finish_reason = FinishReason.ERROR
    state.error = error


def take_update(state: RequestState) -> RequestUpdate | None:
    """What was committed since the last update, None when there is nothing to tell."""
    if state.num_undelivered == 0 and state.finish_reason is None:
        return None
    return finish_update(state)


def finish_update(state: RequestState, error: str | None = None) -> RequestUpdate:
    """Everything committed and not yet delivered, with the finish reason if there is one."""
    num_new, state.num_undelivered = state.num_undelivered, 0
    logprobs, state.undelivered_logprobs = state.undelivered_logprobs, []
    prompt_logprobs = None
    if state.params.prompt_logprobs is not None and not state.has_delivered:
        # A prompt of one token has no row to score.
        prompt_logprobs = list(state.prompt_logprobs) or [None]
    queue_s = None if state.has_delivered else state.queue_s
    state.has_delivered = True
    return RequestUpdate(
        request_id=state.request_id,
        token_ids=state.output_token_ids[len(state.output_token_ids) - num_new :],
        logprobs=None if state.params.logprobs is None else logprobs,
        prompt_logprobs=prompt_logprobs,
        finish_reason=state.finish_reason,
        stop_reason=state.stop_reason,
        error=error or state.error,
        queue_s=queue_s,
        num_drafted=state.num_drafted,
        num_accepted=state.num_accepted,
    )
