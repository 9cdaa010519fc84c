"""What a chat request may not ask for, and what is ignored."""

from __future__ import annotations

import logging
from typing import Any

import httpx
import pytest

from tests.server.chat_calls import CHAT, PATH, answer, refusal
from tests.server.stub_engine import StubEngine


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": True}, "n"),
        ({"n": 0}, "n"),
        ({"n": 1.5}, "n"),
        ({"n": "1"}, "n"),
        ({"temperature": "0.5"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"seed": 2**64}, "seed"),
        ({"seed": 10**30}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": [1]}, "stop[0]"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop_token_ids": [8192]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"9000": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": "true"}, "stream"),
        ({"best_of": 3}, "best_of"),
        ({"n": 4, "best_of": 3}, "best_of"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [1]}, "messages[0]"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0]",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "file"}]}
                ]
            },
            "messages[0].content[1]",
        ),
        (
            {"chat_template_kwargs": {"enable_thinking": "false"}},
            "chat_template_kwargs.enable_thinking",
        ),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"reasoning_effort": 1}, "reasoning_effort"),
    ],
)
async def test_refused_values(
    http: httpx.AsyncClient, engine: StubEngine, fields: dict[str, Any], param: str
) -> None:
    """S2: facts 1.1, a wrong type or range is a 400 that names the field; nothing runs."""
    error = await refusal(http, **fields)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert param.split("[")[0].split(".")[0] in error["message"]
    assert engine.requests == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tools", {}),
        ("tool_choice", "auto"),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("parallel_tool_calls", False),
        ("functions", [{"name": "f"}]),
        ("function_call", "auto"),
        ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}),
        ("structured_outputs", {"regex": "a+"}),
        ("guided_json", {"type": "object"}),
        ("guided_regex", "a"),
        ("guided_choice", ["a"]),
        ("guided_grammar", "root ::= 'a'"),
        ("modalities", ["text", "audio"]),
        ("chat_template", "{{ messages }}"),
    ],
)
async def test_unsupported_fields_are_refused(
    http: httpx.AsyncClient, name: str, value: object
) -> None:
    """S2: facts 1.1 and row 20, what is not enforced is never accepted."""
    assert (await refusal(http, **{name: value}))["param"] == name


async def test_ignored_fields_are_logged_once(
    http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    """S2: facts 1.1, known harmless and unknown fields are ignored, one log line per name."""
    caplog.set_level(logging.INFO)
    ignored = {
        "user": "u", "safety_identifier": "s", "metadata": {"a": "b"}, "store": False,
        "service_tier": "auto", "prompt_cache_key": "k", "prediction": {}, "verbosity": "low",
        "moderation": 1, "x_unknown": [1],
    }  # fmt: skip
    harmless = {
        "tools": [], "tool_choice": "none", "functions": [], "function_call": "none",
        "response_format": {"type": "text"}, "modalities": ["text"], "best_of": 1,
    }  # fmt: skip
    for _ in range(2):
        await answer(http, **ignored, **harmless)
    lines = [record.getMessage() for record in caplog.records if "ignored" in record.getMessage()]
    assert len(lines) == len(ignored)
    assert all(any(name in line for line in lines) for name in ignored)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"\xff\xfe",
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [{"role": "user", "content": "\\udc00 x"}]}',
        b'{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}',
        b'{"messages": [{"role": "user", "content": "a"}], "temperature": 1e999}',
        b'{"messages": [{"role": "user", "content": "a"}], "n": 1, "n": 2}',
        b'{"messages": [{"role": "user", "role": "system", "content": "a"}]}',
        b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"messages": [{"role": "user", "content": "a"}]} x',
        b'{"max_tokens": ' + b"9" * 10_000 + b"}",
    ],
)
async def test_bad_json_is_400(http: httpx.AsyncClient, body: bytes) -> None:
    """S2: facts 1.2 row 8 and 1.5, a body that is no JSON object is a 400, never a 500."""
    response = await http.post(PATH, content=body)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert (await http.post(PATH, json=CHAT)).status_code == 200


async def test_prompt_that_fills_the_window(http: httpx.AsyncClient) -> None:
    """S2: row 25 and facts 1.5, the code and the words by which clients know an overflow."""
    long = [{"role": "user", "content": "word " * 400}]
    for fields in ({}, {"max_tokens": 5}, {"stream": True}, {"min_tokens": 3}):
        error = await refusal(http, messages=long, **fields)
        assert error["code"] == "context_length_exceeded"
        assert error["param"] == "messages"
        assert error["message"].startswith(
            "This model's maximum context length is 256 tokens. However, "
        )
