"""The tokenizer endpoints."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from engine.tokens import Tokenizer

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello 🙂"}]}


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_tokenize_and_back(
    http: httpx.AsyncClient, tokenizer: Tokenizer, prefix: str
) -> None:
    """S2: facts 1.8, /tokenize and /detokenize under both paths."""
    text = "Hello <|im_start|>user 🙂"
    body = (await http.post(f"{prefix}/tokenize", json={"prompt": text})).json()
    ids = tokenizer.encode(text, parse_special=True, add_special_tokens=True)
    assert body == {"count": len(ids), "max_model_len": 256, "tokens": ids, "token_strs": None}
    back = (await http.post(f"{prefix}/detokenize", json={"tokens": ids})).json()
    assert back == {"prompt": text}
    asked = {"prompt": "Hello", "return_token_strs": True, "add_special_tokens": False}
    strings = (await http.post(f"{prefix}/tokenize", json=asked)).json()["token_strs"]
    assert "".join(strings) == "Hello"


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "none"},
        {"add_generation_prompt": False},
    ],
)
async def test_count_is_what_usage_says(http: httpx.AsyncClient, extra: dict[str, Any]) -> None:
    """S2: row 25, count == usage.prompt_tokens of the same request, chat and text."""
    counted = (await http.post("/tokenize", json=CHAT | extra)).json()["count"]
    body = (await http.post("/v1/chat/completions", json=CHAT | extra)).json()
    assert body["usage"]["prompt_tokens"] == counted
    counted = (await http.post("/tokenize", json={"prompt": "a b c"})).json()["count"]
    body = (await http.post("/v1/completions", json={"prompt": "a b c"})).json()
    assert body["usage"]["prompt_tokens"] == counted


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", CHAT | {"prompt": "x"}, "prompt"),
        ("/tokenize", {"prompt": ["x"]}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", CHAT | {"tools": [{"type": "function"}]}, "tools"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [8192]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens[0]"),
    ],
)
async def test_refused(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], param: str
) -> None:
    """S2: a malformed tokenizer request is a 400 that names the field."""
    response = await http.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_unknown_model_is_404(http: httpx.AsyncClient) -> None:
    """S2: facts 1.8, the tokenizer endpoints know the served names too."""
    response = await http.post("/tokenize", json={"prompt": "x", "model": "other"})
    assert response.status_code == 404


@pytest.mark.parametrize("path", ["/tokenizer_info", "/v1/tokenizer_info"])
async def test_tokenizer_info(http: httpx.AsyncClient, path: str) -> None:
    """S2: facts 1.8, what clients need to rebuild the tokenizer's behaviour."""
    info = (await http.get(path)).json()
    assert info["tokenizer_class"]
    assert "im_start" in info["chat_template"]
