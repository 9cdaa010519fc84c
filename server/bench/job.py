"""Measures latency and throughput of an endpoint, or of an engine without a server."""

from __future__ import annotations

import asyncio
import datetime
import logging
import re
import shutil
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import httpx
import uvloop

from engine.client import EngineDeadError
from engine.config import EngineConfig
from engine.worker_client import start_worker
from server.bench.endpoint import EndpointTarget, first_model
from server.bench.load import (
    BenchTarget,
    LoadResult,
    RequestFailedError,
    RequestShape,
    run_load,
)
from server.bench.report import load_rows, render_table, startup_row
from server.bench.results import ResultRow, write_results
from server.bench.targets import EngineTarget
from server.serve import StartEngine

logger = logging.getLogger(__name__)

EXIT_ENGINE_DIED = 1
READ_TIMEOUT_S = 600.0
CONNECT_TIMEOUT_S = 10.0
MIN_REQUESTS = 8
RESULTS_FOLDER = Path("bench/results")
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What `deltaloom bench` was asked for. Without `base_url` an engine is started.

    `geometry` None means the model's name: `engine_name` is that of an engine of our own.
    """

    engine: EngineConfig
    engine_name: str
    geometry: str | None
    shape: RequestShape
    concurrency: tuple[int, ...]
    num_requests: int | None
    prompt_seed: int
    results: Path | None
    command: str
    base_url: str | None = None
    model: str | None = None
    api_key: str | None = field(default=None, repr=False)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What runs the requests, and what its results are filed under."""

    target: BenchTarget
    bench: str
    geometry: str
    dtype: str
    device: str
    startup_s: float | None


def run_bench(options: BenchOptions, start_engine: StartEngine = start_worker) -> int:
    """Measure, print a table and write a results file; 1 if the engine died.

    Raises:
        ValueError: an option cannot be used, or a request failed: then nothing is written.
    """
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            measured, loads = runner.run(measure(options, start_engine))
    except RequestFailedError as error:
        raise ValueError(f"nothing was measured: {error}") from error
    except EngineDeadError as error:
        logger.error("nothing was measured: %s", error)
        return EXIT_ENGINE_DIED
    sys.stdout.write(render_table(loads))
    path = options.results or default_path(measured)
    rows = build_rows(measured, loads)
    write_results(path, rows, command=options.command, device=measured.device)
    sys.stdout.write(f"written to {path}\n")
    return 0


async def measure(
    options: BenchOptions, start_engine: StartEngine
) -> tuple[Measured, list[LoadResult]]:
    """Run every level of load, after one request that is not counted."""
    opened = open_engine(options, start_engine) if options.base_url is None else open_url(options)
    async with opened as measured:
        await measured.target.measure(Random(f"{options.prompt_seed}/first"))
        loads: list[LoadResult] = []
        for num_streams in options.concurrency:
            num_requests = options.num_requests or max(MIN_REQUESTS, 2 * num_streams)
            logger.info("%d requests, %d at once", num_requests, num_streams)
            loads.append(
                await run_load(
                    measured.target,
                    num_streams=num_streams,
                    num_requests=num_requests,
                    seed=f"{options.prompt_seed}/{len(loads)}",
                )
            )
        return measured, loads


@asynccontextmanager
async def open_engine(options: BenchOptions, start_engine: StartEngine) -> AsyncIterator[Measured]:
    """An engine of our own."""
    client = await start_engine(options.engine)
    try:
        yield Measured(
            target=EngineTarget(client, options.shape),
            bench="engine",
            geometry=options.geometry or options.engine_name,
            dtype=client.info.dtype,
            device="cpu" if client.info.device == "cpu" else "cuda",
            startup_s=client.info.startup_s["ready"],
        )
    finally:
        await client.close()


@asynccontextmanager
async def open_url(options: BenchOptions) -> AsyncIterator[Measured]:
    """An endpoint that runs already. It is taken to run on this machine."""
    assert options.base_url is not None
    headers = {} if options.api_key is None else {"authorization": f"Bearer {options.api_key}"}
    device = options.engine.device
    if device == "auto":
        device = "cpu" if shutil.which("nvidia-smi") is None else "cuda"
    async with httpx.AsyncClient(
        base_url=options.base_url,
        headers=headers,
        timeout=httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
        limits=httpx.Limits(max_connections=None),
    ) as http:
        model = options.model or await first_model(http)
        target = EndpointTarget(http, model, options.shape)
        await target.calibrate(Random(f"{options.prompt_seed}/probe"))
        yield Measured(
            target=target,
            bench="http",
            geometry=options.geometry or model.rpartition("/")[2],
            dtype="unknown" if options.engine.dtype == "auto" else options.engine.dtype,
            device=device,
            startup_s=None,
        )


def build_rows(measured: Measured, loads: Sequence[LoadResult]) -> list[ResultRow]:
    """All rows of a results file."""
    geometry, dtype = measured.geometry, measured.dtype
    rows = []
    if measured.startup_s is not None:
        rows.append(startup_row(measured.startup_s, geometry=geometry, dtype=dtype))
    for load in loads:
        rows += load_rows(load, bench=measured.bench, geometry=geometry, dtype=dtype)
    return rows


def default_path(measured: Measured) -> Path:
    """Where results go if no file is named."""
    now = datetime.datetime.now(datetime.UTC)
    name = _UNSAFE.sub("-", measured.geometry)
    return RESULTS_FOLDER / f"{now:%Y%m%d-%H%M%S}-{name}-{measured.bench}.json"
