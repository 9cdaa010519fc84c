"""Load of a fixed number of streams, and what it says about latency and throughput."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class RequestShape:
    """What each request asks for. Without `ignore_eos` outputs may be shorter."""

    num_prompt_tokens: int
    num_output_tokens: int
    ignore_eos: bool


@dataclass(frozen=True, kw_only=True)
class RequestTrace:
    """One answered request; times are of one monotonic clock."""

    started_s: float
    first_token_s: float
    last_token_s: float
    num_prompt_tokens: int
    num_output_tokens: int

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.first_token_s - self.started_s

    @property
    def e2e_s(self) -> float:
        """Time to the last token."""
        return self.last_token_s - self.started_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first; None for a single token."""
        if self.num_output_tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.num_output_tokens - 1)


class RequestFailedError(RuntimeError):
    """What is measured refused or failed a request, so there is nothing to measure."""


class BenchTarget(Protocol):
    """Something that answers requests of one shape."""

    async def measure(self, random: Random) -> RequestTrace:
        """Run one request whose prompt is made from `random`.

        Raises:
            RequestFailedError: the request has no complete answer.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class LoadResult:
    """All requests of one level of load, which took `wall_s` together."""

    num_streams: int
    wall_s: float
    traces: Sequence[RequestTrace]

    @property
    def num_prompt_tokens(self) -> int:
        """Mean prompt length, rounded."""
        return round(sum(trace.num_prompt_tokens for trace in self.traces) / len(self.traces))

    @property
    def output_tok_s(self) -> float:
        """Output tokens of all streams per second of the whole run, prefills included."""
        return sum(trace.num_output_tokens for trace in self.traces) / self.wall_s

    @property
    def stream_tok_s(self) -> float:
        """Tokens per second that the median stream sees after its first token; 0 if no two came."""
        tpot_s = percentile(self.tpots_s, 50)
        return 1 / tpot_s if tpot_s > 0 else 0.0

    @property
    def ttfts_s(self) -> list[float]:
        """Times to the first token."""
        return [trace.ttft_s for trace in self.traces]

    @property
    def tpots_s(self) -> list[float]:
        """Times per token after the first, of requests that have them."""
        return [trace.tpot_s for trace in self.traces if trace.tpot_s is not None]

    @property
    def e2es_s(self) -> list[float]:
        """Times to the last token."""
        return [trace.e2e_s for trace in self.traces]


async def run_load(
    target: BenchTarget, *, num_streams: int, num_requests: int, seed: str
) -> LoadResult:
    """Keep `num_streams` requests open until `num_requests` are answered.

    Every request has its own prompt: `seed` and its number make it.

    Raises:
        RequestFailedError: one failed; the others are given up.
    """
    numbers = iter(range(num_requests))
    traces: list[RequestTrace] = []
    started_s = time.monotonic()
    streams = [
        asyncio.create_task(run_stream(target, numbers, seed, traces)) for _ in range(num_streams)
    ]
    try:
        await asyncio.gather(*streams)
    finally:
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    wall_s = time.monotonic() - started_s
    return LoadResult(num_streams=num_streams, wall_s=wall_s, traces=traces)


async def run_stream(
    target: BenchTarget, numbers: Iterator[int], seed: str, traces: list[RequestTrace]
) -> None:
    """One request after the other, for as long as `numbers` has a next one."""
    for number in numbers:
        traces.append(await target.measure(Random(f"{seed}/{number}")))


def percentile(values: Sequence[float], percent: float) -> float:
    """The nearest-rank percentile: the smallest value that `percent` % do not exceed; 0 of none."""
    if not values:
        return 0.0
    rank = math.ceil(len(values) * percent / 100)
    return sorted(values)[max(rank, 1) - 1]
