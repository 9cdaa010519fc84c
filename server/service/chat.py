"""Chat completions. Reasoning is not split off yet: content is the model's whole text."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from msgspec import UNSET

from engine.request import MAX_TOP_LOGPROBS, NewRequest, score_prompt_once
from engine.tokens import Tokenizer
from server.errors import BadRequestError
from server.service.generate import Deltas, join_deltas
from server.service.logprobs import chat_logprobs, prompt_logprobs
from server.service.prompts import encode_chat, require_tokenizer
from server.service.request_schema import ChatRequest
from server.service.response_schema import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatMessage,
)
from server.service.sampling import LogprobCounts, build_params
from server.service.served_model import SYSTEM_FINGERPRINT, ServedModel, new_id, plan_choices
from server.service.stream import PrimedStream, prime
from server.service.text import ChoiceDelta
from server.service.usage import (
    StreamUsage,
    UsageCounter,
    check_stream_fields,
    finish_reason_of,
    read_stream_usage,
    total_usage,
)

PROMPT_FIELD = "messages"


@dataclass(frozen=True, kw_only=True)
class ChatCall:
    """One checked request, ready to run."""

    id: str
    created: int
    model_name: str
    tokenizer: Tokenizer
    choices: list[NewRequest]
    is_stream: bool
    stream_usage: StreamUsage
    has_logprobs: bool
    has_token_ids: bool

    @property
    def prompt_token_ids(self) -> list[int]:
        """The one prompt that all choices continue."""
        return self.choices[0].prompt_token_ids


class ChatService:
    """Answers chat completion requests with one model."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model

    async def create(self, body: Mapping[str, Any]) -> ChatCompletion | PrimedStream[ChatChunk]:
        """Answer one request; with stream=true the first chunk is there on return.

        Raises:
            ApiError: as the API reports it. A stream can raise it later as well.
        """
        call = await self.plan(body)
        deltas = self._model.runner.run(call.choices)
        if call.is_stream:
            return await prime(stream_chunks(call, deltas))
        return await collect(call, deltas)

    async def plan(self, body: Mapping[str, Any]) -> ChatCall:
        """Check a request and encode its prompt; nothing runs yet.

        Raises:
            ApiError: the request is refused.
        """
        model = self._model
        fields = model.reader.read(body, ChatRequest)
        name = model.name_for(fields.model)
        tokenizer = require_tokenizer(model.front_end, PROMPT_FIELD)
        check_chat_fields(fields)
        params = build_params(
            fields,
            model.front_end.defaults,
            model.client.info.limits,
            max_tokens=(
                fields.max_tokens
                if fields.max_completion_tokens is None
                else fields.max_completion_tokens
            ),
            logprobs=LogprobCounts(
                output=(fields.top_logprobs or 0) if fields.logprobs else None,
                prompt=fields.prompt_logprobs,
            ),
            prompt_field=PROMPT_FIELD,
        )
        prompt = await encode_chat(model.front_end, fields)
        call_id = new_id("chatcmpl")
        return ChatCall(
            id=call_id,
            created=int(time.time()),
            model_name=name,
            tokenizer=tokenizer,
            choices=score_prompt_once(
                plan_choices(model, call_id, [prompt], params, prompt_field=PROMPT_FIELD)
            ),
            is_stream=fields.stream,
            stream_usage=read_stream_usage(fields),
            has_logprobs=fields.logprobs,
            has_token_ids=fields.return_token_ids,
        )


def check_chat_fields(fields: ChatRequest) -> None:
    """Refuse what only the combination of fields shows.

    Raises:
        BadRequestError: names the field.
    """
    if not fields.messages:
        raise BadRequestError("messages must hold at least one message.", PROMPT_FIELD)
    for name, value in (
        ("max_completion_tokens", fields.max_completion_tokens),
        ("max_tokens", fields.max_tokens),
    ):
        if value is not None and value < 1:
            raise BadRequestError(f"{name} must be at least 1, got {value}.", name)
    if fields.top_logprobs is not None:
        if not fields.logprobs:
            raise BadRequestError("top_logprobs needs logprobs to be true.", "top_logprobs")
        if not 0 <= fields.top_logprobs <= MAX_TOP_LOGPROBS:
            raise BadRequestError(
                f"top_logprobs must be in [0, {MAX_TOP_LOGPROBS}], got {fields.top_logprobs}.",
                "top_logprobs",
            )
    check_stream_fields(fields)


async def collect(call: ChatCall, deltas: Deltas) -> ChatCompletion:
    """The whole answer, once every choice has ended."""
    answers = await join_deltas(deltas, len(call.choices))
    has_prompt_logprobs = call.choices[0].params.prompt_logprobs is not None
    return ChatCompletion(
        id=call.id,
        created=call.created,
        model=call.model_name,
        choices=[_choice(call, answer) for answer in answers],
        usage=total_usage(len(call.prompt_token_ids), answers),
        system_fingerprint=SYSTEM_FINGERPRINT,
        prompt_logprobs=(
            prompt_logprobs(call.tokenizer, answers[0].prompt_logprobs or ())
            if has_prompt_logprobs
            else UNSET
        ),
        prompt_token_ids=call.prompt_token_ids if call.has_token_ids else UNSET,
    )


def _choice(call: ChatCall, answer: ChoiceDelta) -> ChatChoice:
    return ChatChoice(
        index=answer.index,
        message=ChatMessage(answer.text),
        logprobs=chat_logprobs(call.tokenizer, answer.placed) if call.has_logprobs else None,
        finish_reason=finish_reason_of(answer.finish_reason),
        token_ids=list(answer.token_ids) if call.has_token_ids else UNSET,
    )


async def stream_chunks(call: ChatCall, deltas: Deltas) -> AsyncGenerator[ChatChunk, None]:
    """The chunks of a streamed answer; per choice a role, text as it comes, and a finish."""
    counter = UsageCounter(call.stream_usage, len(call.prompt_token_ids))
    has_started = [False] * len(call.choices)
    is_first = True
    async with aclosing(deltas):
        async for delta in deltas:
            counter.add(delta)
            for choice in _chunk_choices(call, delta, has_started):
                yield ChatChunk(
                    id=call.id,
                    created=call.created,
                    model=call.model_name,
                    choices=[choice],
                    usage=counter.on_chunk(),
                    system_fingerprint=SYSTEM_FINGERPRINT,
                    prompt_token_ids=(
                        call.prompt_token_ids if is_first and call.has_token_ids else UNSET
                    ),
                )
                is_first = False
    if call.stream_usage.is_final:
        yield ChatChunk(
            id=call.id,
            created=call.created,
            model=call.model_name,
            choices=[],
            usage=counter.total(),
            system_fingerprint=SYSTEM_FINGERPRINT,
        )


def _chunk_choices(
    call: ChatCall, delta: ChoiceDelta, has_started: list[bool]
) -> Iterator[ChatChunkChoice]:
    if not has_started[delta.index]:
        has_started[delta.index] = True
        yield ChatChunkChoice(delta.index, ChatDelta(role="assistant", content=""))
    logprobs = chat_logprobs(call.tokenizer, delta.placed) if call.has_logprobs else None
    has_entries = logprobs is not None and bool(logprobs.content)
    has_ids = call.has_token_ids and bool(delta.token_ids)
    if delta.text or has_entries or has_ids:
        yield ChatChunkChoice(
            delta.index,
            ChatDelta(content=delta.text),
            logprobs=logprobs,
            token_ids=list(delta.token_ids) if has_ids else UNSET,
        )
    if delta.finish_reason is not None:
        yield ChatChunkChoice(
            delta.index, ChatDelta(), finish_reason=finish_reason_of(delta.finish_reason)
        )
