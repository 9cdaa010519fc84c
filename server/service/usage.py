"""Token accounting and stream options, which both generating endpoints share."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import UNSET, UnsetType

from engine.request import FinishReason
from server.errors import BadRequestError
from server.service.request_schema import GenerationFields
from server.service.response_schema import StopOrLength, Usage, usage_of


@dataclass(frozen=True, kw_only=True)
class StreamUsage:
    """Where a stream reports usage: in one last chunk, and on every chunk."""

    is_final: bool
    is_running: bool


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
    """Counts the tokens of one stream."""

    wanted: StreamUsage
    num_prompt_tokens: int
    num_completion_tokens: int = 0

    def on_chunk(self) -> Usage | UnsetType | None:
        """The `usage` of a chunk that has choices."""
        if self.wanted.is_running:
            return self.total()
        return None if self.wanted.is_final else UNSET

    def total(self) -> Usage:
        """Usage so far."""
        return usage_of(self.num_prompt_tokens, self.num_completion_tokens)


def finish_reason_of(reason: FinishReason | None) -> StopOrLength:
    """The API's word for how a choice ended; failures never get here."""
    assert reason in (FinishReason.STOP, FinishReason.LENGTH)
    return "stop" if reason == FinishReason.STOP else "length"
