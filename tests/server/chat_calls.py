"""Chat calls that the tests share."""

from __future__ import annotations

from typing import Any

import httpx

PATH = "/v1/chat/completions"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


async def answer(http: httpx.AsyncClient, **fields: object) -> dict[str, Any]:
    """The body of a successful answer."""
    response = await http.post(PATH, json=CHAT | fields)
    assert response.status_code == 200, response.text
    return dict(response.json())


async def refusal(http: httpx.AsyncClient, **fields: object) -> dict[str, Any]:
    """The error object of a request that is refused with 400."""
    response = await http.post(PATH, json=CHAT | fields)
    assert response.status_code == 400, response.text
    return dict(response.json()["error"])
