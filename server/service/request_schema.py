"""Request bodies: what each endpoint accepts, and the reading of JSON into it.

Three kinds of field: those of the structs below are honoured; those in a refusal table are
answered with 400 unless their value asks for nothing; all others are ignored, with one log
line per name. null is the same as absent, an integral float is an integer, a boolean is not
a number and a string never is.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from server.errors import BadRequestError

logger = logging.getLogger(__name__)

MAX_LOGGED_FIELD_NAMES = 256
MAX_LOGGED_NAME_CHARS = 64
# A prompt may be a list of lists of token ids; nothing with integers is deeper.
MAX_INT_LIST_DEPTH = 2

_MESSAGE_WITH_PATH = re.compile(r"(?P<what>.*) - at `\$(?P<path>.*)`", re.DOTALL)
_INT_FIELDS = frozenset(
    (
        "n", "best_of", "max_tokens", "max_completion_tokens", "min_tokens", "top_k", "seed",
        "logprobs", "top_logprobs", "prompt_logprobs", "stop_token_ids", "prompt", "tokens",
    )
)  # fmt: skip


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`stream_options`; other keys (include_obfuscation) are ignored."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationFields(msgspec.Struct, frozen=True, kw_only=True):
    """What both generating endpoints accept. None is absent."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    n: int = 1
    best_of: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: int | None = None
    return_token_ids: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None


class ChatRequest(GenerationFields, frozen=True, kw_only=True):
    """The body of /v1/chat/completions. `max_completion_tokens` wins over `max_tokens`."""

    messages: list[Any]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False


class CompletionRequest(GenerationFields, frozen=True, kw_only=True):
    """The body of /v1/completions."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool = False


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of /tokenize: a prompt, or messages that the chat template renders."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of /detokenize."""

    model: str | None = None
    tokens: list[int]


# Field -> the values that ask for nothing, so that they are no reason to refuse.
REFUSED_FIELDS: Mapping[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (),
    "functions": ([],),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "structured_outputs": ({},),
    "modalities": (["text"],),
    "chat_template": (),
    "suffix": ("",),
}
REFUSED_PREFIX = "guided_"

RequestT = TypeVar("RequestT", bound=msgspec.Struct)


class RequestReader:
    """Turns JSON objects into request structs; remembers which ignored fields it has logged."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def read(self, body: Mapping[str, Any], kind: type[RequestT]) -> RequestT:
        """Check `body` and convert it.

        Raises:
            BadRequestError: a field has the wrong type or asks for what is not supported.
        """
        fields = {name: value for name, value in body.items() if value is not None}
        known = frozenset(kind.__struct_fields__)
        for name, value in fields.items():
            if name in known:
                continue
            if name in REFUSED_FIELDS or name.startswith(REFUSED_PREFIX):
                refuse_unless_idle(name, value)
            else:
                self._log_ignored(name)
        try:
            return msgspec.convert(fields, kind)
        except msgspec.ValidationError:
            pass
        try:
            return msgspec.convert(with_integral_floats(fields), kind)
        except msgspec.ValidationError as error:
            raise bad_field(error) from None

    def _log_ignored(self, name: str) -> None:
        name = name[:MAX_LOGGED_NAME_CHARS]
        if name not in self._logged and len(self._logged) < MAX_LOGGED_FIELD_NAMES:
            self._logged.add(name)
            logger.info("request field %r is ignored (logged once)", name)


def refuse_unless_idle(name: str, value: object) -> None:
    """Raise BadRequestError for a field that is not supported, unless it asks for nothing."""
    for idle in REFUSED_FIELDS.get(name, ()):
        if type(value) is type(idle) and value == idle:
            return
    raise BadRequestError(f"{name} is not supported by this server with this value.", name)


def parse_json_object(data: bytes) -> dict[str, Any]:
    """Decode a request body.

    Raises:
        BadRequestError: no valid JSON (NaN, lone surrogates, a repeated key) or no object.
    """
    try:
        body = msgspec.json.decode(data)
        # The fast decoder keeps the last of repeated keys; what the client meant is unknown.
        json.loads(data, object_pairs_hook=refuse_repeated_keys)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise BadRequestError(f"The request body is not valid JSON: {error}.") from None
    if not isinstance(body, dict):
        raise BadRequestError("The request body must be a JSON object.")
    return body


def refuse_repeated_keys(pairs: list[tuple[str, Any]]) -> None:
    """Raise ValueError if an object has one key twice."""
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            raise ValueError(f"the key {name[:MAX_LOGGED_NAME_CHARS]!r} stands twice in an object")
        seen.add(name)


def with_integral_floats(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Copy `fields` with 8.0 as 8 where an integer or a list of them is expected."""

    def integral(value: object, max_depth: int = MAX_INT_LIST_DEPTH) -> object:
        if isinstance(value, float) and value.is_integer():
            return int(value)
        if isinstance(value, list) and max_depth:
            return [integral(item, max_depth - 1) for item in value]
        return value

    return {
        name: integral(value) if name in _INT_FIELDS else value for name, value in fields.items()
    }


def bad_field(error: msgspec.ValidationError) -> BadRequestError:
    """The 400 of a failed conversion, with the path of the value as `param`."""
    match = _MESSAGE_WITH_PATH.fullmatch(str(error))
    if match is None:
        missing = re.search(r"missing required field `(.*)`", str(error))
        name = missing.group(1) if missing else None
        return BadRequestError(f"{error}.".replace("`", "'"), name)
    what = match["what"].replace("`", "'")
    param = match["path"].removeprefix(".").removesuffix("[...]")
    return BadRequestError(f"{param}: {what}.", param)
