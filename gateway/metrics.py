"""Prometheus metrics. The hot path adds to plain numbers; a prometheus-client collector turns them into families on scrape.

(prometheus-client's own counters take a lock and a label lookup per observation: a dozen of them cost as much as the routing.)

Where one machine runs several gateway processes, a scrape reaches any of them and shows them all: each gives a report, plain enough for
JSON, and reports are merged. Counters and histograms are summed; what becomes of a gauge stands in `GAUGES`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from statistics import fmean
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

LABELS = ("model", "tier", "worker")
TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0)
ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0)
E2E_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 600.0)
OVERHEAD_BUCKETS = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1)
ERROR_BUCKETS = (16, 64, 256, 1024, 4096, 16384, 65536)

# A gauge's name, its help, and its value for a worker by label ("" for the one value of a gauge without labels)
Gauge = tuple[str, str, dict[str, float]]
Merge = Callable[[Iterable[float]], float]

# How the values that several processes have of one gauge become one. What each does on its own account is added up; what each
# sees of the same thing is the same but for its age: the largest, or for a calibration the mean. Others: the largest.
GAUGES: dict[str, Merge] = {
    "worker_up": max,
    "worker_prefilling": sum,
    "worker_decoding": sum,
    "worker_pending_prefill_s": sum,
    "worker_active_tokens": sum,
    "worker_live_sessions": sum,
    "worker_working_set_tokens": sum,
    "worker_prefill_scale": fmean,
    "worker_decode_scale": fmean,
    "worker_memory_blocks": max,  # each is bounded by the worker's cache, and they overlap: a sum would exceed it
    "worker_others_in_flight": max,  # of processes of one machine the others are the siblings as well
    "worker_connections": sum,
    "worker_engine_running": max,
    "worker_engine_waiting": max,
    "worker_engine_kv_use": max,
    "worker_trust": max,
    "worker_trust_changes": max,
    "worker_event_blocks": max,
    "worker_event_gaps": max,
    "worker_event_orphans": max,
    "worker_events_followed": max,
    "redis_degraded": max,
    "gateways": max,
    "shared_index_synced": min,
    "shared_index_uploads": sum,
    "shared_index_written_blocks": sum,
    "shared_index_refused_blocks": sum,
    "shared_lookups": sum,
    "shared_lookups_failed": sum,
    "shared_lookups_spared": sum,
    "shared_lookup_seconds": sum,
}


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

    def add(self, counts: list[int], total: float) -> None:
        """Add what another with the same bounds has observed."""
        self.counts = [mine + other for mine, other in zip(self.counts, counts, strict=True)]
        self.total += total


class Series:
    """Everything counted per (model, tier, worker)."""

    NUMBERS = ("prompt_tokens", "cached_tokens", "uncached_tokens", "predicted_cached_tokens", "output_tokens")
    HISTOGRAMS = ("ttft", "itl", "e2e", "queue", "overhead", "prediction_error")
    __slots__ = (*NUMBERS, *HISTOGRAMS, "reasons", "statuses")

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

    def report(self) -> dict[str, Any]:
        return {
            "numbers": [getattr(self, name) for name in self.NUMBERS],
            "histograms": [(list((h := getattr(self, name)).counts), h.total) for name in self.HISTOGRAMS],
            "statuses": list(self.statuses.items()),
            "reasons": list(self.reasons.items()),
        }

    def add(self, report: dict[str, Any]) -> None:
        for name, value in zip(self.NUMBERS, report["numbers"], strict=True):
            setattr(self, name, getattr(self, name) + value)
        for name, (counts, total) in zip(self.HISTOGRAMS, report["histograms"], strict=True):
            getattr(self, name).add(counts, total)
        for status, count in report["statuses"]:
            self.statuses[status] = self.statuses.get(status, 0) + count
        for (policy, reason), count in report["reasons"]:
            self.reasons[policy, reason] = self.reasons.get((policy, reason), 0) + count


class Metrics:
    """What a gateway counts."""

    def __init__(self) -> None:
        self.series: dict[tuple[str, str, str], Series] = {}
        self.disconnects = 0
        self.retries: dict[str, int] = {}
        self.rejected: dict[tuple[str, str], int] = {}

    def of(self, model: str, tier: str, worker: str) -> Series:
        """The series of these labels."""
        key = (model, tier, worker)
        series = self.series.get(key)
        if series is None:
            series = self.series[key] = Series()
        return series

    def report(self) -> dict[str, Any]:
        """Everything counted until now, as what JSON can say."""
        return {
            "series": [(labels, series.report()) for labels, series in self.series.items()],
            "disconnects": self.disconnects,
            "retries": list(self.retries.items()),
            "rejected": list(self.rejected.items()),
        }

    def add(self, report: dict[str, Any]) -> None:
        """Count what another process has counted as well."""
        for (model, tier, worker), series in report["series"]:
            self.of(model, tier, worker).add(series)
        self.disconnects += report["disconnects"]
        for cause, count in report["retries"]:
            self.retries[cause] = self.retries.get(cause, 0) + count
        for (dialect, status), count in report["rejected"]:
            self.rejected[dialect, status] = self.rejected.get((dialect, status), 0) + count


def merge_by_worker(name: str, values: list[dict[str, Any]]) -> dict[str, float]:
    """What several processes say of one gauge (worker -> value), as one. A value that is no number (JSON has no NaN) is left out."""
    merge = GAUGES.get(name, max)
    found: dict[str, list[float]] = {}
    for by_worker in values:
        for worker, value in by_worker.items():
            if value is not None:
                found.setdefault(worker, []).append(value)
    return {worker: merge(given) for worker, given in found.items()}


def merge_load(loads: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """What several processes say of their workers' load (worker -> name -> value), as one: the gauges `worker_<name>` of `Router.load`."""
    merged: dict[str, dict[str, float]] = {}
    for name in dict.fromkeys(name for load in loads for values in load.values() for name in values):
        by_process = [{worker: values[name] for worker, values in load.items() if name in values} for load in loads]
        for worker, value in merge_by_worker(f"worker_{name}", by_process).items():
            merged.setdefault(worker, {})[name] = value
    return merged


def merge_gauges(reports: Iterable[Iterable[Gauge]]) -> list[Gauge]:
    """The gauges of several processes as one."""
    help_texts: dict[str, str] = {}
    values: dict[str, list[dict[str, float]]] = {}
    for gauges in reports:
        for name, help_text, by_worker in gauges:
            help_texts[name] = help_text
            values.setdefault(name, []).append(by_worker)
    return [(name, help_texts[name], merge_by_worker(name, given)) for name, given in values.items()]


def exposition(metrics: Metrics, gauges: Iterable[Gauge]) -> bytes:
    """The body of /metrics."""
    registry = CollectorRegistry()
    registry.register(_Families(metrics, gauges))
    return generate_latest(registry)


class _Families(Collector):
    def __init__(self, metrics: Metrics, gauges: Iterable[Gauge]):
        self._metrics = metrics
        self._gauges = gauges

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily]:
        metrics = self._metrics
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
        for labels, series in metrics.series.items():
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
        yield CounterMetricFamily("warmroute_client_disconnects", "Requests whose client left before the end", value=metrics.disconnects)
        retries = CounterMetricFamily("warmroute_retries", "Requests sent again, by cause", labels=("cause",))
        for cause, count in metrics.retries.items():
            retries.add_metric((cause,), count)
        yield retries
        rejected = CounterMetricFamily("warmroute_rejected", "Requests refused by the gateway itself", labels=("dialect", "status"))
        for (dialect, status), count in metrics.rejected.items():
            rejected.add_metric((dialect, status), count)
        yield rejected
        for name, help_text, values in self._gauges:
            if values.keys() == {""}:
                yield GaugeMetricFamily(f"warmroute_{name}", help_text, value=values[""])
                continue
            family_of_workers = GaugeMetricFamily(f"warmroute_{name}", help_text, labels=("worker",))
            for worker, value in values.items():
                family_of_workers.add_metric((worker,), value)
            yield family_of_workers
