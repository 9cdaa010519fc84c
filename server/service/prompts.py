"""Prompts as token ids: chat messages through the template, text through the tokenizer."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any, Protocol

from engine.chat.messages import MessageError
from engine.tokens import Tokenizer
from server.errors import BadRequestError
from server.service.served_model import FrontEnd


class ChatFields(Protocol):
    """The request fields that shape a chat prompt."""

    @property
    def messages(self) -> list[Any] | None: ...
    @property
    def reasoning_effort(self) -> str | None: ...
    @property
    def chat_template_kwargs(self) -> dict[str, Any] | None: ...
    @property
    def add_generation_prompt(self) -> bool | None: ...
    @property
    def continue_final_message(self) -> bool: ...


def require_tokenizer(front_end: FrontEnd, param: str) -> Tokenizer:
    """The tokenizer.

    Raises:
        BadRequestError: the checkpoint has none, so only token ids can be used.
    """
    if front_end.tokenizer is None:
        raise BadRequestError(
            f"{param}: this checkpoint has no tokenizer; only lists of token ids as the prompt "
            "of /v1/completions work.",
            param,
        )
    return front_end.tokenizer


def template_variables(fields: ChatFields) -> dict[str, Any]:
    """`chat_template_kwargs`, with what `reasoning_effort` means for the template.

    Effort "none" turns thinking off unless enable_thinking is given.
    """
    variables = dict(fields.chat_template_kwargs or {})
    if fields.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", fields.reasoning_effort)
        if fields.reasoning_effort == "none":
            variables.setdefault("enable_thinking", False)
    return variables


async def encode_chat(front_end: FrontEnd, fields: ChatFields) -> list[int]:
    """Render and encode the messages, on a thread: both may take long.

    Raises:
        BadRequestError: the messages are malformed or the template refuses them.
    """
    tokenizer = require_tokenizer(front_end, "messages")
    template = front_end.template
    if template is None:
        raise BadRequestError("messages: this checkpoint has no chat template.", "messages")
    add_generation_prompt = fields.add_generation_prompt
    if add_generation_prompt is None:
        add_generation_prompt = not fields.continue_final_message
    try:
        return await asyncio.to_thread(
            template.encode_prompt,
            tokenizer,
            fields.messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=fields.continue_final_message,
            chat_template_kwargs=template_variables(fields),
        )
    except MessageError as error:
        raise BadRequestError(str(error), error.param) from error


async def encode_texts(
    tokenizer: Tokenizer, texts: Sequence[str], *, add_special_tokens: bool
) -> list[list[int]]:
    """Encode raw prompts, on a thread; control tokens written in them count as such.

    Raises:
        BadRequestError: a text cannot be encoded.
    """

    def encode_all() -> list[list[int]]:
        return [
            tokenizer.encode(text, parse_special=True, add_special_tokens=add_special_tokens)
            for text in texts
        ]

    try:
        return await asyncio.to_thread(encode_all)
    except ValueError as error:
        raise BadRequestError(f"prompt: {error}.", "prompt") from error


def text_offsets(tokenizer: Tokenizer | None, token_ids: Sequence[int], text: str) -> list[int]:
    """Where in `text` each of its tokens begins, in characters (0 without a tokenizer).

    Control tokens count as far as `text` shows them. Where no way of decoding gives `text`
    (the tokenizer normalizes), the places are near and never beyond its end.
    """
    if tokenizer is None:
        return [0] * len(token_ids)
    offsets: list[int] = []
    for skip_special_tokens in (False, True):
        stream = tokenizer.stream((), skip_special_tokens=skip_special_tokens)
        pieces = [stream.push((token_id,)) for token_id in token_ids]
        ends = list(itertools.accumulate(map(len, pieces), initial=0))
        offsets = [min(end, len(text)) for end in ends[:-1]]
        if "".join(pieces) + stream.flush() == text:
            break
    return offsets
