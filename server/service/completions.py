"""Text completions: several prompts per call, echo, prompt log-probabilities."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from msgspec import UNSET

from engine.request import NewRequest, SamplingParams
from engine.tokens import Tokenizer
from server.errors import BadRequestError
from server.service.generate import Deltas, join_deltas
from server.service.logprobs import CompletionLogprobsBuilder, prompt_logprobs
from server.service.prompts import encode_texts, require_tokenizer, text_offsets
from server.service.request_schema import CompletionRequest
from server.service.response_schema import (
    CompletionChoice,
    CompletionLogprobs,
    TextCompletion,
)
from server.service.sampling import LogprobCounts, build_params
from server.service.served_model import (
    MAX_CHOICES_PER_CALL,
    SYSTEM_FINGERPRINT,
    FrontEnd,
    ServedModel,
    new_id,
    plan_choices,
)
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

PROMPT_FIELD = "prompt"
DEFAULT_MAX_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt as the engine gets it, and as echo repeats it."""

    token_ids: list[int]
    text: str


@dataclass(frozen=True, kw_only=True)
class CompletionCall:
    """One checked request, ready to run. Choice i continues prompt i // n."""

    id: str
    created: int
    model_name: str
    tokenizer: Tokenizer | None
    prompts: list[Prompt]
    choices: list[NewRequest]
    is_stream: bool
    stream_usage: StreamUsage
    has_echo: bool
    num_logprobs: int | None
    has_prompt_logprobs: bool
    has_token_ids: bool

    def prompt_of(self, index: int) -> Prompt:
        """The prompt that choice `index` continues."""
        return self.prompts[index * len(self.prompts) // len(self.choices)]

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once."""
        return sum(len(prompt.token_ids) for prompt in self.prompts)


class CompletionService:
    """Answers text completion requests with one model."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model

    async def create(
        self, body: Mapping[str, Any]
    ) -> TextCompletion | PrimedStream[TextCompletion]:
        """Answer one request; with stream=true the first chunk is there on return.

        Raises:
            ApiError: as the API reports it. A stream can raise it later as well.
        """
        call = await self.plan(body)
        deltas = self._model.runner.run(call.choices)
        if call.is_stream:
            return await prime(stream_chunks(call, deltas))
        return await collect(call, deltas)

    async def plan(self, body: Mapping[str, Any]) -> CompletionCall:
        """Check a request and encode its prompts; nothing runs yet.

        Raises:
            ApiError: the request is refused.
        """
        model = self._model
        fields = model.reader.read(body, CompletionRequest)
        name = model.name_for(fields.model)
        params = self._params(fields)
        prompts = await read_prompts(model.front_end, fields)
        call_id = new_id("cmpl")
        return CompletionCall(
            id=call_id,
            created=int(time.time()),
            model_name=name,
            tokenizer=model.front_end.tokenizer,
            prompts=prompts,
            choices=plan_choices(
                model,
                call_id,
                [prompt.token_ids for prompt in prompts],
                params,
                prompt_field=PROMPT_FIELD,
            ),
            is_stream=fields.stream,
            stream_usage=read_stream_usage(fields),
            has_echo=fields.echo,
            num_logprobs=fields.logprobs,
            has_prompt_logprobs=fields.prompt_logprobs is not None,
            has_token_ids=fields.return_token_ids,
        )

    def _params(self, fields: CompletionRequest) -> SamplingParams:
        max_tokens = DEFAULT_MAX_TOKENS if fields.max_tokens is None else fields.max_tokens
        if max_tokens == 0 and not fields.echo and fields.prompt_logprobs is None:
            raise BadRequestError("max_tokens may be 0 only with echo.", "max_tokens")
        check_stream_fields(fields)
        prompt = fields.prompt_logprobs
        if fields.echo and fields.logprobs is not None:
            prompt = max(fields.logprobs, prompt or 0)
        return build_params(
            fields,
            self._model.front_end.defaults,
            self._model.client.info.limits,
            max_tokens=max_tokens,
            logprobs=LogprobCounts(output=fields.logprobs, prompt=prompt),
            prompt_field=PROMPT_FIELD,
        )


async def read_prompts(front_end: FrontEnd, fields: CompletionRequest) -> list[Prompt]:
    """The prompts of a request, whichever of the four forms it uses.

    Raises:
        BadRequestError: no prompt, a mixed list, or text without a tokenizer.
    """
    given = [fields.prompt] if isinstance(fields.prompt, str) else fields.prompt
    if 0 < len(given) <= MAX_CHOICES_PER_CALL:
        texts = [item for item in given if isinstance(item, str)]
        if len(texts) == len(given):
            tokenizer = require_tokenizer(front_end, PROMPT_FIELD)
            encoded = await encode_texts(tokenizer, texts, add_special_tokens=True)
            return [
                Prompt(token_ids=ids, text=text) for ids, text in zip(encoded, texts, strict=True)
            ]
        id_lists = [item for item in given if isinstance(item, list)]
        if len(id_lists) == len(given):
            return [id_prompt(front_end, ids, has_text=fields.echo) for ids in id_lists]
    ids = [item for item in given if isinstance(item, int)]
    if ids and len(ids) == len(given):
        return [id_prompt(front_end, ids, has_text=fields.echo)]
    raise BadRequestError(
        "prompt must be a string, a list of strings, a list of token ids or a list of lists of "
        f"token ids, not empty and with at most {MAX_CHOICES_PER_CALL} prompts.",
        PROMPT_FIELD,
    )


def id_prompt(front_end: FrontEnd, token_ids: list[int], *, has_text: bool) -> Prompt:
    """A prompt given as token ids; its text is decoded only where echo shows it."""
    if front_end.tokenizer is None or not has_text:
        return Prompt(token_ids=token_ids, text="")
    text = front_end.tokenizer.decode(token_ids, skip_special_tokens=False)
    return Prompt(token_ids=token_ids, text=text)


async def collect(call: CompletionCall, deltas: Deltas) -> TextCompletion:
    """The whole answer, once every choice has ended."""
    answers = await join_deltas(deltas, len(call.choices))
    return TextCompletion(
        id=call.id,
        created=call.created,
        model=call.model_name,
        choices=[build_choice(call, answer, is_first=True) for answer in answers],
        usage=total_usage(call.num_prompt_tokens, answers),
        system_fingerprint=SYSTEM_FINGERPRINT,
    )


async def stream_chunks(
    call: CompletionCall, deltas: Deltas
) -> AsyncGenerator[TextCompletion, None]:
    """The chunks of a streamed answer; the last one of a choice has its finish reason."""
    counter = UsageCounter(call.stream_usage, call.num_prompt_tokens)
    has_started = [False] * len(call.choices)
    async with aclosing(deltas):
        async for delta in deltas:
            counter.add(delta)
            is_first = not has_started[delta.index]
            choice = build_choice(call, delta, is_first=is_first)
            if not has_news(choice):
                continue
            has_started[delta.index] = True
            yield TextCompletion(
                id=call.id,
                created=call.created,
                model=call.model_name,
                choices=[choice],
                usage=counter.on_chunk(),
                system_fingerprint=SYSTEM_FINGERPRINT,
            )
    if call.stream_usage.is_final:
        yield TextCompletion(
            id=call.id,
            created=call.created,
            model=call.model_name,
            choices=[],
            usage=counter.total(),
            system_fingerprint=SYSTEM_FINGERPRINT,
        )


def has_news(choice: CompletionChoice) -> bool:
    """Whether a chunk is worth sending: text, entries, ids or the end."""
    has_entries = choice.logprobs is not None and bool(choice.logprobs.tokens)
    has_ids = isinstance(choice.token_ids, list) and bool(choice.token_ids)
    return bool(choice.text) or has_entries or has_ids or choice.finish_reason is not None


def build_choice(call: CompletionCall, delta: ChoiceDelta, *, is_first: bool) -> CompletionChoice:
    """A choice, whole or one chunk of it; the first chunk carries what echo repeats."""
    prompt = call.prompt_of(delta.index)
    has_echo = call.has_echo and is_first
    reason = delta.finish_reason
    return CompletionChoice(
        index=delta.index,
        text=prompt.text + delta.text if has_echo else delta.text,
        logprobs=None if call.num_logprobs is None else build_logprobs(call, delta, has_echo),
        finish_reason=None if reason is None else finish_reason_of(reason),
        token_ids=list(delta.token_ids) if call.has_token_ids else UNSET,
        prompt_token_ids=prompt.token_ids if call.has_token_ids and is_first else UNSET,
        prompt_logprobs=(
            prompt_logprobs(call.tokenizer, delta.prompt_logprobs or ())
            if call.has_prompt_logprobs
            else UNSET
        ),
    )


def build_logprobs(call: CompletionCall, delta: ChoiceDelta, has_echo: bool) -> CompletionLogprobs:
    """One entry per committed token, those without text included; with echo the prompt's too."""
    assert call.num_logprobs is not None
    prompt = call.prompt_of(delta.index)
    entries = CompletionLogprobsBuilder(call.tokenizer, call.num_logprobs)
    if has_echo:
        given = delta.prompt_logprobs
        assert given is not None, "the first update brings the prompt's log-probabilities"
        offsets = text_offsets(call.tokenizer, prompt.token_ids, prompt.text)
        for token_id, entry, offset in zip(prompt.token_ids, given, offsets, strict=True):
            entries.add(token_id, entry, offset)
    output_start = len(prompt.text) if call.has_echo else 0
    for placed in delta.placed:
        entries.add(placed.logprob.token_id, placed.logprob, output_start + placed.start)
    return entries.build()
