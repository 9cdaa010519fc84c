"""The Prometheus exposition."""

from __future__ import annotations

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from server.app import AppOptions, build_app
from server.service.state import ServerState
from tests.server.stub_engine import StubEngine

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


async def scrape(http: httpx.AsyncClient) -> dict[tuple[str, str], float]:
    """(sample name, the label that is not model_name) -> value."""
    response = await http.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    samples = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "gander-12m"
            assert len(labels) <= 1
            samples[sample.name, next(iter(labels.values()), "")] = sample.value
    return samples


async def test_names_and_values(http: httpx.AsyncClient, engine: StubEngine) -> None:
    """S2: facts 1.8, dashboards find these names; the engine's counters are as it gives them."""
    samples = await scrape(http)
    assert samples["deltaloom:num_requests_running", ""] == 0
    assert samples["deltaloom:num_requests_waiting", ""] == 0
    assert samples["deltaloom:kv_cache_usage_perc", ""] == 16 / 64
    assert samples["deltaloom:num_steps_total", ""] == 7
    assert samples["deltaloom:recompilations_total", ""] == 2
    assert samples["deltaloom:startup_seconds", "load"] == 0.5
    assert samples["deltaloom:startup_seconds", "ready"] == 1.0
    for name in ("prompt_tokens", "generation_tokens", "num_preemptions"):
        assert (f"deltaloom:{name}_total", "") in samples
    assert samples["deltaloom:request_success_total", "stop"] == 0


async def test_drafts_are_counted_where_there_are_any(
    http: httpx.AsyncClient, engine: StubEngine
) -> None:
    """V18: facts 1.8, dashboards find the field's stems; without speculation there are none.

    Oracle: three steps that accept 2, 0 and 3 of their drafts, and the formula of the help text.
    """
    assert not any("spec_decode" in name for name, _ in await scrape(http))
    engine.draft_counts.num_accepted_per_position = [0, 0, 0]
    stem = "deltaloom:spec_decode_num_"
    before = await scrape(http)
    assert {key: value for key, value in before.items() if key[0].startswith(stem)} == {
        (f"{stem}drafts_total", ""): 0,
        (f"{stem}draft_tokens_total", ""): 0,
        (f"{stem}accepted_tokens_total", ""): 0,
        (f"{stem}accepted_tokens_per_pos_total", "0"): 0,
        (f"{stem}accepted_tokens_per_pos_total", "1"): 0,
        (f"{stem}accepted_tokens_per_pos_total", "2"): 0,
    }
    for num_drafted, num_accepted in ((3, 2), (2, 0), (3, 3)):
        engine.draft_counts.add(num_drafted, num_accepted)
    after = await scrape(http)
    assert {key: value for key, value in after.items() if key[0].startswith(stem)} == {
        (f"{stem}drafts_total", ""): 3,
        (f"{stem}draft_tokens_total", ""): 8,
        (f"{stem}accepted_tokens_total", ""): 5,
        (f"{stem}accepted_tokens_per_pos_total", "0"): 2,
        (f"{stem}accepted_tokens_per_pos_total", "1"): 2,
        (f"{stem}accepted_tokens_per_pos_total", "2"): 1,
    }
    mean_committed = (3 + 1 + 4) / 3
    accepted, drafts = after[f"{stem}accepted_tokens_total", ""], after[f"{stem}drafts_total", ""]
    assert 1 + accepted / drafts == pytest.approx(mean_committed)


async def test_requests_are_counted(http: httpx.AsyncClient, engine: StubEngine) -> None:
    """S2: one observation of each time per choice, one between each pair of updates."""
    await http.post("/v1/chat/completions", json=CHAT | {"n": 2})
    await http.post("/v1/chat/completions", json=CHAT | {"max_tokens": 1})
    engine.is_full = True
    await http.post("/v1/chat/completions", json=CHAT)
    samples = await scrape(http)
    assert samples["deltaloom:request_success_total", "stop"] == 2
    assert samples["deltaloom:request_success_total", "length"] == 1
    assert samples["deltaloom:request_success_total", "error"] == 1
    assert samples["deltaloom:request_success_total", "abort"] == 0
    assert samples["deltaloom:time_to_first_token_seconds_count", ""] == 3
    assert samples["deltaloom:e2e_request_latency_seconds_count", ""] == 3
    assert samples["deltaloom:request_queue_time_seconds_count", ""] == 3
    assert samples["deltaloom:request_queue_time_seconds_sum", ""] == 1.5
    num_output = len(engine.reply(engine.requests[0])) + 1
    assert samples["deltaloom:inter_token_latency_seconds_count", ""] == 2 * (num_output - 1)


async def test_head_and_a_dead_engine(http: httpx.AsyncClient, engine: StubEngine) -> None:
    """S2: facts 1.0, HEAD works; without the engine the server's own metrics remain."""
    head = await http.head("/metrics")
    assert (head.status_code, head.content) == (200, b"")
    engine.die()
    samples = await scrape(http)
    assert ("deltaloom:num_requests_running", "") not in samples
    assert ("deltaloom:request_success_total", "stop") in samples


async def test_while_loading() -> None:
    """S2: a scrape before the model is ready succeeds."""
    transport = httpx.ASGITransport(app=build_app(ServerState(), AppOptions()))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        assert (await http.get("/metrics")).status_code == 200
