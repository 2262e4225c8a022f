"""Prometheus metrics. The hot path adds to plain numbers; a prometheus-client collector turns them into families on scrape.

(prometheus-client's own counters take a lock and a label lookup per observation: a dozen of them cost as much as the routing.)
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

LABELS = ("model", "tier", "worker")
TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0)
ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0)
E2E_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 600.0)
OVERHEAD_BUCKETS = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1)
ERROR_BUCKETS = (16, 64, 256, 1024, 4096, 16384, 65536)


class Histogram:
    """Bucket counts and a sum; `observe` costs a bisection."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]):
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def observe_gaps(self, last: float, marks: list[float]) -> None:
        """Observe the gaps between `last` and the first of these times, and from each to the next."""
        bounds, counts = self.bounds, self.counts
        self.total += marks[-1] - last
        for at in marks:
            counts[bisect_left(bounds, at - last)] += 1
            last = at

    def cumulative(self) -> list[tuple[str, float]]:
        """Buckets the way Prometheus wants them."""
        buckets, running = [], 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            running += count
            buckets.append((bound, float(running)))
        return buckets


class Series:
    """Everything counted per (model, tier, worker)."""

    __slots__ = (
        "cached_tokens", "e2e", "itl", "output_tokens", "overhead", "predicted_cached_tokens", "prediction_error", "prompt_tokens",
        "queue", "reasons", "statuses", "ttft", "uncached_tokens",
    )  # fmt: skip

    def __init__(self) -> None:
        self.prompt_tokens = 0.0
        self.cached_tokens = 0.0
        self.uncached_tokens = 0.0
        self.predicted_cached_tokens = 0.0
        self.output_tokens = 0.0
        self.ttft = Histogram(TTFT_BUCKETS)
        self.itl = Histogram(ITL_BUCKETS)
        self.e2e = Histogram(E2E_BUCKETS)
        self.queue = Histogram(TTFT_BUCKETS)
        self.overhead = Histogram(OVERHEAD_BUCKETS)
        self.prediction_error = Histogram(ERROR_BUCKETS)
        self.statuses: dict[int, int] = {}
        self.reasons: dict[tuple[str, str], int] = {}


class Metrics(Collector):
    """The gateway's metrics; `text()` is the body of /metrics."""

    def __init__(self) -> None:
        self.series: dict[tuple[str, str, str], Series] = {}
        self.disconnects = 0
        self.retries: dict[str, int] = {}
        self.rejected: dict[tuple[str, str], int] = {}
        self.gauges: Callable[[], Iterable[tuple[str, str, dict[str, float]]]] = lambda: ()
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def of(self, model: str, tier: str, worker: str) -> Series:
        """The series of these labels."""
        key = (model, tier, worker)
        series = self.series.get(key)
        if series is None:
            series = self.series[key] = Series()
        return series

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily]:
        requests = CounterMetricFamily("warmroute_requests", "Requests ended, by status sent to the client", labels=(*LABELS, "status"))
        decisions = CounterMetricFamily("warmroute_decisions", "Routing decisions, by reason", labels=(*LABELS, "policy", "reason"))
        tokens = [
            ("prompt_tokens", "Prompt tokens, as reported by the engine or estimated"),
            ("cached_tokens", "Prompt tokens served from the KV cache, as reported by the engine (predicted where it does not report)"),
            ("uncached_tokens", "Prompt tokens prefilled"),
            ("predicted_cached_tokens", "Prompt tokens that routing expected to be cached"),
            ("output_tokens", "Output tokens"),
        ]
        counters = [(name, CounterMetricFamily(f"warmroute_{name}", text, labels=LABELS)) for name, text in tokens]
        times = [
            ("ttft", "ttft_seconds", "Time to first token: request read to first output sent"),
            ("itl", "itl_seconds", "Inter-token latency: gap between output events of a stream"),
            ("e2e", "e2e_seconds", "Request read to last byte sent"),
            ("queue", "queue_seconds", "Predicted wait at the worker when the request was placed"),
            ("overhead", "overhead_seconds", "Time the gateway itself took before the request was sent on"),
            ("prediction_error", "prediction_error_tokens", "Absolute difference of predicted and reported cached tokens"),
        ]
        histograms = [(attr, HistogramMetricFamily(f"warmroute_{name}", text, labels=LABELS)) for attr, name, text in times]
        for labels, series in self.series.items():
            for code, count in series.statuses.items():
                requests.add_metric((*labels, str(code)), count)
            for (policy, reason), count in series.reasons.items():
                decisions.add_metric((*labels, policy, reason), count)
            for name, family in counters:
                family.add_metric(labels, getattr(series, name))
            for attr, histogram_family in histograms:
                histogram = getattr(series, attr)
                histogram_family.add_metric(labels, histogram.cumulative(), histogram.total)
        yield requests
        yield decisions
        for _, family in counters:
            yield family
        for _, histogram_family in histograms:
            yield histogram_family
        yield CounterMetricFamily("warmroute_client_disconnects", "Requests whose client left before the end", value=self.disconnects)
        retries = CounterMetricFamily("warmroute_retries", "Requests sent again, by cause", labels=("cause",))
        for cause, count in self.retries.items():
            retries.add_metric((cause,), count)
        yield retries
        rejected = CounterMetricFamily("warmroute_rejected", "Requests refused by the gateway itself", labels=("dialect", "status"))
        for (dialect, status), count in self.rejected.items():
            rejected.add_metric((dialect, status), count)
        yield rejected
        for name, help_text, values in self.gauges():
            family_of_workers = GaugeMetricFamily(f"warmroute_{name}", help_text, labels=("worker",))
            for worker, value in values.items():
                family_of_workers.add_metric((worker,), value)
            yield family_of_workers
