"""Counts of drafts from a real engine's steps to clients: offline, over HTTP and in metrics."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from engine import LLM, SamplingParams
from engine.config import EngineConfig
from engine.local_client import LocalClient
from engine.start import start_engine
from server.app import AppOptions, build_app
from server.metrics import ServerMetrics
from server.service.served_model import FrontEnd, ServedModel
from server.service.state import ServerState
from tests.conftest import EMBEDDED

# n-grams that come back, and a prompt without any.
PROMPTS = [[500, 501, 502, 503, 504] * 8, [7, 8, 9]]
NUM_TOKENS = 16


@pytest.fixture
def drafting_llm() -> Iterator[LLM]:
    """The embedded model with drafts from the prompt."""
    with LLM(
        str(EMBEDDED),
        compile="off",
        device="cpu",
        max_running_requests=4,
        max_kv_tokens=2048,
        speculative_algorithm="ngram",
    ) as llm:
        yield llm


def test_outputs_have_their_drafts(drafting_llm: LLM) -> None:
    """V18: each completion's own drafts. Oracle: the engine's totals, which steps count."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    before = drafting_llm.stats()
    outputs = [request.outputs[0] for request in drafting_llm.generate(PROMPTS, params)]
    after = drafting_llm.stats()
    num_drafted = after.num_draft_tokens_total - before.num_draft_tokens_total
    num_accepted = after.num_accepted_tokens_total - before.num_accepted_tokens_total
    assert sum(output.num_drafted for output in outputs) == num_drafted
    assert sum(output.num_accepted for output in outputs) == num_accepted
    assert 0 < num_accepted < num_drafted
    assert sum(after.num_accepted_per_position) == after.num_accepted_tokens_total
    assert len({(output.num_drafted, output.num_accepted) for output in outputs}) == 2


async def test_usage_and_metrics_agree(front_end: FrontEnd) -> None:
    """V18: over HTTP, with several prompts and choices. Oracle: the engine's totals."""
    config = EngineConfig(
        model_path=str(EMBEDDED),
        compile="off",
        device="cpu",
        max_running_requests=4,
        max_kv_tokens=2048,
        speculative_algorithm="ngram",
        speculative_num_steps=2,
    )
    client = LocalClient(start_engine(config, has_progress=False))
    state = ServerState()
    state.open(
        ServedModel(
            client=client,
            front_end=front_end,
            names=("gander-12m",),
            root="gander-12m",
            metrics=ServerMetrics("gander-12m", client.info),
        )
    )
    transport = httpx.ASGITransport(app=build_app(state, AppOptions()))
    body = {"prompt": PROMPTS, "n": 2, "max_tokens": NUM_TOKENS, "temperature": 0}
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            before = await client.stats()
            answer = (await http.post("/v1/completions", json=body | {"ignore_eos": True})).json()
            after = await client.stats()
            units = (await http.get("/v1/cache/status")).json()["geometry"]["unit_bytes"]
            metrics = (await http.get("/metrics")).text
    finally:
        await client.close()
    details = answer["usage"]["completion_tokens_details"]
    num_accepted = after.num_accepted_tokens_total - before.num_accepted_tokens_total
    num_drafted = after.num_draft_tokens_total - before.num_draft_tokens_total
    assert 0 < num_accepted < num_drafted
    assert details["accepted_prediction_tokens"] == num_accepted
    assert details["rejected_prediction_tokens"] == num_drafted - num_accepted
    assert answer["usage"]["completion_tokens"] == 4 * NUM_TOKENS
    assert units["verify_scratch_per_row"] > 0
    total = 'spec_decode_num_draft_tokens_total{model_name="gander-12m"} '
    assert f"deltaloom:{total}{float(after.num_draft_tokens_total)}\n" in metrics
