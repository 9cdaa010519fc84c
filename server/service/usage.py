"""Token accounting and stream options, which both generating endpoints share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from msgspec import UNSET, UnsetType

from engine.request import FinishReason
from server.errors import BadRequestError
from server.service.request_schema import GenerationFields
from server.service.response_schema import CompletionTokensDetails, StopOrLength, Usage
from server.service.text import ChoiceDelta


@dataclass(frozen=True, kw_only=True)
class StreamUsage:
    """Where a stream reports usage: in one last chunk, and on every chunk."""

    is_final: bool
    is_running: bool


NO_STREAM_USAGE = StreamUsage(is_final=False, is_running=False)


def check_stream_fields(fields: GenerationFields) -> None:
    """Refuse stream options that have no meaning.

    Raises:
        BadRequestError: names the field.
    """
    if fields.stream_options is not None and not fields.stream:
        raise BadRequestError("stream_options needs stream to be true.", "stream_options")
    if fields.prompt_logprobs is not None and fields.stream:
        raise BadRequestError("prompt_logprobs cannot be streamed.", "prompt_logprobs")


def read_stream_usage(fields: GenerationFields) -> StreamUsage:
    """What `stream_options` asks for; absent or empty options ask for no usage."""
    options = fields.stream_options
    return StreamUsage(
        is_final=options is not None and bool(options.include_usage),
        is_running=options is not None and bool(options.continuous_usage_stats),
    )


@dataclass
class UsageCounter:
    """Counts the tokens of one call over all its choices, in deltas of any size.

    `num_drafted` and `num_accepted`: of each choice so far, by index.
    """

    wanted: StreamUsage
    num_prompt_tokens: int
    num_completion_tokens: int = 0
    num_drafted: dict[int, int] = field(default_factory=dict)
    num_accepted: dict[int, int] = field(default_factory=dict)

    def add(self, delta: ChoiceDelta) -> None:
        """Count what `delta` adds to its choice."""
        self.num_completion_tokens += len(delta.token_ids)
        self.num_drafted[delta.index] = delta.num_drafted
        self.num_accepted[delta.index] = delta.num_accepted

    def on_chunk(self) -> Usage | UnsetType | None:
        """The `usage` of a chunk that has choices."""
        if self.wanted.is_running:
            return self.total()
        return None if self.wanted.is_final else UNSET

    def total(self) -> Usage:
        """Usage so far."""
        num_accepted = sum(self.num_accepted.values())
        return Usage(
            prompt_tokens=self.num_prompt_tokens,
            completion_tokens=self.num_completion_tokens,
            total_tokens=self.num_prompt_tokens + self.num_completion_tokens,
            completion_tokens_details=CompletionTokensDetails(
                accepted_prediction_tokens=num_accepted,
                rejected_prediction_tokens=sum(self.num_drafted.values()) - num_accepted,
            ),
        )


def total_usage(num_prompt_tokens: int, answers: Iterable[ChoiceDelta]) -> Usage:
    """Usage of a call from its whole choices."""
    counter = UsageCounter(NO_STREAM_USAGE, num_prompt_tokens)
    for answer in answers:
        counter.add(answer)
    return counter.total()


def finish_reason_of(reason: FinishReason | None) -> StopOrLength:
    """The API's word for how a choice ended; failures never get here."""
    assert reason in (FinishReason.STOP, FinishReason.LENGTH)
    return "stop" if reason == FinishReason.STOP else "length"
