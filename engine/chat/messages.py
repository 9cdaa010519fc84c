"""OpenAI chat messages, checked and brought into the one form that chat templates read."""

from __future__ import annotations

import json
from typing import Any, NoReturn

Message = dict[str, Any]

MAX_MESSAGES = 8192
MAX_CONTENT_PARTS = 8192
MAX_TOOL_CALLS = 1024
MAX_NAME_CHARS = 1024

_TEXT_KEYS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
_ROLES = ("system", "developer", "user", "assistant", "tool")


class MessageError(ValueError):
    """The caller's messages or template arguments are at fault. `param` names the field."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


def normalize_messages(messages: object) -> list[Message]:
    """The messages of a chat request as templates want them.

    Content is text; `developer` is `system`; leading system messages are one, later ones are
    user turns in their place; arguments of tool calls are objects; reasoning is
    `reasoning_content`; tool results stand in the order of their calls. Keys that no template
    reads are left out. Normalizing twice changes nothing.

    Raises:
        MessageError: a message is malformed or of a kind that is not supported.
    """
    if not isinstance(messages, list) or not messages:
        fail("messages", "must be a non-empty list of message objects")
    if len(messages) > MAX_MESSAGES:
        fail("messages", f"may hold at most {MAX_MESSAGES} messages")
    found = [_normalize(message, f"messages[{i}]") for i, message in enumerate(messages)]
    if not any(message["role"] == "user" for message in found):
        fail("messages", "must hold at least one message of role user")
    return _place_system_messages(_order_tool_results(found))


def fail(param: str, rule: str) -> NoReturn:
    """Refuse the request: `param` breaks `rule`."""
    raise MessageError(f"{param} {rule}", param)


def _normalize(message: object, param: str) -> Message:
    if not isinstance(message, dict):
        fail(param, "must be an object with role and content")
    given = {key: value for key, value in message.items() if value is not None}
    role = given.get("role")
    if role not in _ROLES:
        fail(f"{param}.role", f"must be one of {', '.join(_ROLES)}")
    if "function_call" in given:
        fail(f"{param}.function_call", "is not supported; use tool_calls")
    normal: Message = {"role": "system" if role == "developer" else role}
    if role == "assistant":
        normal |= _normalize_assistant(given, param)
    elif "content" in given or role == "tool":
        normal["content"] = _text_of(given.get("content", ""), f"{param}.content")
    else:
        fail(f"{param}.content", "must be a string or a list of text parts")
    for key in ("name", "tool_call_id"):
        if key in given:
            normal[key] = _name_of(given[key], f"{param}.{key}")
    return normal


def _normalize_assistant(given: Message, param: str) -> Message:
    content = _text_of(given.get("content", given.get("refusal", "")), f"{param}.content")
    reasoning = next((key for key in _REASONING_KEYS if key in given), None)
    normal: Message = {"content": content}
    if reasoning is not None:
        normal["reasoning_content"] = _checked_text(given[reasoning], f"{param}.{reasoning}")
    elif content.lstrip().startswith("<think>") and "</think>" in content:
        # A client that sends back the raw output; templates split it alike.
        inline, _, answer = content.partition("</think>")
        normal["reasoning_content"] = inline.lstrip().removeprefix("<think>").strip("\n")
        normal["content"] = answer.lstrip("\n")
    calls = given.get("tool_calls", [])
    if not isinstance(calls, list) or len(calls) > MAX_TOOL_CALLS:
        fail(f"{param}.tool_calls", f"must be a list of at most {MAX_TOOL_CALLS} calls")
    if calls:
        normal["tool_calls"] = [
            _normalize_call(call, f"{param}.tool_calls[{i}]") for i, call in enumerate(calls)
        ]
    return normal


def _normalize_call(call: object, param: str) -> Message:
    if not isinstance(call, dict) or call.get("type") not in (None, "function"):
        fail(param, "must be an object of type function")
    function = call.get("function")
    if not isinstance(function, dict):
        fail(f"{param}.function", "must be an object with name and arguments")
    normal: Message = {
        "type": "function",
        "function": {
            "name": _name_of(function.get("name"), f"{param}.function.name"),
            "arguments": _arguments_of(function.get("arguments"), f"{param}.function.arguments"),
        },
    }
    if call.get("id") is not None:
        normal["id"] = _name_of(call["id"], f"{param}.id")
    return normal


def _arguments_of(value: object, param: str) -> Message:
    """The wire carries arguments as JSON text; templates go over the items of an object."""
    try:
        if isinstance(value, str) and value:
            value = json.loads(value, parse_constant=_refuse_constant)
        arguments = {} if value is None or value == "" else value
        if isinstance(arguments, dict):
            # Also refuses lone surrogates that the JSON text spelled as escapes.
            json.dumps(arguments, ensure_ascii=False).encode()
            return arguments
    except (ValueError, RecursionError) as error:
        raise MessageError(f"{param} must be a JSON object ({error})", param) from error
    fail(param, "must be a JSON object")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _text_of(content: object, param: str) -> str:
    if not isinstance(content, list):
        return _checked_text(content, param)
    if len(content) > MAX_CONTENT_PARTS:
        fail(param, f"may hold at most {MAX_CONTENT_PARTS} parts")
    return "".join(_text_of_part(part, f"{param}[{i}]") for i, part in enumerate(content))


def _text_of_part(part: object, param: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str) or kind not in _TEXT_KEYS:
        fail(param, "must be a text part; only text is supported")
    key = _TEXT_KEYS[kind]
    return _checked_text(part.get(key), f"{param}.{key}")


def _checked_text(value: object, param: str) -> str:
    if not isinstance(value, str):
        fail(param, "must be a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise MessageError(f"{param} holds a lone surrogate", param) from error
    return value


def _name_of(value: object, param: str) -> str:
    name = _checked_text(value, param)
    if not 1 <= len(name) <= MAX_NAME_CHARS:
        fail(param, f"must have 1 to {MAX_NAME_CHARS} characters")
    return name


def _order_tool_results(messages: list[Message]) -> list[Message]:
    """Put each run of tool results into the order of their calls, where all carry ids."""
    order: dict[str, int] = {}
    ordered: list[Message] = []
    run: list[Message] = []
    num_calls = 0
    for i, message in enumerate(messages):
        call_id = message.get("tool_call_id") if message["role"] == "tool" else None
        if call_id is not None and call_id not in order:
            fail(f"messages[{i}].tool_call_id", "names no earlier tool call")
        if message["role"] == "tool":
            run.append(message)
            continue
        ordered += _in_call_order(run, order)
        run = []
        ordered.append(message)
        for call in message.get("tool_calls", []):
            num_calls += 1
            if "id" in call:
                order[call["id"]] = num_calls
    return ordered + _in_call_order(run, order)


def _in_call_order(results: list[Message], order: dict[str, int]) -> list[Message]:
    if not all("tool_call_id" in result for result in results):
        return results
    return sorted(results, key=lambda result: order[result["tool_call_id"]])


def _place_system_messages(messages: list[Message]) -> list[Message]:
    """One system message at the start; later ones become user turns where they stand.

    Templates refuse a later system message, and moving its text to the front would change
    the beginning of a prompt that is otherwise the same every turn.
    """
    num_leading = next(i for i, message in enumerate(messages) if message["role"] != "system")
    placed = messages[:1] if num_leading else []
    if num_leading > 1:
        texts = [message["content"] for message in messages[:num_leading]]
        text = "\n\n".join(text for text in texts if text.strip())
        placed = [messages[0] | {"content": text}]
    for message in messages[num_leading:]:
        is_system = message["role"] == "system"
        placed.append(message | {"role": "user"} if is_system else message)
    return placed
