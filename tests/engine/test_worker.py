"""S4: the engine in its own process: same tokens, aborts, and every way to die."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from concurrent.futures import Future

import pytest
import pytest_asyncio

from engine import LLM, FinishReason, SamplingParams
from engine.batch import Batch, StepResult
from engine.client import EngineDeadError, EngineInfo, QueueFullError
from engine.config import EngineConfig
from engine.engine import Engine
from engine.frames import (
    Failed,
    Ready,
    Submit,
    Updates,
    engine_decoder,
    read_payload,
    send_frame,
)
from engine.request import NewRequest, RequestLimits
from engine.runner import PendingStep
from engine.worker import serve_socket
from engine.worker_client import WorkerClient, start_worker
from tests.conftest import EMBEDDED
from tests.engine.device_model import make_scheduler

CONFIG = EngineConfig(
    model_path=str(EMBEDDED),
    compile="off",
    device="cpu",
    max_running_requests=2,
    max_queued_requests=2,
    max_kv_tokens=2048,
    page_size=16,
    num_threads=1,
)


@pytest_asyncio.fixture(loop_scope="function")
async def client() -> AsyncIterator[WorkerClient]:
    worker = await start_worker(CONFIG)
    assert isinstance(worker, WorkerClient)
    yield worker
    await worker.close()


def request(name: str, max_tokens: int, prompt: list[int] | None = None) -> NewRequest:
    return NewRequest(
        request_id=name,
        prompt_token_ids=prompt or [5, 6, 7],
        params=SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True),
    )


async def collect(client: WorkerClient, new: NewRequest) -> tuple[list[int], FinishReason | None]:
    tokens: list[int] = []
    reason = None
    async for update in client.generate(new):
        tokens += update.token_ids
        reason = update.finish_reason
    return tokens, reason


async def test_tokens_equal_those_in_process(client: WorkerClient, embedded_llm: LLM) -> None:
    """E10, S4: two clients, one engine. Oracle: the offline LLM."""
    results = await asyncio.gather(*(collect(client, request(f"r{n}", 5 + n)) for n in range(3)))
    params = SamplingParams(temperature=0, max_tokens=7, ignore_eos=True)
    expected = embedded_llm.generate([[5, 6, 7]], params)[0].outputs[0].token_ids
    for n, (tokens, reason) in enumerate(results):
        assert tokens == expected[: 5 + n] and reason is FinishReason.LENGTH
    refused = [u async for u in client.generate(request("bad", 4, [9999]))]
    assert len(refused) == 1 and refused[0].is_user_error
    assert "9999" in (refused[0].error or "")


async def test_leaving_the_iterator_frees_everything(client: WorkerClient) -> None:
    """S4: abort in mid-stream and in the queue; a full queue is refused. Oracle: the counters."""
    tasks = [asyncio.create_task(collect(client, request(f"a{n}", 1500))) for n in range(4)]
    while (stats := await client.stats()).num_requests_running < 2:
        assert stats.num_requests_running + stats.num_requests_waiting <= 4
    with pytest.raises(QueueFullError):
        await collect(client, request("one too many", 4))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    async with asyncio.timeout(10):
        while True:
            stats = await client.stats()
            # Pages and slots come back when the step in flight has ended, after the last update.
            if stats.num_requests_running + stats.num_requests_waiting + stats.num_slots_used == 0:
                break
    assert stats.num_pages_used == 0
    tokens, _ = await collect(client, request("after", 3))
    assert len(tokens) == 3


async def test_a_killed_engine_fails_every_stream_and_call(client: WorkerClient) -> None:
    """S4: kill -9 in mid-stream. Oracle: EngineDeadError everywhere, at once."""
    streams = [asyncio.create_task(collect(client, request(f"k{n}", 1500))) for n in range(3)]
    while (await client.stats()).generation_tokens_total < 4:
        await asyncio.sleep(0)
    os.kill(client.process_id, signal.SIGKILL)
    async with asyncio.timeout(10):
        results = await asyncio.gather(*streams, return_exceptions=True)
    assert all(isinstance(result, EngineDeadError) for result in results)
    assert not client.is_alive
    with pytest.raises(EngineDeadError):
        await client.stats()
    with pytest.raises(EngineDeadError):
        await collect(client, request("late", 2))


class FailingRunner:
    """Gives token 1 for `num_steps` steps, then raises as a device fault would."""

    num_recompilations = 0

    def __init__(self, num_steps: int) -> None:
        self.num_left = num_steps

    def launch(self, batch: Batch) -> PendingStep:
        step: Future[StepResult] = Future()
        if self.num_left == 0:
            step.set_exception(RuntimeError("the device is gone"))
        else:
            self.num_left -= 1
            num_sampled = len(batch.sampling_entries)
            step.set_result(StepResult([1] * num_sampled, [False] * num_sampled, None, None, []))
        return PendingStep(step)

    def close(self) -> None:
        """Nothing to let go."""


async def test_a_failed_engine_is_no_fault_of_the_requests() -> None:
    """S4: the runner raises in mid-stream. Oracle: `Failed`, and no update with an end."""
    limits = RequestLimits(max_model_len=64, max_kv_tokens=64, vocab_size=100)
    info = EngineInfo(
        version="",
        model_type="",
        dtype="",
        device="",
        limits=limits,
        eos_token_ids=[0],
        page_size=4,
        num_pages=16,
        num_slots=2,
        max_running_requests=2,
        startup_s={},
    )
    scheduler = make_scheduler(num_pages=16, num_slots=2)
    engine = Engine(info, scheduler, FailingRunner(4), None, 0)  # type: ignore[arg-type]
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    served = asyncio.create_task(serve_socket(engine, theirs))
    reader, writer = await asyncio.open_unix_connection(sock=ours)
    send_frame(writer, Submit(request("a", 50)))
    frames = []
    while (payload := await read_payload(reader)) is not None:
        frames.append(engine_decoder.decode(payload))
    await served
    writer.close()
    assert isinstance(frames[0], Ready)
    assert frames[-1] == Failed("the engine has failed: RuntimeError", is_user_error=False)
    updates = [u for frame in frames if isinstance(frame, Updates) for u in frame.updates]
    assert sum(len(update.token_ids) for update in updates) == 4
    assert all(update.finish_reason is None for update in updates)


async def test_a_taken_request_id_is_refused(client: WorkerClient) -> None:
    """S4: the first stream goes on. Oracle: its tokens, and one refusal."""
    first = asyncio.create_task(collect(client, request("twin", 40)))
    while (await client.stats()).generation_tokens_total < 2:
        await asyncio.sleep(0)
    refused = [update async for update in client.generate(request("twin", 3))]
    assert len(refused) == 1 and "already in use" in (refused[0].error or "")
    assert len((await first)[0]) == 40


async def test_start_up_refusals_arrive_as_user_errors() -> None:
    """S1: the engine's own message. Oracle: the plan's refusal."""
    with pytest.raises(ValueError, match="is not a folder"):
        await start_worker(EngineConfig(model_path="/nowhere"))


async def test_the_engine_process_ends_with_its_client() -> None:
    """S4: no orphan is left. Oracle: the operating system."""
    worker = await start_worker(CONFIG)
    assert isinstance(worker, WorkerClient)
    process_id = worker.process_id
    await worker.close()
    await worker.close()
    with pytest.raises(ProcessLookupError):
        os.kill(process_id, 0)
