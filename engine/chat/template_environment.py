"""The sandbox in which a checkpoint's chat template runs. The template is untrusted code."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes, pass_eval_context
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


def build_environment() -> ImmutableSandboxedEnvironment:
    """What transformers gives to templates: same syntax, filters and globals."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _format_now
    environment.globals["dict"] = _DictBuilder()
    environment.globals["namespace"] = _SafeNamespace
    return environment


class _GenerationTag(Extension):
    """{% generation %} marks assistant text for training; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_content", [])
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    @pass_eval_context
    def _content(self, _context: nodes.EvalContext, caller: jinja2.runtime.Macro) -> str:
        return caller()


class _DictBuilder:
    """`dict(...)` in a template, without the attributes of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:  # noqa: ANN401
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Any, value: Any = None) -> dict[Any, Any]:  # noqa: ANN401
        return dict.fromkeys(keys, value)


class _SafeNamespace(Namespace):
    """`namespace(...)` in a template; names that begin with an underscore are refused."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        self, *positional = args
        values = dict(*positional, **kwargs)
        for name in values:
            _check_attribute(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:  # noqa: ANN401
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"{name!r} cannot be set on a namespace")


def _to_json(
    value: Any,  # noqa: ANN401
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter sorts keys and escapes for HTML, which changes prompts."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _format_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
