"""S2, S6: small bodies that once cost much more than their size."""

from __future__ import annotations

import httpx
import pytest

from server.errors import BadRequestError
from server.service.request_schema import parse_json_object


def test_a_repeated_key_among_many_is_found_in_linear_time() -> None:
    """S2: 300,000 keys, the last one twice; quadratic work would take hours. Oracle: the key."""
    keys = ",".join(f'"{number:06d}":0' for number in range(300_000))
    with pytest.raises(BadRequestError, match="299999"):
        parse_json_object(f'{{{keys},"299999":0}}'.encode())


@pytest.mark.parametrize("depth", [3, 600, 900])
async def test_deeply_nested_prompts_are_400(http: httpx.AsyncClient, depth: int) -> None:
    """S2: lists of lists of lists are no prompt. Oracle: OpenAI's error shape."""
    body = b'{"prompt":' + b"[" * depth + b"]" * depth + b"}"
    answer = await http.post("/v1/completions", content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
