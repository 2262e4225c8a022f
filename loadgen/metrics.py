"""What a replay measured: percentiles, rates and shares."""

from __future__ import annotations

import math
from bisect import insort
from collections import Counter
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from loadgen.client import Answer
from loadgen.results import Figures

# Sending late distorts a latency once it is more than this share of the median TTFT (and more than the timer's own grain).
_DEGRADED_SHARE = 0.1
_DEGRADED_S = 0.005


class Samples:
    """Values kept exactly, in order."""

    def __init__(self) -> None:
        self._values: list[float] = []

    def __len__(self) -> int:
        return len(self._values)

    def add(self, value: float) -> None:
        insort(self._values, value)

    @property
    def mean(self) -> float | None:
        return sum(self._values) / len(self._values) if self._values else None

    def percentile(self, percent: float) -> float | None:
        """The smallest value that at least `percent` of the values do not exceed; None without values."""
        if not self._values:
            return None
        return self._values[max(0, math.ceil(percent / 100 * len(self._values)) - 1)]


class Histogram:
    """Weighted positive values in buckets 1 % wide: for what is counted per token, of which there are millions."""

    _GROWTH = math.log(1.01)

    def __init__(self) -> None:
        self._buckets: Counter[int] = Counter()
        self._weight = 0.0

    def add(self, value: float, weight: float) -> None:
        self._buckets[round(math.log(max(value, 1e-9)) / self._GROWTH)] += weight  # type: ignore[assignment]  # weights may be fractions
        self._weight += weight

    def percentile(self, percent: float) -> float | None:
        """The bucket value at `percent` of the weight; None without values."""
        reached = 0.0
        for bucket in sorted(self._buckets):
            reached += self._buckets[bucket]
            if reached >= percent / 100 * self._weight:
                return math.exp(bucket * self._GROWTH)
        return None


@dataclass(slots=True)
class RunResult:
    """One run's figures. Seconds and tokens; None where nothing was measured."""

    requests: int = 0
    errors: int = 0
    hit_rate: float | None = None  # cached / prompt tokens, as the server reported them
    hit_bound: float | None = None  # of the same requests in a cache that forgets nothing
    hit_bound_lru: float | None = None  # of the same requests in one LRU cache as large as the fleet's KV memory
    ttft_p50_s: float | None = None
    ttft_p90_s: float | None = None
    ttft_p99_s: float | None = None
    itl_p50_s: float | None = None
    itl_p90_s: float | None = None
    itl_p99_s: float | None = None
    e2e_p50_s: float | None = None
    e2e_p90_s: float | None = None
    e2e_p99_s: float | None = None
    user_tokens_per_s: float | None = None  # median over requests of (output - 1) / (E2E - TTFT), as of simulations
    output_tokens_per_s: float = 0.0
    uncached_input_tokens_per_s: float = 0.0
    worker_shares: dict[str, float] = field(default_factory=dict)  # share of the answered requests; empty when the server names no worker
    schedule_lag_p50_s: float | None = None  # how late this client sent
    schedule_lag_p99_s: float | None = None
    loop_lag_p99_s: float | None = None  # how late its event loop woke up
    degraded: bool = False  # the client was too slow for its latencies to be trusted
    duration_s: float = 0.0
    sessions: int = 0  # that ended in the window
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    ttft_mean_s: float | None = None
    e2e_mean_s: float | None = None
    user_tokens_per_s_e2e: float | None = None  # median over requests of output / E2E
    interrupted: bool = False
    error_kinds: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def figures(self) -> Figures:
        """As a line of a results file has them."""
        names = {field.name for field in fields(Figures)}
        return Figures(**{field.name: getattr(self, field.name) for field in fields(self) if field.name in names})


class Collector:
    """Takes every answer of a run as it ends. Failed requests count as errors and nowhere else."""

    def __init__(self) -> None:
        self.requests = 0
        self.errors: Counter[str] = Counter()
        self.ttft = Samples()
        self._e2e = Samples()
        self._itl = Histogram()
        self._speeds = Samples()
        self._lag = Samples()
        self._loop_lag = Samples()
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._cached_reported = False  # whether any answer said; an engine that reports may leave out a zero
        self._output_tokens = 0
        self._sessions = 0
        self._whole = Samples()
        self._workers: Counter[str] = Counter()
        self._issued_tokens = 0
        self._bound_tokens = 0

    def issued(self, tokens: int, bound_tokens: int, lag_s: float) -> None:
        """A prompt of `tokens` tokens was sent `lag_s` late; an infinite cache would have hit `bound_tokens`."""
        self._issued_tokens += tokens
        self._bound_tokens += bound_tokens
        self._lag.add(lag_s)

    def loop_lag(self, seconds: float) -> None:
        self._loop_lag.add(seconds)

    def session_ended(self) -> None:
        self._sessions += 1

    def answered(self, answer: Answer, recorded_prompt_tokens: int) -> None:
        self.requests += 1
        if answer.error is not None:
            self.errors[answer.error] += 1
            return
        self._e2e.add(answer.e2e_s)
        if answer.first_at:
            self.ttft.add(answer.ttft_s)
        output = answer.output_tokens if answer.output_tokens is not None else answer.content_events
        self._output_tokens += output
        if answer.e2e_s > 0:
            self._whole.add(output / answer.e2e_s)
        if answer.first_at and output > 1 and answer.ended_at > answer.first_at:
            self._speeds.add((output - 1) / (answer.ended_at - answer.first_at))
        # An event may carry several tokens (speculation): its gap is then shared among them.
        tokens_per_event = max(1.0, output / answer.content_events) if answer.content_events else 1.0
        for gap, events in answer.gaps:
            self._itl.add(gap / (events * tokens_per_event), events * tokens_per_event)
        prompt = answer.prompt_tokens if answer.prompt_tokens is not None else recorded_prompt_tokens
        self._prompt_tokens += prompt
        if answer.cached_tokens is not None:
            self._cached_reported = True
            self._cached_tokens += answer.cached_tokens
        if answer.worker is not None:
            self._workers[answer.worker] += 1

    @property
    def hit_rate(self) -> float | None:
        return self._cached_tokens / self._prompt_tokens if self._cached_reported and self._prompt_tokens else None

    @property
    def hit_bound(self) -> float | None:
        return self._bound_tokens / self._issued_tokens if self._issued_tokens else None

    def result(self, duration_s: float) -> RunResult:
        answered = sum(self._workers.values())
        ttft_p50, lag_p99 = self.ttft.percentile(50), self._lag.percentile(99)
        return RunResult(
            requests=self.requests,
            errors=sum(self.errors.values()),
            hit_rate=self.hit_rate,
            hit_bound=self.hit_bound,
            ttft_p50_s=ttft_p50,
            ttft_p90_s=self.ttft.percentile(90),
            ttft_p99_s=self.ttft.percentile(99),
            itl_p50_s=self._itl.percentile(50),
            itl_p90_s=self._itl.percentile(90),
            itl_p99_s=self._itl.percentile(99),
            e2e_p50_s=self._e2e.percentile(50),
            e2e_p90_s=self._e2e.percentile(90),
            e2e_p99_s=self._e2e.percentile(99),
            user_tokens_per_s=self._speeds.percentile(50),
            output_tokens_per_s=self._output_tokens / duration_s if duration_s else 0.0,
            uncached_input_tokens_per_s=(self._prompt_tokens - self._cached_tokens) / duration_s if duration_s else 0.0,
            worker_shares={worker: count / answered for worker, count in sorted(self._workers.items())},
            schedule_lag_p50_s=self._lag.percentile(50),
            schedule_lag_p99_s=lag_p99,
            loop_lag_p99_s=self._loop_lag.percentile(99),
            degraded=lag_p99 is not None and ttft_p50 is not None and lag_p99 > max(_DEGRADED_S, _DEGRADED_SHARE * ttft_p50),
            duration_s=duration_s,
            sessions=self._sessions,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            output_tokens=self._output_tokens,
            ttft_mean_s=self.ttft.mean,
            e2e_mean_s=self._e2e.mean,
            user_tokens_per_s_e2e=self._whole.percentile(50),
            error_kinds=dict(self.errors.most_common(10)),
        )
