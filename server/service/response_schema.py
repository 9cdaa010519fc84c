"""Response bodies and stream chunks, as OpenAI's clients read them.

A field of type `UnsetType` is left out of the JSON unless it was asked for; a field that is
always there but empty is null.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

StopOrLength = Literal["stop", "length"]


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """The part of the prompt that came from a cache."""

    cached_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    """Parts of the output, and drafts that became none; without speculation there are no drafts.

    `reasoning_tokens` is 0 while reasoning is not split off. Of the drafts that were scored,
    `accepted_prediction_tokens` became output; the rejected ones did not, nor are they counted as
    completion tokens.
    """

    reasoning_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class Usage(msgspec.Struct, frozen=True):
    """Tokens of one request; a prompt with n choices counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails = PromptTokensDetails()
    completion_tokens_details: CompletionTokensDetails = CompletionTokensDetails()


class PromptLogprob(msgspec.Struct, frozen=True):
    """One candidate at one prompt position; `rank` is null where it is not known."""

    logprob: float
    rank: int | None
    decoded_token: str


# One entry per prompt token, by token id; the first token has none.
PromptLogprobs = list[dict[int, PromptLogprob] | None]


class TopLogprob(msgspec.Struct, frozen=True):
    """One candidate; `bytes` are those of the vocabulary, null without a tokenizer."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprobEntry(msgspec.Struct, frozen=True):
    """One visible token of a chat answer."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """`logprobs` of a chat choice."""

    content: list[TokenLogprobEntry]
    refusal: None = None


class ChatMessage(msgspec.Struct, frozen=True):
    """The answer. `content` is the whole text: reasoning is not split off yet."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True):
    """One finished chat choice."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: StopOrLength
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a chat completion that is not streamed."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str
    service_tier: None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatDelta(msgspec.Struct, frozen=True):
    """What a chunk adds to the message; the finish chunk adds nothing."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True):
    """One choice's part of a chat chunk."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: StopOrLength | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a streamed chat completion."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str
    service_tier: None = None
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """`logprobs` of a text completion: one entry per token, prompt tokens only with echo.

    `text_offset` counts characters from the start of the choice's text.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True):
    """One text choice, or its part of a chunk (then `finish_reason` is null until the end)."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: StopOrLength | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class TextCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a text completion, and of each of its chunks."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of /v1/models."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "deltaloom"
    root: str
    parent: None = None
    max_model_len: int


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """The body of /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The body of /tokenize; `count` is what usage.prompt_tokens of the same request says."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(msgspec.Struct, frozen=True):
    """The body of /detokenize."""

    prompt: str


class VersionResponse(msgspec.Struct, frozen=True):
    """The body of /version."""

    version: str
