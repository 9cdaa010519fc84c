"""Which API error an exception of the engine becomes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from engine.client import EngineDeadError, QueueFullError
from engine.request import ContextLengthError, SamplingParams
from server.errors import (
    AuthenticationError,
    BodyTooLargeError,
    InternalError,
    UnavailableError,
    engine_error,
    refusal,
)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1.0),
        ("top_p", 2.0),
        ("top_k", -5),
        ("min_p", 2.0),
        ("presence_penalty", 3.0),
        ("frequency_penalty", 3.0),
        ("repetition_penalty", -1.0),
        ("logit_bias", {1: 500.0}),
        ("seed", -(2**70)),
        ("n", 0),
        ("max_tokens", -1),
        ("min_tokens", 99),
        ("stop", [""]),
        ("stop", ["a"] * 99),
        ("stop_token_ids", list(range(99))),
        ("logprobs", 99),
        ("prompt_logprobs", -1),
    ],
)
def test_every_refused_parameter_is_named(name: str, value: Any) -> None:
    """S2: facts 1.5, a 400 carries the field in `param`. Oracle: the field that was bad."""
    with pytest.raises(ValueError) as error:
        SamplingParams(**{name: value})
    error_object = refusal(error.value, prompt_field="messages").error
    assert error_object.param == name
    assert error_object.type == "invalid_request_error"


def test_prompt_errors_name_the_endpoints_field() -> None:
    """S2: the engine says prompt; a chat client knows that field as messages."""
    assert (
        refusal(ValueError("prompt must hold"), prompt_field="messages").error.param == "messages"
    )
    assert refusal(ValueError("Something else"), prompt_field="messages").error.param is None
    overflow = refusal(ContextLengthError("This model's maximum"), prompt_field="prompt").error
    assert (overflow.param, overflow.code) == ("prompt", "context_length_exceeded")


def test_statuses_and_headers() -> None:
    """S2: facts 1.5, the table of statuses and the headers that clients act on."""
    full = engine_error(QueueFullError())
    assert (full.status, full.headers) == (503, {"retry-after": "1"})
    dead = engine_error(EngineDeadError("pid 7 at /srv/x"))
    assert dead.status == 500
    assert "/srv" not in dead.error.message
    assert UnavailableError("x").status == 503
    assert "retry-after" in UnavailableError("x").headers
    assert AuthenticationError().status == 401
    assert BodyTooLargeError(5).status == 413
    assert InternalError(is_final=True).headers == {"x-should-retry": "false"}


def test_body_shape() -> None:
    """S2: facts 1.5, null stands for an absent param and code."""
    assert msgspec.json.decode(msgspec.json.encode(InternalError().body)) == {
        "error": {
            "message": "The server had an internal error.",
            "type": "server_error",
            "param": None,
            "code": "internal_error",
        }
    }
