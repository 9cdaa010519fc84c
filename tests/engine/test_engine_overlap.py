"""The engine's loop with steps in flight, over a device that answers when the test says so."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import pairwise
from typing import Any

import pytest

from engine.batch import Batch, StepResult
from engine.cache.allocator import IndexAllocator
from engine.client import EngineDeadError, EngineInfo
from engine.engine import Engine
from engine.request import (
    FinishReason,
    NewRequest,
    RequestLimits,
    RequestUpdate,
    SamplingParams,
)
from engine.scheduler import Scheduler
from graphs.inputs import Kind
from tests.engine.device_model import make_scheduler

INFO = EngineInfo(
    version="",
    model_type="",
    dtype="",
    device="",
    limits=RequestLimits(max_model_len=64, max_kv_tokens=64, vocab_size=100),
    eos_token_ids=[0],
    page_size=4,
    num_pages=16,
    num_slots=2,
    max_running_requests=2,
    startup_s={},
)


class HeldStep:
    """A launched step of which nobody knows the result until the test lets it end."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.is_awaited = False
        self._result: asyncio.Future[StepResult] = asyncio.get_running_loop().create_future()

    async def wait(self) -> StepResult:
        self.is_awaited = True
        return await self._result

    def end(self, token_id: int) -> None:
        num_sampled = len(self.batch.sampling_entries)
        is_bad = [False] * num_sampled
        self._result.set_result(StepResult([token_id] * num_sampled, is_bad, None, None, []))

    def fail(self) -> None:
        self._result.set_exception(RuntimeError("the device is gone"))


class HeldRunner:
    """A Runner that launches `HeldStep`s; `open` are those that have not ended."""

    num_recompilations = 0

    def __init__(self) -> None:
        self.open: deque[HeldStep] = deque()
        self.num_launched = 0

    def launch(self, batch: Batch) -> HeldStep:
        step = HeldStep(batch)
        self.num_launched += 1
        self.open.append(step)
        return step

    def end_oldest(self, token_id: int = 1) -> None:
        self.open.popleft().end(token_id)

    def close(self) -> None:
        """Nothing to let go."""


class Driven:
    """An engine at work, its runner, and the updates that came so far."""

    def __init__(self, max_steps_in_flight: int, *, has_checks: bool) -> None:
        self.runner = HeldRunner()
        scheduler = make_scheduler(16, 2, max_steps_in_flight=max_steps_in_flight)
        self.engine = Engine(
            INFO,
            scheduler,
            self.runner,  # type: ignore[arg-type]
            None,
            0,
            has_checks=has_checks,
        )
        self.updates: list[RequestUpdate] = []

    def submit(self, name: str, max_tokens: int) -> None:
        request = NewRequest(
            request_id=name,
            prompt_token_ids=[1, 2, 3],
            params=SamplingParams(max_tokens=max_tokens),
        )
        self.engine.submit(request, self.updates.append)

    async def settle(self) -> None:
        """Let the engine do everything that it can do before the next step ends."""
        for _ in range(20):
            await asyncio.sleep(0)


@asynccontextmanager
async def drive(max_steps_in_flight: int, *, has_checks: bool = False) -> AsyncIterator[Driven]:
    driven = Driven(max_steps_in_flight, has_checks=has_checks)
    running = asyncio.create_task(driven.engine.run())
    yield driven
    running.cancel()
    with suppress(asyncio.CancelledError, RuntimeError, AssertionError):
        await running


@pytest.mark.parametrize("depth", [1, 2])
async def test_steps_in_flight_reach_their_limit_and_stay_there(depth: int) -> None:
    """E5: step n + 1 is launched before step n is drained. Oracle: the steps by hand."""
    async with drive(depth) as driven:
        runner = driven.runner
        driven.submit("a", 6)
        for num_drained in range(6):
            await driven.settle()
            # The last token is foreseen: no step is launched behind the one that chooses it.
            assert len(runner.open) == min(depth, 6 - num_drained)
            assert [step.is_awaited for step in runner.open] == [True, False][: len(runner.open)]
            assert sum(len(update.token_ids) for update in driven.updates) == num_drained
            runner.end_oldest()
        await driven.settle()
        assert runner.num_launched == 6 and not runner.open
        assert driven.updates[-1].finish_reason is FinishReason.LENGTH
        assert driven.engine.stats().num_steps_total == 6


async def test_a_new_request_starts_behind_the_steps_in_flight() -> None:
    """E2, E5: it arrives while two steps run. Oracle: the next launch is its prefill."""
    async with drive(2) as driven:
        driven.submit("a", 20)
        await driven.settle()
        driven.submit("b", 20)
        await driven.settle()
        assert driven.runner.num_launched == 2
        driven.runner.end_oldest()
        await driven.settle()
        launched = driven.runner.open[-1].batch
        assert launched.kind is Kind.PREFILL
        assert [entry.state.request_id for entry in launched.entries] == ["b"]


async def test_the_row_behind_a_stop_is_ignored() -> None:
    """E5, S4: EOS is known a step late. Oracle: tokens, usage and counters by hand."""
    async with drive(2) as driven:
        driven.submit("a", 20)
        await driven.settle()
        driven.runner.end_oldest(5)
        await driven.settle()
        driven.runner.end_oldest(0)
        await driven.settle()
        assert [update.token_ids for update in driven.updates] == [[5], [0]]
        assert driven.updates[-1].finish_reason is FinishReason.STOP
        stats = driven.engine.stats()
        assert (stats.num_requests_running, stats.num_slots_used) == (0, 1)
        driven.submit("a", 1)
        driven.runner.end_oldest(7)
        await driven.settle()
        driven.runner.end_oldest(8)
        await driven.settle()
        assert [update.token_ids for update in driven.updates] == [[5], [0], [8]]
        stats = driven.engine.stats()
        assert stats.generation_tokens_total == 3
        assert stats.num_pages_used == stats.num_slots_used == 0
        assert not driven.runner.open


async def test_an_abort_ends_with_the_next_drain() -> None:
    """S4: and nothing is launched for it any more. Oracle: the updates and counters."""
    async with drive(2) as driven:
        driven.submit("a", 20)
        await driven.settle()
        driven.engine.abort("a")
        await driven.settle()
        assert not driven.updates
        driven.runner.end_oldest()
        await driven.settle()
        (update,) = driven.updates
        assert update.finish_reason is FinishReason.ABORT and update.token_ids == []
        driven.runner.end_oldest()
        await driven.settle()
        assert driven.engine.stats().num_pages_used == 0
        assert driven.runner.num_launched == 2


@pytest.mark.parametrize("is_fault", [False, True])
async def test_the_end_of_the_engine_forgets_the_steps_in_flight(is_fault: bool) -> None:
    """S4: a fault of the device, and a stop. Oracle: one last update for each request."""
    async with drive(2) as driven:
        driven.submit("a", 20)
        driven.submit("b", 20)
        await driven.settle()
        if is_fault:
            driven.runner.open[0].fail()
            await driven.settle()
            assert driven.engine.has_failed
    assert [update.request_id for update in driven.updates] == ["a", "b"]
    assert all(update.finish_reason is FinishReason.ERROR for update in driven.updates)
    assert driven.engine.stats().num_pages_used == driven.engine.stats().num_slots_used == 0
    with pytest.raises(EngineDeadError):
        driven.submit("c", 1)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("has_checks", [True, False])
async def test_every_drain_and_abort_is_checked_if_asked(
    has_checks: bool, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C-L2: with requests aborted in the queue and in a step. Oracle: the order of the calls."""
    calls: list[str] = []
    for name in ("drain", "release_aborted", "check_integrity", "next_batch"):
        original = getattr(Scheduler, name)

        def noted(*arguments: object, name: str = name, original: Any = original) -> object:
            calls.append(name)
            return original(*arguments)

        monkeypatch.setattr(Scheduler, name, noted)
    async with drive(depth, has_checks=has_checks) as driven:
        for name in ("a", "b", "queued"):
            driven.submit(name, 6)
        for aborted in ("queued", "none", "b", "none", "none", "none", "none", "none", "none"):
            await driven.settle()
            driven.engine.abort(aborted)
            if driven.runner.open:
                driven.runner.end_oldest()
        driven.submit("c", 1)
        driven.engine.abort("c")
        await driven.settle()
    reasons = {update.request_id: update.finish_reason for update in driven.updates}
    assert [reasons[name] for name in ("a", "b", "queued", "c")] == [
        FinishReason.LENGTH,
        *[FinishReason.ABORT] * 3,
    ]
    after = {name: {left for right, left in pairwise(calls) if right == name} for name in calls}
    assert after["drain"] == {"release_aborted"} and calls.count("drain") >= 6
    assert after["release_aborted"] == {"check_integrity" if has_checks else "next_batch"}
    assert ("check_integrity" in calls) is has_checks


async def test_a_page_of_two_requests_ends_the_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """C-L2, S4: every request is told, though its pages cannot be returned one by one.

    Oracle: the updates, and the log's words.
    """
    take = IndexAllocator.take

    def share(pool: IndexAllocator, count: int) -> list[int] | None:
        taken = take(pool, count)
        return taken and [*taken[:-1], 1]

    async with drive(2, has_checks=True) as driven:
        driven.submit("a", 20)
        await driven.settle()
        monkeypatch.setattr(IndexAllocator, "take", share)
        driven.submit("b", 20)
        driven.runner.end_oldest()
        await driven.settle()
        driven.submit("waiting", 20)
        driven.runner.end_oldest()
        await driven.settle()
        assert driven.engine.has_failed
        with pytest.raises(EngineDeadError, match="the engine has failed: AssertionError"):
            driven.submit("c", 1)
    last = [update for update in driven.updates if update.finish_reason is not None]
    assert sorted(update.request_id for update in last) == ["a", "b", "waiting"]
    assert all(update.finish_reason is FinishReason.ERROR for update in last)
    assert "AssertionError: pages: an index has two owners" in caplog.text
    assert driven.engine.stats().num_pages_used == driven.engine.stats().num_slots_used == 0
