"""The bench command: what it writes, what it refuses, and what it keeps to itself."""

from __future__ import annotations

import argparse
import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from starlette.types import ASGIApp

from engine.client import EngineClient, EngineDeadError
from engine.config import EngineConfig
from engine.request import FinishReason, RequestUpdate
from server.bench.command import shown_command
from server.bench.job import BenchOptions, run_bench
from server.bench.load import RequestShape
from server.bench.results import read_results
from server.cli import add_bench_flags, main
from tests.server.live_server import live_server
from tests.server.stub_engine import StubEngine

SHAPE = RequestShape(num_prompt_tokens=6, num_output_tokens=4, ignore_eos=True)


def options(results: Path | None, **given: Any) -> BenchOptions:
    """Two small levels of load."""
    values: dict[str, Any] = {
        "engine": EngineConfig(device="cpu"),
        "engine_name": "gander-12m",
        "geometry": None,
        "shape": SHAPE,
        "concurrency": (1, 3),
        "num_requests": 5,
        "prompt_seed": 0,
        "results": results,
        "command": "deltaloom bench",
    }
    return BenchOptions(**(values | given))


def run(engine: StubEngine, bench: BenchOptions) -> int:
    """Measure the stub engine."""

    async def start_engine(config: EngineConfig) -> EngineClient:
        return engine

    return run_bench(bench, start_engine)


def test_engine_without_a_server(
    engine: StubEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """S7: one row per metric and level, of requests that all differ.

    Oracle: the shape of results files, and the requests in the stub engine.
    """
    path = tmp_path / "new" / "results.json"
    assert run(engine, options(path)) == 0
    results = read_results(path)
    assert results.command == "deltaloom bench"
    assert results.device.endswith("cores")
    assert results.driver == "none"
    keys = {(row.bench, row.metric, row.batch) for row in results.rows}
    assert len(keys) == len(results.rows)
    assert ("engine.start", "startup_s", 1) in keys
    for batch in (1, 3):
        for metric in ("ttft_ms", "tpot_ms"):
            assert {("engine.p50", metric, batch), ("engine.p99", metric, batch)} <= keys
        assert {("engine.total", "decode_tok_s", batch)} <= keys
    assert {row.geometry for row in results.rows} == {"gander-12m"}
    assert {row.dtype for row in results.rows} == {"float32"}
    assert {row.context for row in results.rows} == {0, 6}
    prompts = [tuple(request.prompt_token_ids) for request in engine.requests]
    assert len(prompts) == len(set(prompts)) == 1 + 2 * 5
    assert all(len(prompt) == 6 for prompt in prompts)
    assert all(request.params.max_tokens == 4 for request in engine.requests)
    assert engine.is_closed
    shown = capsys.readouterr().out
    assert shown.count("\n") == 4
    assert str(path) in shown


def test_an_endpoint(app: ASGIApp, engine: StubEngine, tmp_path: Path) -> None:
    """S7: with --base-url no engine starts; the endpoint's own model names the geometry."""
    address: list[tuple[str, int]] = []
    is_up, is_done = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with live_server(app) as found:
            address.append(found)
            is_up.set()
            await is_done.wait()

    server = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    server.start()
    assert is_up.wait(10)
    host, port = address[0]
    path = tmp_path / "results.json"

    async def start_engine(config: EngineConfig) -> EngineClient:
        raise AssertionError

    try:
        given = options(path, base_url=f"http://{host}:{port}/v1", api_key="unused")
        assert run_bench(given, start_engine) == 0
    finally:
        loop.call_soon_threadsafe(is_done.set)
        server.join()
        loop.close()
    rows = read_results(path).rows
    assert {row.geometry for row in rows} == {"gander-12m"}
    assert {row.bench.partition(".")[0] for row in rows} == {"http"}
    assert {row.metric for row in rows} >= {"ttft_ms", "tpot_ms", "decode_tok_s"}


def test_default_path(engine: StubEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S7: a new file in bench/results, whatever the geometry is called."""
    monkeypatch.chdir(tmp_path)
    assert run(engine, options(None, geometry="../../a b")) == 0
    (path,) = (tmp_path / "bench" / "results").iterdir()
    assert path.name.endswith("-..-..-a-b-engine.json")
    assert {row.geometry for row in read_results(path).rows} == {"../../a b"}


def test_a_failed_request_writes_nothing(engine: StubEngine, tmp_path: Path) -> None:
    """S7: a number that leaves failures out would be better than the truth."""
    engine.failure = RequestUpdate(
        request_id="x", finish_reason=FinishReason.ERROR, error="NaN logits"
    )
    path = tmp_path / "results.json"
    with pytest.raises(ValueError, match="nothing was measured: NaN logits"):
        run(engine, options(path))
    engine.failure, engine.is_full = None, True
    with pytest.raises(ValueError, match="queue is full"):
        run(engine, options(path))
    assert not path.exists()
    assert engine.is_closed


def test_too_long_for_the_engine(engine: StubEngine, tmp_path: Path) -> None:
    """S7: lengths that the engine cannot take are refused with the numbers."""
    shape = RequestShape(num_prompt_tokens=200, num_output_tokens=100, ignore_eos=True)
    with pytest.raises(ValueError, match=r"--prompt-tokens.*300.*256"):
        run(engine, options(tmp_path / "results.json", shape=shape))
    assert engine.is_closed


def test_a_dead_engine(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """S7: exit code 1 and one line in the log."""

    async def start_engine(config: EngineConfig) -> EngineClient:
        raise EngineDeadError("out of memory")

    assert run_bench(options(tmp_path / "results.json"), start_engine) == 1
    assert "out of memory" in caplog.text


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--concurrency", "0"], "--concurrency"),
        (["--concurrency", "1,,2"], "--concurrency"),
        (["--concurrency", "many"], "--concurrency"),
        (["--num-requests", "0"], "--num-requests"),
        (["--prompt-tokens", "0"], "--prompt-tokens"),
        (["--output-tokens", "-1"], "--output-tokens"),
        (["--base-url", "localhost:8000"], "--base-url"),
        (["--model", "x"], "--base-url"),
        (["--api-key", "x"], "--base-url"),
        (["--model-path", "/no/such/folder"], "/no/such/folder"),
    ],
)
def test_user_errors_are_one_line(
    capfd: pytest.CaptureFixture[str], argv: list[str], said: str
) -> None:
    """S7: a wrong command line is one line on stderr that names the flag, and exit code 2."""
    assert main(["bench", *argv]) == 2
    output = capfd.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert said in output.err


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (["bench", "--api-key", "k3y", "--model", "m"], "bench --api-key '***' --model m"),
        (["bench", "--api-key=k3y"], "bench '--api-key=***'"),
        (["bench", "--geometry", "a b"], "bench --geometry 'a b'"),
    ],
)
def test_the_key_is_not_published(argv: list[str], shown: str) -> None:
    """S7: results files name the command, without the API key."""
    assert shown_command(argv) == f"deltaloom {shown}"


def test_flags_stay_within_the_budget() -> None:
    """S7: the house rule of at most 40 flags, and help for each."""
    parser = argparse.ArgumentParser(add_help=False)
    add_bench_flags(parser)
    assert len(parser._actions) <= 40
    assert all(action.help for action in parser._actions)
