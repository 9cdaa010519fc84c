"""Chat templates of checkpoints: from messages to a prompt, as text or token ids."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jinja2

from engine.chat.control_text import ControlText, Disguise, hide_in, strings_in, unused_codes
from engine.chat.messages import MessageError, fail, normalize_messages
from engine.chat.template_environment import build_environment
from engine.tokens import Tokenizer

MAX_RENDERED_CHARS = 2**24
MAX_RENDER_S = 20.0
MAX_VARIABLES = 64
MAX_FILE_BYTES = 2**24

_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_RESERVED_NAMES = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        *_TOKEN_NAMES,
    }
)
# What a template may raise over messages it was not written for.
_TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RecursionError,
)


@dataclass(frozen=True, kw_only=True)
class _Chat:
    """The client's part of a prompt, checked."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    variables: dict[str, Any]
    add_generation_prompt: bool
    continue_final_message: bool

    @property
    def texts(self) -> list[str]:
        return list(strings_in([self.messages, self.tools, self.variables]))

    def hidden(self, disguise: Disguise) -> _Chat:
        return replace(
            self,
            messages=hide_in(self.messages, disguise),
            tools=hide_in(self.tools, disguise),
            variables=hide_in(self.variables, disguise),
        )


class ChatTemplate:
    """The compiled template of a checkpoint, or several by name.

    `sources` maps names to Jinja text: "default", and "tool_use" for requests with tools.
    `special_tokens` are the strings that templates know as `bos_token`, `eos_token` and so on.

    Raises:
        ValueError: a source is no valid template.
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        environment = build_environment()
        try:
            self._templates = {
                name: environment.from_string(source) for name, source in sources.items()
            }
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"line {error.lineno}: {error.message}") from error
        self._special_tokens = dict(special_tokens)

    @classmethod
    def load(cls, folder: Path) -> ChatTemplate | None:
        """chat_template.jinja, else `chat_template` of tokenizer_config.json, else None.

        Raises:
            ValueError: a file cannot be read or holds no template; the message names it.
        """
        config_file = folder / "tokenizer_config.json"
        config = _read_config(config_file) if config_file.is_file() else {}
        file = folder / "chat_template.jinja"
        if file.is_file():
            sources = {"default": _read_text(file)}
        else:
            file = config_file
            sources = _sources_from(config.get("chat_template"), file)
        if not sources:
            return None
        try:
            return cls(sources, _special_tokens_from(config))
        except ValueError as error:
            raise ValueError(f"{file}: not a valid chat template ({error})") from error

    def render(
        self,
        messages: object,
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> str:
        """The prompt as text, as transformers renders it.

        Raises:
            MessageError: the request is at fault, or the template refuses it.
        """
        return self._render(
            _check_chat(
                messages,
                tools,
                chat_template_kwargs,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
            )
        )

    def encode_prompt(
        self,
        tokenizer: Tokenizer,
        messages: object,
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[int]:
        """The prompt as token ids; control tokens spelled by the client are plain text.

        Raises:
            MessageError: the request is at fault, or the template refuses it.
        """
        chat = _check_chat(
            messages,
            tools,
            chat_template_kwargs,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        control = ControlText(tokenizer)
        texts = chat.texts
        if not any(map(control.is_suspicious, texts)):
            return control.encode(self._render(chat), None)
        disguise = Disguise(control, unused_codes(texts, len(control.alphabet)))
        return control.encode(self._render(chat.hidden(disguise)), disguise)

    def _render(self, chat: _Chat) -> str:
        template = self._templates.get("tool_use") if chat.tools else None
        template = template or self._templates.get("default")
        if template is None:
            fail("tools", "must be given: this checkpoint's only chat template is for tool use")
        messages = chat.messages
        mark = ""
        if chat.continue_final_message:
            # The space after the mark shows whether the template trims the content.
            mark = chr(unused_codes(chat.texts, 1)) + " "
            messages = [*messages[:-1], messages[-1] | {"content": messages[-1]["content"] + mark}]
        variables = {
            **self._special_tokens,
            **chat.variables,
            "messages": messages,
            "tools": chat.tools,
            "documents": None,
            "add_generation_prompt": chat.add_generation_prompt,
        }
        rendered = _run(template, variables)
        return _cut_at(rendered, mark) if mark else rendered


def _check_chat(
    messages: object,
    tools: list[dict[str, Any]] | None,
    variables: dict[str, Any] | None,
    *,
    add_generation_prompt: bool,
    continue_final_message: bool,
) -> _Chat:
    if continue_final_message and add_generation_prompt:
        fail("continue_final_message", "and add_generation_prompt exclude each other")
    normal = normalize_messages(messages)
    if continue_final_message and normal[-1]["role"] != "assistant":
        fail("continue_final_message", "needs a last message of role assistant")
    variables = variables or {}
    if len(variables) > MAX_VARIABLES:
        fail("chat_template_kwargs", f"may hold at most {MAX_VARIABLES} values")
    for name, value in variables.items():
        if name in _RESERVED_NAMES or not name.isidentifier():
            fail(f"chat_template_kwargs.{name}", "cannot be set")
        # Templates test `is false`: any other type would silently mean true.
        if name == "enable_thinking" and not isinstance(value, bool):
            fail("chat_template_kwargs.enable_thinking", "must be true or false")
    return _Chat(
        messages=normal,
        tools=tools or None,
        variables=variables,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
    )


def _run(template: jinja2.Template, variables: dict[str, Any]) -> str:
    parts: list[str] = []
    num_chars = 0
    deadline = time.monotonic() + MAX_RENDER_S
    try:
        for part in template.generate(variables):
            parts.append(part)
            num_chars += len(part)
            if num_chars > MAX_RENDERED_CHARS or time.monotonic() > deadline:
                break
        else:
            return "".join(parts)
    except _TEMPLATE_FAULTS as error:
        reason = str(error)[:500]
        raise MessageError(f"the chat template refuses the messages: {reason}", "messages") from (
            error
        )
    fail("messages", f"render to more than {MAX_RENDERED_CHARS} characters, or too slowly")


def _cut_at(rendered: str, mark: str) -> str:
    """The text before the last `mark`, without spaces that the template would have trimmed."""
    before, found, after = rendered.rpartition(mark[0])
    if not found:
        fail("continue_final_message", "does not work here: the template drops the last message")
    return before if after.startswith(mark[1:]) else before.rstrip()


def _read_text(file: Path) -> str:
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise ValueError(f"larger than {MAX_FILE_BYTES} bytes")
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: cannot be read ({error})") from error


def _read_config(file: Path) -> dict[str, Any]:
    text = _read_text(file)
    try:
        config = json.loads(text)
        if isinstance(config, dict):
            return config
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: not valid JSON ({error})") from error
    raise ValueError(f"{file}: must hold a JSON object")


def _sources_from(value: object, file: Path) -> dict[str, str]:
    """A template is one string, or a list of {name, template}."""
    match value:
        case None:
            return {}
        case str():
            return {"default": value}
        case list():
            named = {}
            for entry in value:
                match entry:
                    case {"name": str(name), "template": str(source)}:
                        named[name] = source
                    case _:
                        raise ValueError(f"{file}: chat_template entries need name and template")
            return named
    raise ValueError(f"{file}: chat_template must be a string or a list of named templates")


def _special_tokens_from(config: Mapping[str, Any]) -> dict[str, str]:
    tokens = {}
    for name in _TOKEN_NAMES:
        match config.get(name):
            case str(token) | {"content": str(token)}:
                tokens[name] = token
    return tokens
