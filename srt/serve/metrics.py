"""What is counted and timed, as Prometheus reads it. docs/serving.md says what each is called
elsewhere.
"""

import time
from collections.abc import Callable, Iterable, Sequence

from fastapi import APIRouter, Request
from fastapi.responses import Response
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from srt.serve.engine.generations import GenerationEnd
from srt.serve.engine.protocol import EngineFacts, EngineStats
from srt.serve.records import CURRENT_RECORD, RequestRecord
from srt.version import __version__

# On a processor a token takes from a few milliseconds to seconds, and a long prompt minutes.
_TOKEN_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5)
_FIRST_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)
_WHOLE_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 1280)
_LENGTH_BUCKETS = tuple(4**power for power in range(10))
# Paths that have a series of their own; clients may ask for any.
_PATHS = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/models",
        "/tokenize",
        "/detokenize",
        "/health",
        "/ready",
        "/metrics",
        "/version",
        "/",
    }
)


class ServerMetrics:
    """One server's metrics, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, labels: Sequence[str] = ()) -> Counter:
            return Counter(f"srt_{name}", text, labels, registry=self.registry)

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(f"srt_{name}", text, buckets=buckets, registry=self.registry)

        self.requests = counter(
            "requests", "Requests that have ended, by path and outcome.", ("path", "outcome")
        )
        self.refused_connections = counter(
            "refused_connections", "Refusals before there was a request, by status.", ("status",)
        )
        self.dropped_log_lines = counter("dropped_log_lines", "Lines that no log could take.")
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts.")
        self.cached_tokens = counter(
            "cached_prompt_tokens", "Those of them that the cache had already."
        )
        self.generation_tokens = counter("generation_tokens", "Tokens that were generated.")
        self.finished = counter(
            "generations", "Generations that have ended, by their reason.", ("finish_reason",)
        )
        self.queue_time = histogram(
            "request_queue_time_seconds", "From arrival to the begin of prefill.", _FIRST_BUCKETS
        )
        self.first_token = histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", _FIRST_BUCKETS
        )
        self.inter_token = histogram(
            "inter_token_latency_seconds", "From a token to the next.", _TOKEN_BUCKETS
        )
        self.whole = histogram(
            "e2e_request_latency_seconds", "From arrival to the last token.", _WHOLE_BUCKETS
        )
        self.prompt_length = histogram(
            "request_prompt_tokens", "Tokens of a prompt.", _LENGTH_BUCKETS
        )
        self.generation_length = histogram(
            "request_generation_tokens", "Tokens of a generation.", _LENGTH_BUCKETS
        )

    def observe_generation(self) -> "GenerationObserver":
        """What is told of a generation that begins now."""
        return GenerationObserver(self, CURRENT_RECORD.get(None))

    def count(self, record: RequestRecord, outcome: str) -> None:
        """Counts a request that has ended."""
        path = record.path
        if path.startswith("/v1/models/"):
            path = "/v1/models"
        self.requests.labels(path if path in _PATHS else "other", outcome).inc()

    def count_refused(self, status: int) -> None:
        """Counts a refusal of a connection."""
        self.refused_connections.labels(str(status)).inc()

    def watch_engine(self, read: Callable[[], "EngineReading"]) -> None:
        """Adds what the engine tells of itself, asked whenever metrics are read."""
        self.registry.register(_EngineCollector(read))


EngineReading = tuple[str, EngineStats, EngineFacts | None, int, int]
"""The model's name, load, facts, requests that have not begun, restarts."""


class GenerationObserver:
    """Times a generation.

    Args:
        metrics: Where to.
        record: The request that it belongs to, if any.
    """

    __slots__ = ("_last", "_metrics", "_record", "_started")

    def __init__(self, metrics: ServerMetrics, record: RequestRecord | None) -> None:
        self._metrics = metrics
        self._record = record
        self._started = time.perf_counter() if record is None else record.started
        self._last = 0.0

    def on_tokens(self) -> None:
        """Takes the time of a token."""
        now = time.perf_counter()
        if self._last:
            self._metrics.inter_token.observe(now - self._last)
        else:
            self._metrics.first_token.observe(now - self._started)
            record = self._record
            if record is not None and record.first_token is None:
                record.first_token = now - self._started
        self._last = now

    def on_end(self, end: GenerationEnd) -> None:
        """Takes how it ended."""
        metrics = self._metrics
        if self._record is not None:
            self._record.take(end)
            if end.error is not None:
                self._record.error = "generation_failed"
        metrics.prompt_tokens.inc(end.prompt_tokens)
        metrics.cached_tokens.inc(end.cached_tokens)
        metrics.generation_tokens.inc(end.completion_tokens)
        metrics.finished.labels(end.finish_reason).inc()
        metrics.queue_time.observe(end.queue_seconds)
        metrics.whole.observe(time.perf_counter() - self._started)
        metrics.prompt_length.observe(end.prompt_tokens)
        metrics.generation_length.observe(end.completion_tokens)

    def on_error(self, code: str | None) -> None:
        """Takes that it failed without an end."""
        self._metrics.finished.labels("error").inc()
        if self._record is not None:
            self._record.error = code or "error"


class _EngineCollector(Collector):
    def __init__(self, read: Callable[[], EngineReading]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        name, stats, facts, queued, restarts = self._read()
        if facts is not None:
            labels = {
                "version": __version__,
                "model": name,
                "dtype": facts.dtype,
                "kv_cache_dtype": facts.kv_cache_dtype,
                "tier": facts.tier,
                "threads": str(facts.threads),
            }
            info = GaugeMetricFamily("srt_build_info", "What is served.", labels=list(labels))
            info.add_metric(list(labels.values()), 1)
            yield info
        size = stats.kv_tokens or (0 if facts is None else facts.kv_tokens)
        for gauge, text, value in (
            ("num_requests_running", "Requests that are prefilled or decoded.", stats.running),
            ("num_requests_waiting", "Requests that have not begun.", queued),
            ("kv_cache_tokens", "Tokens that the KV cache holds.", size),
            ("kv_cache_used_tokens", "Tokens of it in use.", stats.kv_used_tokens),
            ("kv_cache_prefix_tokens", "Tokens kept for later prompts.", stats.kv_cached_tokens),
            ("kv_cache_usage_ratio", "Its share in use.", stats.kv_used_tokens / max(1, size)),
        ):
            yield GaugeMetricFamily(f"srt_{gauge}", text, value=float(value))
        for counter, text, value in (
            ("engine_restarts", "How often the engine was started again.", restarts),
            ("retractions", "Requests that gave their slots back.", stats.retractions),
        ):
            yield CounterMetricFamily(f"srt_{counter}", text, value=float(value))
        for counter, text, prefill, decode in (
            ("steps", "Forward passes.", stats.work.prefill_passes, stats.work.decode_passes),
            (
                "step_seconds",
                "Time in them.",
                stats.work.prefill_seconds,
                stats.work.decode_seconds,
            ),
            ("step_tokens", "Tokens in them.", stats.work.prefill_tokens, stats.work.decode_tokens),
        ):
            family = CounterMetricFamily(f"srt_{counter}", text, labels=["mode"])
            family.add_metric(["prefill"], float(prefill))
            family.add_metric(["decode"], float(decode))
            yield family


def make_router(metrics: ServerMetrics) -> APIRouter:
    """The route of metrics."""
    router = APIRouter()

    @router.get("/metrics")
    async def read_metrics(request: Request) -> Response:
        """What Prometheus reads."""
        encode, kind = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(metrics.registry), headers={"Content-Type": kind})

    return router
