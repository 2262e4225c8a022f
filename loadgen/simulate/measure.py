"""What a simulation's turns come to: each turn's times and tokens, and the figures of a window."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from loadgen.metrics import Histogram
from loadgen.results import Figures


@dataclass(slots=True, eq=False)
class TurnRecord:
    """One request. Virtual seconds, tokens."""

    tier: str
    asked_at: float
    prompt_tokens: int
    output_tokens: int
    bound_tokens: int  # what an infinite cache would have hit
    measured: bool = False
    arrived_at: float = 0.0  # at the engine
    scheduled_at: float | None = None  # first chunk
    first_at: float | None = None
    ended_at: float | None = None
    cached_tokens: int = 0
    lost_tokens: int = 0  # that its worker once had and had to compute again
    worker: str = ""

    @property
    def ttft_s(self) -> float:
        assert self.first_at is not None
        return self.first_at - self.asked_at

    @property
    def e2e_s(self) -> float:
        assert self.ended_at is not None
        return self.ended_at - self.asked_at


class Measure:
    """Takes a run's turns. Latencies are of the turns that were sent in the window, throughput is of those that ended in it."""

    def __init__(self) -> None:
        self.turns: list[TurnRecord] = []  # sent in the window
        self.errors: list[str] = []
        self._ended: list[TurnRecord] = []
        self._sessions: list[float] = []

    def failed(self, record: TurnRecord, why: str) -> None:
        if record.measured:
            self.errors.append(why)

    def ended(self, record: TurnRecord) -> None:
        if record.ended_at is not None:
            self._ended.append(record)

    def session_ended(self, now: float) -> None:
        self._sessions.append(now)

    def figures(self, begin: float, end: float, tier: str | None = None) -> Figures:
        """Figures of the window from `begin` to `end`; of one tier alone where it is named (its errors and sessions are not told apart)."""
        sent = [t for t in self.turns if t.ended_at is not None and tier in (None, t.tier)]
        ended = [t for t in self._ended if begin <= (t.ended_at or 0.0) <= end and tier in (None, t.tier)]
        figures = Figures(duration_s=max(end - begin, 1e-9), requests=len(ended))
        if tier is None:
            figures.errors = len(self.errors)
            figures.sessions = sum(1 for at in self._sessions if begin <= at <= end)
        figures.prompt_tokens = sum(t.prompt_tokens for t in ended)
        figures.cached_tokens = sum(t.cached_tokens for t in ended)
        figures.output_tokens = sum(t.output_tokens for t in ended)
        figures.evicted_tokens = sum(t.lost_tokens for t in ended)
        prompt_tokens = sum(t.prompt_tokens for t in ended)
        figures.hit_bound = sum(t.bound_tokens for t in ended) / prompt_tokens if prompt_tokens else None
        ttft = sorted(t.ttft_s for t in sent)
        e2e = sorted(t.e2e_s for t in sent)
        queue = sorted(t.scheduled_at - t.arrived_at for t in sent if t.scheduled_at is not None)
        itl = Histogram()
        speeds, speeds_e2e = [], []
        for turn in sent:
            if turn.output_tokens > 1 and (stream := turn.e2e_s - turn.ttft_s) > 0:
                itl.add(stream / (turn.output_tokens - 1), turn.output_tokens - 1)
                speeds.append((turn.output_tokens - 1) / stream)
            if turn.e2e_s > 0:
                speeds_e2e.append(turn.output_tokens / turn.e2e_s)
        if sent:
            figures.ttft_mean_s, figures.e2e_mean_s = sum(ttft) / len(ttft), sum(e2e) / len(e2e)
        figures.ttft_p50_s, figures.ttft_p90_s, figures.ttft_p99_s = (_percentile(ttft, p) for p in (50, 90, 99))
        figures.e2e_p50_s, figures.e2e_p90_s, figures.e2e_p99_s = (_percentile(e2e, p) for p in (50, 90, 99))
        figures.itl_p50_s, figures.itl_p90_s, figures.itl_p99_s = (itl.percentile(p) for p in (50, 90, 99))
        figures.queue_p50_s, figures.queue_p90_s = (_percentile(queue, p) for p in (50, 90))
        figures.user_tokens_per_s = _percentile(sorted(speeds), 50)
        figures.user_tokens_per_s_e2e = _percentile(sorted(speeds_e2e), 50)
        return figures


def _percentile(values: Sequence[float], percent: float) -> float | None:
    """The smallest of the sorted values that at least `percent` of them do not exceed; None without values."""
    return values[max(0, math.ceil(percent / 100 * len(values)) - 1)] if values else None
