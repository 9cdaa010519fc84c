"""Streaming over HTTP beside `LLM.generate`: the same load on the same engine options.

    python -m bench.serving [--geometry NAMES] [--connections N] [--prompt-tokens N] [--tokens N]
        [--results FILE]

Weights are made up, and so are the tokenizer and the chat layout (`bench.made_up_checkpoint`).
Offline, one call has a prompt for each connection. Then `deltaloom serve` runs as a process of its
own, and as many chat completions as connections are streamed from it at once, as by
`deltaloom bench --base-url`. Both rates are output tokens over the whole time, prefills included.
Run it from the repository's root.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import httpx
import torch

from bench.made_up_checkpoint import save_made_up
from bench.step_model import GEOMETRIES
from engine import LLM, SamplingParams
from server.bench.endpoint import EndpointTarget, first_model
from server.bench.load import LoadResult, RequestShape, run_load
from server.bench.results import ResultRow, write_results

MIN_SHARE = 0.95
NUM_REPEATS = 2
READY_TIMEOUT_S = 400.0
END_TIMEOUT_S = 60.0
POLL_S = 0.2
SEED = 0


def read_flags() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="HTTP streaming beside LLM.generate")
    parser.add_argument("--geometry", default="Qwen3.6-27B,Qwen3.6-35B-A3B")
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=512, help="output tokens of a request")
    parser.add_argument("--compile", default="auto", help="as of the server")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--results", type=Path, help="default: only print")
    return parser.parse_args()


def main() -> None:
    """Measure, print, write results."""
    flags = read_flags()
    rows: list[ResultRow] = []
    for geometry in flags.geometry.split(","):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            save_made_up(GEOMETRIES / geometry, folder)
            offline = offline_rate(folder, flags)
            load = http_load(folder, flags)
        share = load.output_tok_s / offline
        print(
            f"{geometry}, {flags.connections} streams: offline {offline:.0f} tok/s, HTTP "
            f"{load.output_tok_s:.0f} tok/s: {share:.1%}, "
            f"{'meets' if share >= MIN_SHARE else 'MISSES'} the bar of {MIN_SHARE:.0%}",
            flush=True,
        )
        for bench, rate in (("generate.total", offline), ("http.total", load.output_tok_s)):
            rows.append(
                ResultRow(
                    bench=bench,
                    geometry=geometry,
                    dtype="bfloat16",
                    batch=flags.connections,
                    context=load.num_prompt_tokens,
                    metric="decode_tok_s",
                    value=rate,
                    unit="tok/s",
                )
            )
    if flags.results is not None:
        write_results(flags.results, rows, command=shlex.join(sys.argv), device=flags.device)


def max_model_len(flags: argparse.Namespace) -> int:
    """Room for a request, in whole pages, and a page more: a chat layout may add tokens."""
    num_tokens = flags.prompt_tokens + flags.tokens
    return int(-(-num_tokens // 64) * 64) + 64


def offline_rate(folder: Path, flags: argparse.Namespace) -> float:
    """Output tokens per second of one call, the best of some."""
    random = Random(SEED)
    prompts = [
        [random.randrange(1000) for _ in range(flags.prompt_tokens)]
        for _ in range(flags.connections)
    ]
    params = SamplingParams(temperature=0.0, max_tokens=flags.tokens, ignore_eos=True)
    with LLM(
        str(folder),
        load_format="dummy",
        device=flags.device,
        dtype="bfloat16",
        compile=flags.compile,
        max_running_requests=flags.connections,
        max_model_len=max_model_len(flags),
        max_kv_tokens=flags.connections * max_model_len(flags),
    ) as llm:
        walls = []
        for _ in range(NUM_REPEATS):
            start = time.perf_counter()
            llm.generate(prompts, params)
            walls.append(time.perf_counter() - start)
    del llm
    gc.collect()
    if flags.device == "cuda":
        torch.cuda.empty_cache()
    return float(flags.connections * flags.tokens / min(walls))


def http_load(folder: Path, flags: argparse.Namespace) -> LoadResult:
    """The same load streamed from a server of its own, the best of some."""
    with serving(folder, flags) as url:
        return asyncio.run(stream_load(url, flags))


async def stream_load(url: str, flags: argparse.Namespace) -> LoadResult:
    """As many requests as connections, all at once, some times over."""
    shape = RequestShape(
        num_prompt_tokens=flags.prompt_tokens, num_output_tokens=flags.tokens, ignore_eos=True
    )
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=f"{url}/v1", timeout=600.0, limits=limits) as http:
        target = EndpointTarget(http, await first_model(http), shape)
        await target.calibrate(Random(SEED))
        loads = [
            await run_load(
                target,
                num_streams=flags.connections,
                num_requests=flags.connections,
                seed=f"{SEED}/{repeat}",
            )
            for repeat in range(NUM_REPEATS)
        ]
    return max(loads, key=lambda load: load.output_tok_s)


@contextmanager
def serving(folder: Path, flags: argparse.Namespace) -> Iterator[str]:
    """The URL of a ready server, which ends with the body."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = {
        "--port": port,
        "--model-path": folder,
        "--load-format": "dummy",
        "--device": flags.device,
        "--dtype": "bfloat16",
        "--compile": flags.compile,
        "--max-running-requests": flags.connections,
        "--max-model-len": max_model_len(flags),
        "--max-kv-tokens": flags.connections * max_model_len(flags),
    }
    words = [str(word) for option in options.items() for word in option]
    process = subprocess.Popen([sys.executable, "-m", "server.cli", "serve", *words])
    try:
        url = f"http://127.0.0.1:{port}"
        wait_ready(url, process)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(END_TIMEOUT_S)


def wait_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until the server answers requests; raises when it ends before."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError("the server ended while it started")
        try:
            if httpx.get(f"{url}/ready").status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            pass
        time.sleep(POLL_S)
    raise RuntimeError(f"the server was not ready after {READY_TIMEOUT_S:.0f} s")


if __name__ == "__main__":
    main()
