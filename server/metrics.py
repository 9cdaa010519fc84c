"""Prometheus metrics: request times measured here, engine counters taken at each scrape."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.client import EngineInfo, EngineStats
from engine.request import FinishReason, RequestUpdate

PREFIX = "deltaloom:"
LABEL = "model_name"

TTFT_BUCKETS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0,
)  # fmt: skip
INTER_TOKEN_BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5,
    0.75, 1.0, 2.5, 5.0,
)  # fmt: skip
REQUEST_BUCKETS_S = (
    0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0,
)  # fmt: skip


class EngineCollector(Collector):
    """Gauges and totals of the engine, as of the last `stats`."""

    def __init__(self, model_name: str, info: EngineInfo) -> None:
        self._model_name = model_name
        self._info = info
        self.stats: EngineStats | None = None

    def collect(self) -> Iterator[Metric]:
        """The engine's metric families; none before the first stats or once it is dead.

        Those of drafts are there only where there are positions to draft for: without
        speculation a dashboard shows no data, not an acceptance of 0.
        """
        stats = self.stats
        if stats is None:
            return
        kv_share = stats.num_pages_used / max(1, self._info.num_pages)
        for name, text, value in (
            (
                "num_requests_running",
                "Requests that decode or prefill.",
                stats.num_requests_running,
            ),
            ("num_requests_waiting", "Requests in the queue.", stats.num_requests_waiting),
            ("kv_cache_usage_perc", "Share of KV pages in use, 0 to 1.", kv_share),
            ("num_gdn_slots_used", "GDN state slots in use.", stats.num_slots_used),
        ):
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=[LABEL])
            gauge.add_metric([self._model_name], value)
            yield gauge
        for name, text, total in (
            ("num_preemptions", "Requests put back into the queue.", stats.num_preemptions_total),
            ("prompt_tokens", "Prompt tokens computed.", stats.prompt_tokens_total),
            ("generation_tokens", "Tokens generated.", stats.generation_tokens_total),
            ("num_steps", "Steps of the engine loop.", stats.num_steps_total),
            (
                "recompilations",
                "Compilations after the start; each is a bug.",
                stats.num_recompilations_total,
            ),
        ):
            counter = CounterMetricFamily(PREFIX + name, text, labels=[LABEL])
            counter.add_metric([self._model_name], total)
            yield counter
        if stats.num_accepted_per_position:
            yield from self._drafts(stats)
        yield self._startup()

    def _drafts(self, stats: EngineStats) -> Iterator[Metric]:
        for name, text, total in (
            (
                "num_drafts",
                "Times that a request had drafts scored in a step.",
                stats.num_drafts_total,
            ),
            ("num_draft_tokens", "Drafts that were scored.", stats.num_draft_tokens_total),
            (
                "num_accepted_tokens",
                "Drafts that became output; 1 + this / num_drafts is the mean acceptance length.",
                stats.num_accepted_tokens_total,
            ),
        ):
            counter = CounterMetricFamily(f"{PREFIX}spec_decode_{name}", text, labels=[LABEL])
            counter.add_metric([self._model_name], total)
            yield counter
        by_position = CounterMetricFamily(
            f"{PREFIX}spec_decode_num_accepted_tokens_per_pos",
            "Drafts that became output, by their place among the drafts of their step, from 0; "
            "this / num_drafts is the acceptance rate of the place.",
            labels=[LABEL, "position"],
        )
        for position, total in enumerate(stats.num_accepted_per_position):
            by_position.add_metric([self._model_name, str(position)], total)
        yield by_position

    def _startup(self) -> Metric:
        gauge = GaugeMetricFamily(
            PREFIX + "startup_seconds",
            "Seconds of each phase of the start; ready is the whole of it.",
            labels=[LABEL, "phase"],
        )
        for phase, seconds in self._info.startup_s.items():
            gauge.add_metric([self._model_name, phase], seconds)
        return gauge


class ServerMetrics:
    """The metrics of one served model, in a registry of their own."""

    def __init__(self, model_name: str, info: EngineInfo) -> None:
        self._registry = CollectorRegistry()
        self._engine = EngineCollector(model_name, info)
        self._registry.register(self._engine)
        self._model_name = model_name
        self._success = Counter(
            PREFIX + "request_success",
            "Requests that ended, by finish reason.",
            [LABEL, "finished_reason"],
            registry=self._registry,
        )
        self._ttft = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", TTFT_BUCKETS_S
        )
        self._inter_token = self._histogram(
            "inter_token_latency_seconds",
            "Between tokens of one request; a step's time is shared by its tokens.",
            INTER_TOKEN_BUCKETS_S,
        )
        self._e2e = self._histogram(
            "e2e_request_latency_seconds", "From arrival to the last token.", REQUEST_BUCKETS_S
        )
        self._queue_time = self._histogram(
            "request_queue_time_seconds", "From arrival to admission.", REQUEST_BUCKETS_S
        )
        for reason in FinishReason:
            self._success.labels(model_name, reason.value)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        parent = Histogram(PREFIX + name, text, [LABEL], registry=self._registry, buckets=buckets)
        return parent.labels(self._model_name)

    def start_request(self) -> RequestTimer:
        """Begin to time one choice."""
        return RequestTimer(self)

    def observe_tokens(self, num_tokens: int, elapsed_s: float, *, is_first: bool) -> None:
        """Count `num_tokens` that came `elapsed_s` after the arrival or the tokens before."""
        if is_first:
            self._ttft.observe(elapsed_s)
        else:
            self._inter_token.observe(elapsed_s / num_tokens)

    def observe_queue_time(self, queue_s: float) -> None:
        """Count a choice that was admitted `queue_s` after its arrival."""
        self._queue_time.observe(queue_s)

    def observe_end(self, reason: FinishReason, elapsed_s: float) -> None:
        """Count a choice that ended `elapsed_s` after its arrival."""
        self._success.labels(self._model_name, reason.value).inc()
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._e2e.observe(elapsed_s)

    def render(self, stats: EngineStats | None) -> bytes:
        """The exposition text; `stats` None leaves the engine's families out."""
        self._engine.stats = stats
        return generate_latest(self._registry)


class RequestTimer:
    """The clock of one choice."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics
        self._started_s = time.monotonic()
        self._last_token_s: float | None = None
        self._is_ended = False

    def observe(self, update: RequestUpdate) -> None:
        """Take in one update."""
        now_s = time.monotonic()
        if update.queue_s is not None:
            self._metrics.observe_queue_time(update.queue_s)
        if update.token_ids:
            since_s = self._started_s if self._last_token_s is None else self._last_token_s
            self._metrics.observe_tokens(
                len(update.token_ids), now_s - since_s, is_first=self._last_token_s is None
            )
            self._last_token_s = now_s
        if update.finish_reason is not None:
            self.end(update.finish_reason)

    def end(self, reason: FinishReason) -> None:
        """Count the end once; a choice without a final update was aborted."""
        if not self._is_ended:
            self._is_ended = True
            self._metrics.observe_end(reason, time.monotonic() - self._started_s)
