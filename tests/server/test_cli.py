"""The command line: flags from the engine's options, one-line errors, and a served lifetime."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.client import EngineClient, EngineDeadError
from engine.config import EngineConfig
from server.cli import (
    EMBEDDED_MODEL,
    add_engine_flags,
    add_serve_flags,
    build_parser,
    engine_config,
    main,
    served_names,
)
from server.serve import ServeOptions, bind, run_serve, serve
from server.service.served_model import FrontEnd
from tests.server.live_server import RawConnection, until
from tests.server.stub_engine import StubEngine

MAX_FLAGS = 40
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def test_every_engine_option_is_a_flag() -> None:
    """S1: the flags are the fields of EngineConfig. Oracle: dataclasses.fields."""
    flags = build_parser().parse_args(["serve"])
    expected = dataclasses.replace(EngineConfig(), model_path=str(EMBEDDED_MODEL))
    assert engine_config(flags) == expected
    given = ["--max-model-len", "128", "--memory-ratio", "0.25", "--dtype", "bfloat16"]
    flags = build_parser().parse_args(["serve", *given, "--model-path", "/m"])
    assert engine_config(flags) == EngineConfig(
        model_path="/m", max_model_len=128, memory_ratio=0.25, dtype="bfloat16"
    )


def test_flags_stay_within_the_budget() -> None:
    """S1: the house rule of at most 40 flags, and help for each."""
    parser = argparse.ArgumentParser(add_help=False)
    add_serve_flags(parser)
    assert len(parser._actions) <= MAX_FLAGS
    assert all(action.help for action in parser._actions)
    engine_only = argparse.ArgumentParser(add_help=False)
    add_engine_flags(engine_only)
    names = {action.dest for action in engine_only._actions}
    options = dataclasses.fields(EngineConfig)
    assert names == {o.name for o in options if not o.metadata["is_for_speed_tests"]}


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "COMMAND"),
        (["fly"], "fly"),
        (["serve", "--port", "x"], "--port"),
        (["serve", "--port", "70000"], "--port"),
        (["serve", "--max-body-bytes", "0"], "--max-body-bytes"),
        (["serve", "--dtype", "int3"], "--dtype"),
        (["serve", "--max-model-le", "5"], "--max-model-le"),
        (["serve", "--api-key", ""], "--api-key"),
        (["serve", "--served-model-name", "a,,b"], "--served-model-name"),
        (["serve", "--model-path", "/no/such/folder"], "/no/such/folder"),
        (["serve", "--host", "300.1.1.1"], "--host"),
    ],
)
def test_user_errors_are_one_line(
    capsys: pytest.CaptureFixture[str], argv: list[str], said: str
) -> None:
    """S1: a wrong command line is one line on stderr that names the flag, and exit code 2."""
    assert main(argv) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert said in output.err


def test_taken_port_is_a_user_error(capsys: pytest.CaptureFixture[str]) -> None:
    """S1: a port that is in use is named, before a model is loaded."""
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 2
    assert f"--port {port}" in capsys.readouterr().err


def test_broken_checkpoint_is_a_user_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """E1: a checkpoint file that cannot be read is one line that names it."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{broken")
    assert main(["serve", "--model-path", str(tmp_path), "--port", "0"]) == 2
    assert "tokenizer.json" in capsys.readouterr().err


def test_names(tmp_path: Path) -> None:
    """S2: the default name is the folder's; the embedded model has its own; aliases by comma."""
    assert served_names(None, tmp_path / "Some-Model") == ("Some-Model",)
    assert served_names(None, EMBEDDED_MODEL) == ("gander-12m",)
    assert served_names("a, org/b", EMBEDDED_MODEL) == ("a", "org/b")


class Lifetime:
    """One run of `serve` with a stub engine."""

    def __init__(self, url: str, address: tuple[str, int], task: asyncio.Task[int]) -> None:
        self.http = httpx.AsyncClient(base_url=url)
        self.address = address
        self.task = task

    async def status(self, path: str) -> int:
        """The status code of a GET."""
        return (await self.http.get(path)).status_code

    async def exit_code(self) -> int:
        """What `serve` returns, within seconds."""
        return await asyncio.wait_for(self.task, 5)


@asynccontextmanager
async def lifetime(front_end: FrontEnd, start_engine: Any) -> AsyncIterator[Lifetime]:
    """Start `serve` on a free port."""
    options = ServeOptions(engine=EngineConfig(), names=("stub",))
    with bind("127.0.0.1", 0) as listener:
        host, port = listener.getsockname()
        task = asyncio.create_task(serve(options, front_end, listener, start_engine))
        run = Lifetime(f"http://{host}:{port}", (host, port), task)
        await until(lambda: listener.getsockopt(1, 30) == 1)  # SOL_SOCKET, SO_ACCEPTCONN
        async with run.http:
            yield run
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_start_and_stop(front_end: FrontEnd, engine: StubEngine) -> None:
    """S1, S6: 503 while the engine starts, answers after, and SIGTERM drains to exit code 0."""
    is_loaded = asyncio.Event()

    async def start_engine(config: EngineConfig) -> EngineClient:
        await is_loaded.wait()
        return engine

    async with lifetime(front_end, start_engine) as run:
        assert await run.status("/ready") == 503
        assert (await run.http.post("/v1/chat/completions", json=CHAT)).status_code == 503
        is_loaded.set()
        while await run.status("/ready") != 200:
            await asyncio.sleep(0.01)
        engine.hold_after = 2
        answer = asyncio.create_task(run.http.post("/v1/chat/completions", json=CHAT))
        await until(lambda: len(engine.requests) == 1)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.2)
        assert not run.task.done()
        engine.gate.set()
        assert (await answer).json()["choices"][0]["message"]["content"] == "The answer is 42."
        assert await run.exit_code() == 0
    assert engine.is_closed


async def test_second_signal_does_not_wait(front_end: FrontEnd, engine: StubEngine) -> None:
    """S6: a second SIGINT ends open requests."""

    async def start_engine(config: EngineConfig) -> EngineClient:
        return engine

    async with lifetime(front_end, start_engine) as run:
        while await run.status("/ready") != 200:
            await asyncio.sleep(0.01)
        engine.hold_after = 0
        call = await RawConnection.post(run.address, "/v1/completions", b'{"prompt": "x"}')
        await until(lambda: len(engine.requests) == 1)
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0.3)
        assert not run.task.done()
        os.kill(os.getpid(), signal.SIGINT)
        assert await run.exit_code() == 0
        call.writer.close()
    assert engine.is_closed


async def test_signal_while_loading(front_end: FrontEnd) -> None:
    """S6: SIGTERM during start-up cancels the start and exits with 0."""
    was_cancelled = False

    async def start_engine(config: EngineConfig) -> EngineClient:
        nonlocal was_cancelled
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            was_cancelled = True
            raise
        raise AssertionError

    async with lifetime(front_end, start_engine) as run:
        assert await run.status("/health") == 503
        os.kill(os.getpid(), signal.SIGTERM)
        assert await run.exit_code() == 0
    assert was_cancelled


async def test_engine_death_ends_the_server(
    front_end: FrontEnd, engine: StubEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """S4: a dead engine ends open streams with an error event, then the server with code 1."""

    async def start_engine(config: EngineConfig) -> EngineClient:
        return engine

    async with lifetime(front_end, start_engine) as run:
        while await run.status("/ready") != 200:
            await asyncio.sleep(0.01)
        engine.hold_after = 2
        stream = await RawConnection.post(
            run.address, "/v1/completions", b'{"prompt": "x", "stream": true}'
        )
        await stream.head()
        await stream.chunk()
        engine.die()
        assert await run.status("/health") == 503
        rest = await stream.reader.read()
        assert b'"error"' in rest
        assert b"data: [DONE]\n\n" in rest
        stream.writer.close()
        assert await run.exit_code() == 1
    assert "the engine has died" in caplog.text


@pytest.mark.parametrize(
    ("fault", "is_raised"),
    [(ValueError("--dtype cannot be used"), True), (EngineDeadError("killed"), False)],
)
async def test_engine_that_does_not_start(
    front_end: FrontEnd, fault: Exception, is_raised: bool
) -> None:
    """S1: a refusal of the engine is a user error of the command, a crash is exit code 1."""

    async def start_engine(config: EngineConfig) -> EngineClient:
        await asyncio.sleep(0.05)
        raise fault

    async with lifetime(front_end, start_engine) as run:
        if is_raised:
            with pytest.raises(ValueError, match="--dtype"):
                await run.exit_code()
        else:
            assert await run.exit_code() == 1


def test_run_serve_in_its_own_loop(engine: StubEngine) -> None:
    """S1: the function that the command calls serves on uvloop and returns the exit code."""

    async def start_engine(config: EngineConfig) -> EngineClient:
        asyncio.get_running_loop().call_later(0.3, engine.die)
        return engine

    options = ServeOptions(
        engine=EngineConfig(model_path=str(EMBEDDED_MODEL)), names=("stub",), port=0
    )
    assert run_serve(options, start_engine) == 1
