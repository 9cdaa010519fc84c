"""Chat completions that are not streamed: shape, fields, budgets, log-probabilities."""

from __future__ import annotations

import logging
from typing import Any

import httpx
import pytest

from engine.request import FinishReason, RequestUpdate, TokenLogprob
from engine.tokens import Tokenizer
from server.schemas_request import ChatRequest
from server.service import FrontEnd, ServedModel
from server.service_chat import ChatService
from server.service_prompts import encode_chat
from tests.server.stub_engine import EOS, StubEngine, reply_with

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


async def test_shape(http: httpx.AsyncClient, tokenizer: Tokenizer, engine: StubEngine) -> None:
    """S2: facts 1.3, exactly these keys; EOS counts as a token but shows no text."""
    body = await answer(http)
    assert body.pop("id").startswith("chatcmpl-")
    assert isinstance(body.pop("created"), int)
    assert body.pop("system_fingerprint").startswith("deltaloom-")
    num_prompt = len(engine.requests[0].prompt_token_ids)
    num_output = (
        len(tokenizer.encode("The answer is 42.", parse_special=False, add_special_tokens=False))
        + 1
    )
    assert body == {
        "object": "chat.completion",
        "model": "gander-12m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "The answer is 42.", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
        "service_tier": None,
    }


async def test_prompt_goes_through_the_template(
    http: httpx.AsyncClient, engine: StubEngine, tokenizer: Tokenizer
) -> None:
    """S2: the engine gets the rendered chat; thinking can be switched off in two ways."""
    await answer(http)
    default = tokenizer.decode(engine.requests[-1].prompt_token_ids, skip_special_tokens=False)
    assert default.startswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    prompts = []
    for fields in (
        {"reasoning_effort": "none"},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"chat_template_kwargs": {"enable_thinking": True}},
        {"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "none"},
    ):
        await answer(http, **fields)
        ids = engine.requests[-1].prompt_token_ids
        prompts.append(tokenizer.decode(ids, skip_special_tokens=False))
    closed = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert [prompt.endswith(closed) for prompt in prompts] == [True, True, False, False]


async def test_generation_prompt_can_be_left_out_or_continued(
    http: httpx.AsyncClient, engine: StubEngine, tokenizer: Tokenizer
) -> None:
    """S2: facts 1.1, add_generation_prompt and continue_final_message shape the prompt's end."""
    await answer(http, add_generation_prompt=False)
    ids = engine.requests[-1].prompt_token_ids
    assert tokenizer.decode(ids, skip_special_tokens=False).endswith("hi<|im_end|>\n")
    begun = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "The ans"}]
    await answer(http, messages=begun, continue_final_message=True)
    ids = engine.requests[-1].prompt_token_ids
    assert tokenizer.decode(ids, skip_special_tokens=False).endswith("The ans")
    both = await refusal(http, continue_final_message=True, add_generation_prompt=True)
    assert both["param"] == "continue_final_message"


async def test_sampling_fields_reach_the_engine(
    http: httpx.AsyncClient, engine: StubEngine
) -> None:
    """S2: facts 1.1, each honoured field arrives; null is absent; 8.0 is an integer."""
    await answer(
        http,
        temperature=0.5,
        top_p=0.9,
        top_k=7.0,
        min_p=0.1,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.1,
        logit_bias={"5": -100, "6": 2.5},
        seed=123,
        min_tokens=1,
        max_tokens=8.0,
        stop=["zz"],
        stop_token_ids=[4],
        ignore_eos=False,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
    )
    params = engine.requests[-1].params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 7, 0.1)
    assert (params.presence_penalty, params.frequency_penalty) == (1.0, -1.0)
    assert params.repetition_penalty == 1.1
    assert params.logit_bias == {5: -100.0, 6: 2.5}
    assert (params.seed, params.min_tokens, params.max_tokens) == (123, 1, 8)
    assert isinstance(params.max_tokens, int)
    assert (params.stop_strings, list(params.stop_token_ids)) == (("zz",), [4])
    assert params.include_stop_str_in_output
    assert not params.skip_special_tokens
    nulls = dict.fromkeys(
        (
            "temperature", "top_p", "n", "stop", "seed", "logit_bias", "logprobs", "stream",
            "tools", "tool_choice", "response_format", "max_tokens", "model", "stream_options",
            "ignore_eos", "min_tokens", "reasoning_effort", "chat_template_kwargs",
        )
    )  # fmt: skip
    await answer(http, **nulls)


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


async def test_token_budget(http: httpx.AsyncClient, engine: StubEngine) -> None:
    """S2: facts 1.1, default = window - prompt; larger is clamped; the new field name wins."""
    await answer(http)
    room = 256 - len(engine.requests[-1].prompt_token_ids)
    assert engine.requests[-1].params.max_tokens == room
    for asked in (65535, 2**40):
        await answer(http, max_tokens=asked)
        assert engine.requests[-1].params.max_tokens == room
    body = await answer(http, max_tokens=100, max_completion_tokens=2)
    assert engine.requests[-1].params.max_tokens == 2
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 2


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


async def test_choices(http: httpx.AsyncClient, engine: StubEngine) -> None:
    """S2: n choices with seeds seed + i; usage counts the prompt once and sums the output."""
    one = await answer(http, seed=5)
    body = await answer(http, n=3, seed=5)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert sorted(request.params.seed for request in engine.requests[1:]) == [5, 6, 7]
    assert body["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]
    assert body["usage"]["completion_tokens"] == 3 * one["usage"]["completion_tokens"]


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


@pytest.mark.parametrize(("is_user_error", "status"), [(True, 400), (False, 500)])
async def test_request_failure(
    http: httpx.AsyncClient, engine: StubEngine, is_user_error: bool, status: int
) -> None:
    """S4: a failed request is a 400 or a 500 with its reason; a retry of the 500 is useless."""
    engine.failure = RequestUpdate(
        request_id="x",
        finish_reason=FinishReason.ERROR,
        error="the logits are not finite",
        is_user_error=is_user_error,
    )
    response = await http.post(PATH, json=CHAT)
    assert response.status_code == status
    assert response.json()["error"]["message"] == "the logits are not finite"
    assert response.headers.get("x-should-retry") == (None if is_user_error else "false")


async def test_dead_engine_is_a_500(http: httpx.AsyncClient, engine: StubEngine) -> None:
    """S4: a request that meets a dead engine gets a JSON 500."""
    engine.die()
    response = await http.post(PATH, json=CHAT)
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"


async def test_one_failed_choice_aborts_the_others(
    http: httpx.AsyncClient, engine: StubEngine, tokenizer: Tokenizer
) -> None:
    """S4: when one of n choices cannot run, the others give their resources back."""
    reply = engine.reply

    def fail_second(request: Any) -> Any:
        if request.request_id.endswith("-1"):
            engine.is_alive = False
        return reply(request)

    engine.reply = fail_second
    response = await http.post(PATH, json=CHAT | {"n": 3})
    assert response.status_code == 500
    assert len(engine.aborted) == len(engine.requests)


async def test_service_without_http(model: ServedModel, front_end: FrontEnd) -> None:
    """S5: the batch command calls the service with a parsed body; errors carry their status."""
    service = ChatService(model)
    body = await service.create(CHAT)
    assert body.choices[0].message.content == "The answer is 42."  # type: ignore[union-attr]
    ids = await encode_chat(front_end, ChatRequest(messages=CHAT["messages"]))
    assert body.usage.prompt_tokens == len(ids)  # type: ignore[union-attr]
