"""Policies: given one request and the candidates, which worker. Every policy is one small class with one method.

`warm` is the product; the others are baselines and fallbacks behind the same interface.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from xxhash import xxh3_64_intdigest

from routing.fleet import DEFAULT_OUTPUT_TOKENS, Worker
from routing.sessions import Session, SessionTable


@dataclass(slots=True)
class Placement:
    """What a policy may look at. Sizes are tokens."""

    prompt_tokens: float
    cached: Mapping[str, float]  # worker id -> prompt tokens it is believed to hold
    session: Session | None
    sessions: SessionTable
    output_tokens: float
    decode_weight: float  # how much a second of decoding counts against one of waiting (by tier)
    congestion: Congestion
    now: float


class Terms(NamedTuple):
    """One candidate's cost and its parts, in seconds; `cached` in tokens."""

    worker: Worker
    cost: float
    wait: float = 0.0
    own: float = 0.0
    congestion: float = 0.0
    decode: float = 0.0
    evict: float = 0.0
    crowd: float = 0.0
    cached: float = 0.0


class Congestion:
    """Arrivals and prefill work of the fleet, as exponentially decayed rates (time constant `window_s`)."""

    def __init__(self, window_s: float = 60.0):
        self.window_s = window_s
        self.arrivals_per_s = 0.0
        self.work_per_s = 0.0  # seconds of prefill assigned per second, over the whole fleet
        self._since: float | None = None
        self._last = 0.0
        self._arrivals = 0.0
        self._work = 0.0

    def add(self, prefill_s: float, now: float) -> None:
        """Count one request of this much prefill work."""
        if self._since is None:
            self._since = self._last = now
        # first-order decay: no exp() per request, and exact enough for steps far below the window
        keep = max(0.0, 1.0 - (now - self._last) / self.window_s)
        self._last = now
        self._arrivals = self._arrivals * keep + 1.0
        self._work = self._work * keep + prefill_s
        seen = min(max(now - self._since, 1.0), self.window_s)
        self.arrivals_per_s = self._arrivals / seen
        self.work_per_s = self._work / seen


class Policy(Protocol):
    """Chooses a worker. `candidates` is never empty. The answer's first entry is the choice; the others explain it."""

    name: str

    def rank(self, placement: Placement, candidates: Sequence[Worker]) -> list[Terms]: ...


class Warm:
    """Least cost in seconds, own work priced by what a second of it costs the others.

    cost = network + wait + own x (1 + c) + decode + evict + crowd

    own    prefill of what the worker does not hold. For a session's first turn, the part that another worker holds is a
           shared prefix: computed once more it serves the sessions to come, so it is divided among them.
    c      arrivals/s per worker x (wait + own) / (1 - utilisation): the delay that one second of work adds to those who arrive
           before the queue has drained. Near zero when idle, so idle workers are used freely; near saturation sessions hold still.
    evict  seconds to recompute what would no longer fit, with every live session at its expected peak; zero at home.
    crowd  first turns only: the expected waits that this session and those at home there will cause each other.
    """

    name = "warm"

    def rank(self, placement: Placement, candidates: Sequence[Worker]) -> list[Terms]:
        now, total, session, sessions = placement.now, placement.prompt_tokens, placement.session, placement.sessions
        cached = placement.cached
        congestion = placement.congestion
        count = len(candidates)
        arrivals = congestion.arrivals_per_s / count
        pressure = arrivals / (1.0 - min(congestion.work_per_s / count, 0.95))
        home = session.home if session is not None else None
        first = home is None
        peak = sessions.expected_peak(session, total)
        best_cached = max(cached.values(), default=0.0) if first else 0.0
        sharers = 1.0 + (sessions.sharing(session) / count if session is not None else 0.0)
        # expected waits per pair of sessions at home together: turns to come x chance to meet x length of what is met
        crowding = 0.0
        if first and session is not None and congestion.arrivals_per_s > 0.0:
            mean_work = congestion.work_per_s / congestion.arrivals_per_s
            crowding = 2.0 * sessions.mean_turns * mean_work * congestion.work_per_s / len(sessions)

        ranked = []
        for worker in candidates:
            held = cached.get(worker.id, 0.0)
            own = worker.prefill_s(total - held, total)
            if first and held < best_cached:
                own -= (best_cached - held) * worker.token_s(total) * (1.0 - 1.0 / sharers)
            wait = worker.wait_s(now)
            priced = own * pressure * (wait + own)
            decode = placement.decode_weight * placement.output_tokens * worker.step_s(1, total)
            evict = crowd = 0.0
            if worker is not home:
                over = worker.working_set + peak - worker.capacity
                if over > 0.0:
                    evict = min(over, peak) * worker.token_s(total)
                crowd = crowding * worker.live_sessions * worker.prefill_scale
            cost = worker.network_s + wait + own + priced + decode + evict + crowd
            ranked.append(Terms(worker, cost, wait, own, priced, decode, evict, crowd, held))
        best = min(ranked, key=_cost_then_sessions)
        if ranked[0] is not best:
            ranked.remove(best)
            ranked.insert(0, best)
        return ranked


def _cost_then_sessions(terms: Terms) -> tuple[float, int, int]:
    return terms.cost, terms.worker.live_sessions, terms.worker.in_flight


class RoundRobin:
    """Workers in turn."""

    name = "round-robin"

    def __init__(self) -> None:
        self._next = 0

    def rank(self, placement: Placement, candidates: Sequence[Worker]) -> list[Terms]:
        worker = candidates[self._next % len(candidates)]
        self._next += 1
        return [Terms(worker, 0.0)]


class Random:
    """Any worker, evenly."""

    name = "random"

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)

    def rank(self, placement: Placement, candidates: Sequence[Worker]) -> list[Terms]:
        return [Terms(self._random.choice(candidates), 0.0)]


class LeastLoaded:
    """Fewest requests in flight, then least assigned prefill work."""

    name = "least-loaded"

    def rank(self, placement: Placement, candidates: Sequence[Worker]) -> list[Terms]:
        worker = min(candidates, key=lambda w: (w.in_flight, w.pending_s))
        return [Terms(worker, float(worker.in_flight))]


class SessionAffinity:
    """Hard affinity: highest random weight (rendezvous) hash of the session over the workers, whatever the load.

    A worker that leaves moves only its own sessions. A request without a session goes to the least loaded worker.
    """

    name = "session-affinity"

    def rank(self, placement: Placement, candidates: Sequence[Worker]) -> list[Terms]:
        if placement.session is None:
            return LeastLoaded().rank(placement, candidates)
        key = repr(placement.session.key)
        return [Terms(max(candidates, key=lambda w: xxh3_64_intdigest(f"{w.id}|{key}")), 0.0)]


POLICIES: dict[str, Callable[[], Policy]] = {
    policy.name: policy  # type: ignore[type-abstract]
    for policy in (Warm, RoundRobin, Random, LeastLoaded, SessionAffinity)
}

__all__ = ["DEFAULT_OUTPUT_TOKENS", "POLICIES", "Congestion", "Placement", "Policy", "Terms"]
