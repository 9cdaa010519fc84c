"""Text completions: prompt forms, echo, scoring, and checkpoints without a tokenizer."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import httpx
import pytest

from engine.request import TokenLogprob
from engine.tokens import Tokenizer
from server.app import AppOptions, build_app
from server.service.logprobs import CompletionLogprobsBuilder
from server.service.prompts import text_offsets
from server.service.served_model import ServedModel
from server.service.state import ServerState
from tests.server.stub_engine import EOS, StubEngine, logprob_of, reply_with

PATH = "/v1/completions"


async def complete(http: httpx.AsyncClient, **fields: object) -> dict[str, Any]:
    """The body of a successful answer."""
    response = await http.post(PATH, json=fields)
    assert response.status_code == 200, response.text
    return dict(response.json())


async def stream(http: httpx.AsyncClient, **fields: object) -> list[dict[str, Any]]:
    """The chunks of a streamed answer."""
    response = await http.post(PATH, json=fields | {"stream": True})
    assert response.status_code == 200, response.text
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


async def test_shape(http: httpx.AsyncClient, engine: StubEngine) -> None:
    """S2: facts 1.7, exactly these keys; max_tokens is 16 unless given."""
    body = await complete(http, prompt="Q:")
    assert body.pop("id").startswith("cmpl-")
    assert isinstance(body.pop("created"), int)
    assert body.pop("system_fingerprint")
    usage = body.pop("usage")
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert body == {
        "object": "text_completion",
        "model": "gander-12m",
        "choices": [
            {"index": 0, "text": "The answer is 42.", "logprobs": None, "finish_reason": "stop"}
        ],
    }
    assert engine.requests[-1].params.max_tokens == 16
    await complete(http, prompt="Q:", max_tokens=None)
    assert engine.requests[-1].params.max_tokens == 16


async def test_prompt_forms(
    http: httpx.AsyncClient, engine: StubEngine, tokenizer: Tokenizer
) -> None:
    """S2: facts 1.7, str, [str], [int] and [[int]]; choice index is prompt * n + k."""
    ids = tokenizer.encode("Hello there", parse_special=True, add_special_tokens=True)
    for prompt, expected in (
        ("Hello there", [ids]),
        (["Hello there"], [ids]),
        (ids, [ids]),
        ([ids], [ids]),
        ([float(i) for i in ids], [ids]),
        (["Hello there", "Hello there"], [ids, ids]),
        ([ids, [5, 6]], [ids, [5, 6]]),
    ):
        engine.requests.clear()
        body = await complete(http, prompt=prompt)
        assert [request.prompt_token_ids for request in engine.requests] == expected
        assert body["usage"]["prompt_tokens"] == sum(map(len, expected))
    engine.requests.clear()
    engine.reply = lambda request: [300 + len(request.prompt_token_ids)]
    body = await complete(http, prompt=[[1], [1, 2], [1, 2, 3]], n=2, return_token_ids=True)
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    assert [choice["token_ids"][0] for choice in body["choices"]] == [301, 301, 302, 302, 303, 303]
    assert [choice["prompt_token_ids"] for choice in body["choices"][::2]] == [
        [1],
        [1, 2],
        [1, 2, 3],
    ]
    assert body["usage"]["prompt_tokens"] == 6


async def test_many_prompts_do_not_fill_the_queue(
    http: httpx.AsyncClient, engine: StubEngine
) -> None:
    """S4: one call hands the engine no more requests at once than it runs together (8)."""
    body = await complete(http, prompt=[[i + 1] for i in range(30)])
    assert len(body["choices"]) == 30
    assert engine.most_open == engine.info.max_running_requests


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": [[1], 1]}, "prompt"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": [[1, None]]}, "prompt[0][1]"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [8192]}, "prompt"),
        ({"prompt": [2**70]}, "prompt"),
        ({"prompt": [[1]] * 5000}, "prompt"),
        ({"prompt": [[1]] * 100, "n": 100}, "prompt"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "logprobs": True}, "logprobs"),
        ({"prompt": "a", "best_of": 2}, "best_of"),
        ({"prompt": "a", "n": 3, "best_of": 2}, "best_of"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "echo": "yes"}, "echo"),
        ({"prompt": "a", "response_format": {"type": "json_object"}}, "response_format"),
        ({"prompt": [1] * 256}, "prompt"),
    ],
)
async def test_refused_values(
    http: httpx.AsyncClient, engine: StubEngine, fields: dict[str, Any], param: str
) -> None:
    """S2: facts 1.7, what cannot be served is a 400 that names the field; nothing runs."""
    response = await http.post(PATH, json=fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert engine.requests == []


@pytest.mark.parametrize("best_of", [None, 1, 2])
async def test_harmless_best_of(http: httpx.AsyncClient, best_of: int | None) -> None:
    """S2: facts 1.7, best_of 1, null or n changes nothing."""
    assert len((await complete(http, prompt="a", n=2, best_of=best_of))["choices"]) == 2


async def test_scoring_request(
    http: httpx.AsyncClient, engine: StubEngine, tokenizer: Tokenizer
) -> None:
    """S2: row 21 and facts 1.7, what an evaluation harness sends and slices.

    len(prompt) + 1 entries, the first null, and the greedy test by equal floats.
    """
    prompts = [[70, 71, 72, 73], [80, 81]]
    body = await complete(
        http, prompt=prompts, echo=True, logprobs=1, max_tokens=1, temperature=0, seed=1234
    )
    for prompt, choice in zip(prompts, body["choices"], strict=True):
        logprobs = choice["logprobs"]
        first_output = engine.reply(engine.requests[0])[0]
        assert len(logprobs["tokens"]) == len(prompt) + 1
        expected = [logprob_of(i, 1).logprob for i in [*prompt[1:], first_output]]
        assert logprobs["token_logprobs"] == [None, *expected]
        assert logprobs["top_logprobs"][0] is None
        for logprob, top in zip(expected, logprobs["top_logprobs"][1:], strict=True):
            assert logprob == max(top.values())
        assert choice["text"].startswith(tokenizer.decode(prompt, skip_special_tokens=False))
        assert choice["finish_reason"] == "length"


async def test_scoring_keeps_its_length_at_eos(http: httpx.AsyncClient, engine: StubEngine) -> None:
    """S2: facts 1.7, the entry of a generated EOS exists though it shows no text."""
    engine.reply = lambda request: []
    body = await complete(http, prompt=[70, 71], echo=True, logprobs=0, max_tokens=1)
    [choice] = body["choices"]
    assert choice["finish_reason"] == "stop"
    assert len(choice["logprobs"]["tokens"]) == 3
    assert choice["logprobs"]["text_offset"][-1] == len(choice["text"])


async def test_echo_without_output(http: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
    """S2: facts 1.7, max_tokens 0 is allowed with echo and scores the prompt alone."""
    text = "Some words here"
    ids = tokenizer.encode(text, parse_special=True, add_special_tokens=True)
    body = await complete(http, prompt=text, echo=True, logprobs=2, max_tokens=0)
    [choice] = body["choices"]
    assert choice["text"] == text
    assert choice["finish_reason"] == "length"
    assert len(choice["logprobs"]["tokens"]) == len(ids)
    assert body["usage"]["completion_tokens"] == 0
    full = [5] * 256
    body = await complete(http, prompt=full, echo=True, logprobs=0, max_tokens=0)
    assert len(body["choices"][0]["logprobs"]["tokens"]) == 256


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("text", ["Some words 🙂 then <|im_start|>user", "a b"])
async def test_text_offsets(
    http: httpx.AsyncClient, engine: StubEngine, tokenizer: Tokenizer, echo: bool, text: str
) -> None:
    """S2: facts 1.7, text_offset counts characters of `text`. Oracle: slicing it by offsets."""
    engine.reply = reply_with(tokenizer, " and 日本 more")
    body = await complete(http, prompt=text, echo=echo, logprobs=0, max_tokens=50)
    [choice] = body["choices"]
    assert choice["text"] == (text if echo else "") + " and 日本 more"
    offsets = choice["logprobs"]["text_offset"]
    assert offsets[0] == 0
    assert offsets == sorted(offsets)
    ends = [*offsets[1:], len(choice["text"])]
    for token, start, end in zip(choice["logprobs"]["tokens"], offsets, ends, strict=True):
        if "\ufffd" not in token and end > start:
            assert choice["text"][start:end] == token


def test_offsets_of_tokens_that_the_text_does_not_show(tokenizer: Tokenizer) -> None:
    """S2: facts 1.7, a document token that the tokenizer adds takes no place in the text."""
    [start] = tokenizer.encode("<|endoftext|>", parse_special=True, add_special_tokens=False)
    ids = tokenizer.encode("Some words", parse_special=True, add_special_tokens=False)
    plain = text_offsets(tokenizer, ids, "Some words")
    assert plain[0] == 0
    assert text_offsets(tokenizer, [start, *ids], "Some words") == [0, *plain]
    shown = text_offsets(tokenizer, [start, *ids], "<|endoftext|>Some words")
    assert shown == [0, *(len("<|endoftext|>") + offset for offset in plain)]
    assert max(text_offsets(tokenizer, ids, "So")) == 2


async def test_stop_cut(http: httpx.AsyncClient, engine: StubEngine, tokenizer: Tokenizer) -> None:
    """S3: row 8, entries, ids and usage end with the token that completes the stop string."""
    engine.reply = reply_with(tokenizer, "one two three four")
    body = await complete(http, prompt="x", stop=" three", logprobs=0, return_token_ids=True)
    [choice] = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("one two", "stop")
    num_tokens = body["usage"]["completion_tokens"]
    assert len(choice["token_ids"]) == num_tokens
    assert len(choice["logprobs"]["tokens"]) == num_tokens
    assert max(choice["logprobs"]["text_offset"]) == len("one two")


def test_tokens_that_read_alike(tokenizer: Tokenizer) -> None:
    """S2: facts 1.7, candidates with one text collide; the likeliest is kept."""
    first, second, third = [i for i in range(8192) if tokenizer.token_string(i) == "\ufffd"][:3]
    entry = TokenLogprob(third, -3.0, [(first, -1.0), (second, -2.0)])
    logprobs = CompletionLogprobsBuilder(tokenizer, num_top=2)
    logprobs.add(third, entry, 0)
    assert logprobs.build().top_logprobs == [{"\ufffd": -1.0}]
    assert logprobs.build().token_logprobs == [-3.0]


@pytest.mark.parametrize("tokens_per_update", [1, 3])
async def test_stream_joins_to_the_whole(
    http: httpx.AsyncClient, engine: StubEngine, tokenizer: Tokenizer, tokens_per_update: int
) -> None:
    """S2: facts 1.7, chunks joined equal the unstreamed answer: text, entries, ids, offsets."""
    engine.reply = reply_with(tokenizer, "first 🙂 second\nUser: third")
    engine.tokens_per_update = tokens_per_update
    asked: dict[str, Any] = {
        "prompt": ["Hello", "Other words"], "n": 2, "echo": True, "logprobs": 2,
        "stop": ["\nUser:"], "max_tokens": 50, "return_token_ids": True,
    }  # fmt: skip
    whole = await complete(http, **asked)
    chunks = await stream(http, **asked)
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    for expected in whole["choices"]:
        parts = [
            choice
            for chunk in chunks
            for choice in chunk["choices"]
            if choice["index"] == expected["index"]
        ]
        assert "".join(part["text"] for part in parts) == expected["text"]
        for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            joined = [item for part in parts for item in part["logprobs"][key]]
            assert joined == expected["logprobs"][key]
        assert [i for part in parts for i in part["token_ids"]] == expected["token_ids"]
        assert parts[0]["prompt_token_ids"] == expected["prompt_token_ids"]
        assert not any("prompt_token_ids" in part for part in parts[1:])
        reasons = [part["finish_reason"] for part in parts]
        assert reasons == [None] * (len(parts) - 1) + ["stop"]


async def test_stream_usage(http: httpx.AsyncClient) -> None:
    """S2: rows 1 and 2, usage only when asked: null on all chunks, then one without choices."""
    for options in (None, {}, {"include_usage": False}):
        chunks = await stream(http, prompt="a", stream_options=options)
        assert all("usage" not in chunk for chunk in chunks)
    chunks = await stream(http, prompt="a", stream_options={"include_usage": True})
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == (await complete(http, prompt="a"))["usage"]


@pytest.fixture
def bare_http(engine: StubEngine, model: ServedModel) -> httpx.AsyncClient:
    """A client of a checkpoint that has no tokenizer and no template."""
    front_end = dataclasses.replace(model.front_end, tokenizer=None, template=None)
    engine.tokenizer = None
    state = ServerState()
    state.open(dataclasses.replace(model, front_end=front_end))
    transport = httpx.ASGITransport(app=build_app(state, AppOptions()))
    return httpx.AsyncClient(transport=transport, base_url="http://test")


async def test_no_tokenizer(bare_http: httpx.AsyncClient, engine: StubEngine) -> None:
    """E1: without a tokenizer, id prompts work with text "" and text is refused with a reason."""
    async with bare_http as http:
        engine.reply = lambda request: [7, 8]
        body = await complete(http, prompt=[1, 2], logprobs=1, echo=True, return_token_ids=True)
        [choice] = body["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("", "stop")
        assert choice["token_ids"] == [7, 8, EOS]
        assert choice["logprobs"]["tokens"][-1] == f"token_id:{EOS}"
        chunks = await stream(http, prompt=[1, 2])
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        chat = {"messages": [{"role": "user", "content": "hi"}]}
        for path, asked, param in (
            (PATH, {"prompt": "hi"}, "prompt"),
            (PATH, {"prompt": [1], "stop": "x"}, "stop"),
            ("/v1/chat/completions", chat, "messages"),
            ("/tokenize", {"prompt": "hi"}, "prompt"),
            ("/detokenize", {"tokens": [1]}, "tokens"),
        ):
            response = await http.post(path, json=asked)
            assert response.status_code == 400
            assert response.json()["error"]["param"] == param
            assert "tokenizer" in response.json()["error"]["message"]
