"""Where a chat answer is cut, and the log-probabilities of its tokens."""

from __future__ import annotations

import httpx
import pytest

from engine.request import FinishReason, RequestUpdate, TokenLogprob
from engine.tokens import Tokenizer
from tests.server.chat_calls import answer
from tests.server.stub_engine import EOS, StubEngine, reply_with


@pytest.mark.parametrize("tokens_per_update", [1, 3, 100])
async def test_stop_string(
    http: httpx.AsyncClient, engine: StubEngine, tokenizer: Tokenizer, tokens_per_update: int
) -> None:
    """S3: rows 23 and 8, text, entries and usage are cut at one boundary. Oracle: str.index."""
    text = "One two\nUser: three 🙂"
    engine.reply = reply_with(tokenizer, text)
    engine.tokens_per_update = tokens_per_update
    body = await answer(http, stop=["\nUser:"], logprobs=True, return_token_ids=True)
    choice = body["choices"][0]
    assert choice["message"]["content"] == "One two"
    assert choice["finish_reason"] == "stop"
    joined = b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"]["content"])
    assert joined == b"One two"
    assert body["usage"]["completion_tokens"] == len(choice["token_ids"])
    kept = tokenizer.decode(choice["token_ids"], skip_special_tokens=True)
    assert kept.startswith("One two\nUser:")
    assert not tokenizer.decode(choice["token_ids"][:-1], skip_special_tokens=True).startswith(
        "One two\nUser:"
    )
    shown = await answer(http, stop="\nUser:", include_stop_str_in_output=True)
    assert shown["choices"][0]["message"]["content"] == "One two\nUser:"


@pytest.mark.parametrize(
    ("text", "stop", "content"),
    [
        ("The answer is", "swer", "The an"),
        ("so é🙂 on", "🙂", "so é"),
        ("a 🙂 b", "🙂", "a "),
        ("a 🙂 b", " b", "a 🙂"),
    ],
)
async def test_stop_inside_a_token(
    http: httpx.AsyncClient,
    engine: StubEngine,
    tokenizer: Tokenizer,
    text: str,
    stop: str,
    content: str,
) -> None:
    """S3: facts 1.6, a token that the stop string cuts in two shows only its visible bytes."""
    engine.reply = reply_with(tokenizer, text)
    body = await answer(http, stop=stop, logprobs=True)
    choice = body["choices"][0]
    assert choice["message"]["content"] == content
    entries = choice["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries) == content.encode()
    assert "".join(entry["token"] for entry in entries).replace("\ufffd", "") in content


async def test_stop_after_broken_bytes(
    http: httpx.AsyncClient, engine: StubEngine, tokenizer: Tokenizer
) -> None:
    """S3: facts 1.6, entries end at the cut also where U+FFFD stands for other bytes."""
    [broken] = [i for i in range(8192) if tokenizer.token_bytes(i) == b"\xff"]
    rest = tokenizer.encode(" one two", parse_special=False, add_special_tokens=False)
    engine.reply = lambda request: [broken, *rest]
    choice = (await answer(http, stop=" two", logprobs=True))["choices"][0]
    assert choice["message"]["content"] == "\ufffd one"
    joined = b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"]["content"])
    assert joined == b"\xff one"


async def test_stop_token_has_no_text(
    http: httpx.AsyncClient, engine: StubEngine, tokenizer: Tokenizer
) -> None:
    """S3: a stop token ends the text before itself and counts in usage, as EOS does."""
    ids = list(engine.reply(None))  # type: ignore[arg-type]
    body = await answer(http, stop_token_ids=[ids[-1]], logprobs=True, return_token_ids=True)
    choice = body["choices"][0]
    expected = tokenizer.decode(ids[:-1], skip_special_tokens=True)
    assert choice["message"]["content"] == expected
    assert choice["token_ids"] == ids
    joined = b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"]["content"])
    assert joined == expected.encode()


async def test_eos_is_never_shown(http: httpx.AsyncClient) -> None:
    """S3: facts 3, <|im_end|> is not leaked even when special tokens are kept."""
    body = await answer(http, skip_special_tokens=False)
    assert body["choices"][0]["message"]["content"] == "The answer is 42."


TEXTS = ["The answer is 42.", "日本語 🙂 text", "é🙂\u2028x", " lead <think> y", "\n\n"]


@pytest.mark.parametrize("text", TEXTS)
async def test_logprobs_bytes_are_the_content(
    http: httpx.AsyncClient, engine: StubEngine, tokenizer: Tokenizer, text: str
) -> None:
    """S3: facts 1.6, concat(bytes) == content; one entry per visible token, k candidates."""
    engine.reply = reply_with(tokenizer, text)
    body = await answer(http, logprobs=True, top_logprobs=2)
    choice = body["choices"][0]
    entries = choice["logprobs"]["content"]
    assert choice["logprobs"]["refusal"] is None
    assert choice["message"]["content"] == text
    assert b"".join(bytes(entry["bytes"]) for entry in entries) == text.encode()
    assert len(entries) == body["usage"]["completion_tokens"] - 1
    for entry in entries:
        assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
        assert len(entry["top_logprobs"]) == 2
        assert entry["top_logprobs"][0]["logprob"] == entry["logprob"]
    plain = await answer(http, logprobs=True)
    assert all(e["top_logprobs"] == [] for e in plain["choices"][0]["logprobs"]["content"])


async def test_unfinished_character_at_the_end(
    http: httpx.AsyncClient, engine: StubEngine, tokenizer: Tokenizer
) -> None:
    """S3: row 26, an emoji cut by max_tokens gives one U+FFFD, its true bytes, and no error."""
    ids = tokenizer.encode("hi 🙂", parse_special=False, add_special_tokens=False)
    assert len(ids) > 3
    engine.reply = lambda request: ids
    body = await answer(http, max_tokens=len(ids) - 1, logprobs=True)
    choice = body["choices"][0]
    assert choice["message"]["content"] == "hi \ufffd"
    joined = b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"]["content"])
    assert joined == b"".join(tokenizer.token_bytes(i) for i in ids[:-1])
    assert joined.startswith(b"hi ")


async def test_special_logprobs_stay_json(http: httpx.AsyncClient, engine: StubEngine) -> None:
    """S3: facts 1.6, -inf and NaN become -9999.0, not null."""
    engine.failure = RequestUpdate(
        request_id="x",
        token_ids=[50, EOS],
        logprobs=[
            TokenLogprob(50, float("-inf"), [(50, float("-inf")), (51, float("nan"))]),
            TokenLogprob(EOS, 0.0, []),
        ],
        finish_reason=FinishReason.STOP,
    )
    body = await answer(http, logprobs=True, top_logprobs=2)
    [entry] = body["choices"][0]["logprobs"]["content"]
    assert entry["logprob"] == -9999.0
    assert [top["logprob"] for top in entry["top_logprobs"]] == [-9999.0, -9999.0]


async def test_prompt_logprobs_and_token_ids(http: httpx.AsyncClient, engine: StubEngine) -> None:
    """S2: facts 1.1, prompt_logprobs and return_token_ids are honoured."""
    body = await answer(http, prompt_logprobs=1, return_token_ids=True)
    prompt = engine.requests[-1].prompt_token_ids
    assert body["prompt_token_ids"] == prompt
    assert len(body["prompt_logprobs"]) == len(prompt)
    assert body["prompt_logprobs"][0] is None
    for token_id, entry in zip(prompt[1:], body["prompt_logprobs"][1:], strict=True):
        assert entry[str(token_id)]["rank"] == 1
        assert set(entry[str(token_id)]) == {"logprob", "rank", "decoded_token"}
    plain = await answer(http)
    assert "prompt_logprobs" not in plain
    assert "prompt_token_ids" not in plain
