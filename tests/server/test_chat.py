"""Chat completions that are not streamed: shape, fields, budgets, failures."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from engine.request import FinishReason, RequestUpdate
from engine.tokens import Tokenizer
from server.service.chat import ChatService
from server.service.prompts import encode_chat
from server.service.request_schema import ChatRequest
from server.service.served_model import FrontEnd, ServedModel
from tests.server.chat_calls import CHAT, PATH, answer, refusal
from tests.server.stub_engine import StubEngine


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
            "completion_tokens_details": {
                "reasoning_tokens": 0,
                "accepted_prediction_tokens": 0,
                "rejected_prediction_tokens": 0,
            },
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


async def test_choices(http: httpx.AsyncClient, engine: StubEngine) -> None:
    """S2: n choices with seeds seed + i; usage counts the prompt once and sums the output."""
    one = await answer(http, seed=5)
    body = await answer(http, n=3, seed=5)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert sorted(request.params.seed for request in engine.requests[1:]) == [5, 6, 7]
    assert body["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]
    assert body["usage"]["completion_tokens"] == 3 * one["usage"]["completion_tokens"]


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
