"""Reading request bodies."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.errors import BadRequestError
from server.service.request_schema import (
    MAX_LOGGED_FIELD_NAMES,
    CompletionRequest,
    DetokenizeRequest,
    RequestReader,
    parse_json_object,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=4),
    max_leaves=20,
)  # fmt: skip


@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), JSON, max_size=5))
def test_valid_objects_are_read(value: dict[str, Any]) -> None:
    """S2: every JSON object is read as it is. Oracle: the standard library."""
    assert parse_json_object(json.dumps(value).encode()) == value
    assert parse_json_object(json.dumps(value, ensure_ascii=False).encode()) == value


@given(st.binary(max_size=64))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    """S2: no byte string raises anything but the 400."""
    try:
        assert isinstance(parse_json_object(data), dict)
    except BadRequestError as error:
        assert error.status == 400


@given(st.dictionaries(st.sampled_from(sorted(CompletionRequest.__struct_fields__)), JSON))
def test_any_values_are_read_or_refused(body: dict[str, Any]) -> None:
    """S2: no JSON value in a known field raises anything but a 400 that names a field."""
    try:
        RequestReader().read(body, CompletionRequest)
    except BadRequestError as error:
        assert error.error.param is not None


def test_integral_floats_are_integers() -> None:
    """S2: facts 1.1, 8.0 is 8, also in lists; 8.5 and 1e400 are not."""
    fields = RequestReader().read(
        {"prompt": [[1.0, 2], [3.0]], "n": 2.0, "seed": -1.0}, CompletionRequest
    )
    assert fields.prompt == [[1, 2], [3]]
    assert (fields.n, fields.seed) == (2, -1)
    assert all(type(item) is int for item in fields.prompt[0])
    tokens = RequestReader().read({"tokens": [4.0]}, DetokenizeRequest).tokens
    assert [type(item) for item in tokens] == [int]
    with pytest.raises(BadRequestError):
        RequestReader().read({"prompt": [1.5]}, CompletionRequest)


def test_log_of_ignored_names_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    """S6: a client that invents names without end fills neither the log nor the memory."""
    caplog.set_level(logging.INFO)
    reader = RequestReader()
    for index in range(2 * MAX_LOGGED_FIELD_NAMES):
        reader.read({"prompt": "a", f"name{index}": 1, "x" * 5000: 1}, CompletionRequest)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == MAX_LOGGED_FIELD_NAMES
    assert max(map(len, lines)) < 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"a": 1, "a": 2}', "'a'"),
        (b'{"a": {"b": 1, "b": 1}}', "'b'"),
        (b'{"a": [{"c": 1}, {"c": 1, "c": 3}]}', "'c'"),
    ],
)
def test_repeated_keys(body: bytes, param: str) -> None:
    """S2: an object that says two things about one name is refused, at any depth."""
    with pytest.raises(BadRequestError, match=param):
        parse_json_object(body)
