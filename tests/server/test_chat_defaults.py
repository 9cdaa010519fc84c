"""Sampling defaults of a checkpoint, and template variables."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from server.service.chat import ChatService
from server.service.completions import CompletionService
from server.service.prompts import template_variables
from server.service.request_schema import ChatRequest
from server.service.sampling import SamplingDefaults, load_sampling_defaults
from server.service.served_model import ServedModel, load_front_end
from tests.server.stub_engine import StubEngine

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


def write_config(folder: Path, **values: object) -> Path:
    """A checkpoint folder that holds only generation_config.json."""
    (folder / "generation_config.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, SamplingDefaults()),
        ({"eos_token_id": [1, 2], "do_sample": None}, SamplingDefaults()),
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0},
            SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20),
        ),
        (
            {"temperature": 0.7, "repetition_penalty": 1.05},
            SamplingDefaults(temperature=0.7, repetition_penalty=1.05),
        ),
        (
            {"do_sample": False, "temperature": 0.6, "top_k": 20},
            SamplingDefaults(temperature=0.0),
        ),
    ],
)
def test_generation_config(
    tmp_path: Path, values: dict[str, object], expected: SamplingDefaults
) -> None:
    """S2: the checkpoint's author sets the defaults; do_sample false means greedy."""
    assert load_sampling_defaults(write_config(tmp_path, **values)) == expected


def test_without_generation_config(tmp_path: Path) -> None:
    """S2: without the file the defaults are OpenAI's."""
    assert load_sampling_defaults(tmp_path) == SamplingDefaults(temperature=1.0, top_p=1.0)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"temperature": "hot"}',
        '{"temperature": -1}',
        '{"temperature": 3}',
        '{"top_k": 1.5}',
        '{"top_p": 0}',
    ],
)
def test_broken_generation_config(tmp_path: Path, text: str) -> None:
    """E1: a file that cannot be used is an error that names it, when the server starts."""
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ValueError, match=r"generation_config\.json"):
        load_front_end(tmp_path)


async def test_defaults_and_requests(model: ServedModel, engine: StubEngine) -> None:
    """S2: a default holds until the request names the field, 0 and 1 included."""
    defaults = SamplingDefaults(temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.1)
    front_end = dataclasses.replace(model.front_end, defaults=defaults)
    served = dataclasses.replace(model, front_end=front_end)
    await ChatService(served).create(CHAT)
    await CompletionService(served).create({"prompt": "x"})
    for params in (engine.requests[0].params, engine.requests[1].params):
        assert (params.temperature, params.top_p, params.top_k) == (0.6, 0.9, 20)
        assert params.repetition_penalty == 1.1
    own = {"temperature": 0, "top_p": 1, "top_k": 0, "repetition_penalty": 1}
    await ChatService(served).create(CHAT | own)
    params = engine.requests[2].params
    assert (params.temperature, params.top_p, params.top_k) == (0.0, 1.0, 0)
    assert params.repetition_penalty == 1.0


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}),
        ({"reasoning_effort": "high"}, {"reasoning_effort": "high"}),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            {"reasoning_effort": "none", "enable_thinking": True},
        ),
    ],
)
def test_template_variables(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    """S2: facts 1.1, effort none turns thinking off; an explicit variable wins."""
    assert template_variables(ChatRequest(messages=[], **fields)) == expected
