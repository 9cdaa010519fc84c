"""Drafts in `usage`: what each choice's were, and how many of them became output."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from openai.types import CompletionUsage

from engine.request import NewRequest, SamplingParams
from engine.tokens import Tokenizer
from server.service.text import ChoiceText, ChoiceTokens
from tests.server.stub_engine import StubEngine

CHAT_PATH = "/v1/chat/completions"
TEXT_PATH = "/v1/completions"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
RUNNING = {
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}
FINAL = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.fixture
def drafting(engine: StubEngine) -> StubEngine:
    """Three drafts a step, at most two accepted; a choice answers as many ids as `reply_len`."""
    engine.num_drafts = 3
    engine.tokens_per_update = 3
    engine.reply = lambda request: [300 + index for index in range(reply_len(request))]
    return engine


def reply_len(request: NewRequest) -> int:
    """3 ids (4 tokens with EOS: steps of 3 and 1), or 6 (7 tokens: steps of 3, 3 and 1).

    Choices with an odd last digit in their id, and prompts of two ids, have the longer one.
    """
    has_odd_id = request.request_id[-2:] in ("-1", "-3")
    return 6 if has_odd_id or len(request.prompt_token_ids) == 2 else 3


def drafts_of(usage: dict[str, Any]) -> tuple[int, int]:
    """Accepted and rejected; there is nothing else but what was always there."""
    details = dict(usage["completion_tokens_details"])
    assert details.pop("reasoning_tokens") == 0
    accepted = details.pop("accepted_prediction_tokens")
    rejected = details.pop("rejected_prediction_tokens")
    assert details == {}
    return accepted, rejected


async def usages(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The usage of a whole answer, or of every chunk that has one."""
    response = await http.post(path, json=body)
    assert response.status_code == 200, response.text
    if "stream" not in body:
        return [response.json()["usage"]]
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert chunks[-1]["choices"] == []
    return [chunk["usage"] for chunk in chunks if chunk["usage"] is not None]


CALLS = [
    (CHAT_PATH, CHAT, 4, (2, 4)),  # steps of 3 and 1 tokens: 2 of 6 drafts
    (CHAT_PATH, CHAT | {"n": 2}, 11, (6, 9)),  # and of 3, 3 and 1: 4 of 9
    (TEXT_PATH, {"prompt": [5]}, 4, (2, 4)),
    (TEXT_PATH, {"prompt": [[5], [6, 7]]}, 11, (6, 9)),
    (TEXT_PATH, {"prompt": [[5], [6]], "n": 2}, 22, (12, 18)),
]


@pytest.mark.parametrize("stream", [{}, FINAL, RUNNING], ids=["whole", "final", "running"])
@pytest.mark.parametrize(("path", "body", "num_tokens", "expected"), CALLS)
async def test_drafts_are_summed_over_choices(
    http: httpx.AsyncClient,
    drafting: StubEngine,
    path: str,
    body: dict[str, Any],
    num_tokens: int,
    expected: tuple[int, int],
    stream: dict[str, Any],
) -> None:
    """V18: accepted and rejected drafts of n choices and several prompts, streamed and not.

    Oracle: counted by hand from the steps that the stub takes.
    """
    last = (await usages(http, path, body | stream))[-1]
    assert last["completion_tokens"] == num_tokens
    assert last["total_tokens"] == last["prompt_tokens"] + num_tokens
    assert drafts_of(last) == expected


@pytest.mark.parametrize(("path", "body"), [(CHAT_PATH, CHAT), (TEXT_PATH, {"prompt": [5]})])
async def test_running_usage_counts_the_drafts_so_far(
    http: httpx.AsyncClient, drafting: StubEngine, path: str, body: dict[str, Any]
) -> None:
    """V18: each chunk has the drafts of the steps until then. Oracle: the stub's two steps."""
    seen = await usages(http, path, body | RUNNING)
    counts = [(usage["completion_tokens"], drafts_of(usage)) for usage in seen]
    assert list(dict.fromkeys(counts)) == [(3, (2, 1)), (4, (2, 4))]


@pytest.mark.parametrize("stream", [{}, FINAL, RUNNING])
@pytest.mark.parametrize(("path", "body"), [(CHAT_PATH, CHAT), (TEXT_PATH, {"prompt": [5]})])
async def test_without_speculation_the_counts_are_0(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], stream: dict[str, Any]
) -> None:
    """V18: clients find both fields on every engine. Oracle: a stub that drafts nothing."""
    for usage in await usages(http, path, body | stream):
        assert drafts_of(usage) == (0, 0)


async def test_the_official_client_reads_them(
    http: httpx.AsyncClient, drafting: StubEngine
) -> None:
    """V18: they are where the openai package's types have them. Oracle: those types."""
    for path, body in ((CHAT_PATH, CHAT), (TEXT_PATH, {"prompt": [5]})):
        [given] = await usages(http, path, body)
        details = CompletionUsage.model_validate(given).completion_tokens_details
        assert details is not None and details.model_extra == {}
        assert details.accepted_prediction_tokens == 2
        assert details.rejected_prediction_tokens == 4


def test_deltas_have_the_totals_of_their_update(drafting: StubEngine, tokenizer: Tokenizer) -> None:
    """V18: with a tokenizer and without. Oracle: the updates."""
    request = NewRequest(
        request_id="r", prompt_token_ids=[6, 7], params=SamplingParams(max_tokens=20)
    )
    updates = drafting.updates(request)
    assert [(update.num_drafted, update.num_accepted) for update in updates] == [
        (3, 2), (6, 4), (9, 4)
    ]  # fmt: skip
    for reader in (ChoiceText(0, request, tokenizer), ChoiceTokens(0)):
        for update in updates:
            delta = reader.push(update)
            assert delta.num_drafted == update.num_drafted
            assert delta.num_accepted == update.num_accepted
