"""Policies: given one request and the candidates, which worker. Every policy is one small class with one method.

`warm` is the product; the others are baselines and fallbacks behind the same interface.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from xxhash import xxh3_64_intdigest

from routing.fleet import Worker
from routing.sessions import Session, SessionTable

# Share of the fleet's time that the later turns of live sessions are expected to take at least. What is measured while sessions
# start says little of what they will do, and without it the first worker to hold a shared prompt would get them all.
LEAST_LATER_USE = 0.1
# A wait below this is no reason to leave a warm cache: nobody notices it, and a hiccup of this process or the network looks the same.
LEAST_MOVE_S = 0.1
TIE_S = 0.01  # a difference in waits below this is noise of clocks and networks
TURN_TOKENS = 1400.0  # new tokens of a later turn, until some were seen (agent traces: mean 1,440)


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
    restore: Mapping[str, float] = field(default_factory=dict)  # worker id -> seconds to bring cached tokens back from host or disk
    crowded: bool = False  # other gateways are placing new sessions in these milliseconds


class Terms(NamedTuple):
    """One candidate's cost and its parts, in seconds; `cached` in tokens. The first three order the candidates."""

    cost: float
    live_sessions: int = 0
    in_flight: int = 0
    place: int = 0  # in the list of candidates: the last tie-break, so that workers themselves are never compared
    worker: Worker | None = None
    wait: float = 0.0
    own: float = 0.0
    congestion: float = 0.0
    decode: float = 0.0
    evict: float = 0.0
    crowd: float = 0.0
    cached: float = 0.0
    restore: float = 0.0


class Congestion:
    """Arrivals and prefill work of the fleet, as exponentially decayed rates (time constant `window_s`).

    The public rates are this gateway's own and those that the others have told (`others`, in the same order).
    """

    def __init__(self, window_s: float = 60.0):
        self.window_s = window_s
        self.arrivals_per_s = 0.0
        self.work_per_s = 0.0  # seconds of prefill assigned per second, over the whole fleet
        self.later_arrivals_per_s = 0.0  # the same of turns that came back to their session's home
        self.later_work_per_s = 0.0
        self._others = (0.0, 0.0, 0.0, 0.0)
        self._since: float | None = None
        self._last = 0.0
        self._arrivals = 0.0
        self._work = 0.0
        self._later_arrivals = 0.0
        self._later_work = 0.0

    def add(self, prefill_s: float, now: float, at_home: bool = False) -> None:
        """Count one request of this much prefill work."""
        if self._since is None:
            self._since = self._last = now
        # first-order decay: no exp() per request, and exact enough for steps far below the window
        keep = max(0.0, 1.0 - (now - self._last) / self.window_s)
        self._last = now
        self._arrivals = self._arrivals * keep + 1.0
        self._work = self._work * keep + prefill_s
        self._later_arrivals = self._later_arrivals * keep + at_home
        self._later_work = self._later_work * keep + (prefill_s if at_home else 0.0)
        seen = min(max(now - self._since, 1.0), self.window_s)
        arrivals, work, later_arrivals, later_work = self._others
        self.arrivals_per_s = self._arrivals / seen + arrivals
        self.work_per_s = self._work / seen + work
        self.later_arrivals_per_s = self._later_arrivals / seen + later_arrivals
        self.later_work_per_s = self._later_work / seen + later_work

    def own(self, now: float) -> tuple[float, float, float, float]:
        """This gateway's own rates: arrivals, work, and the same of turns that came back to their session's home."""
        if self._since is None:
            return 0.0, 0.0, 0.0, 0.0
        share = max(0.0, 1.0 - (now - self._last) / self.window_s) / min(max(now - self._since, 1.0), self.window_s)
        return self._arrivals * share, self._work * share, self._later_arrivals * share, self._later_work * share

    def hear(self, others: tuple[float, float, float, float]) -> None:
        """The other gateways' rates are these from now on (sums)."""
        before, self._others = self._others, others
        self.arrivals_per_s += others[0] - before[0]
        self.work_per_s += others[1] - before[1]
        self.later_arrivals_per_s += others[2] - before[2]
        self.later_work_per_s += others[3] - before[3]


class Policy(Protocol):
    """Chooses a worker. `candidates` is never empty. The answer's first entry is the choice; the others explain it.

    Entries have the fields of `Terms`, as plain tuples: they are made for every candidate of every request and named only
    when somebody asks.
    """

    name: str

    def rank(self, placement: Placement, candidates: Sequence[Worker]) -> list[tuple[Any, ...]]: ...


def only(worker: Worker) -> list[tuple[Any, ...]]:
    """The answer of a policy that weighs nothing."""
    return [(0.0, 0, 0, 0, worker, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)]


class Warm:
    """Least cost in seconds, own work priced by what a second of it costs the others.

    cost = network + wait + restore + own x (1 + c) + decode + evict + crowd

    restore  seconds to bring what is cached in host memory or on disk back to the accelerator.

    own    prefill of what the worker does not hold. For a session's first turn, the part that another worker holds is a
           shared prefix: computed once more it serves the sessions to come, so it is divided among them.
    c      arrivals/s per worker x (wait + own) / (1 - utilisation): the delay that one second of work adds to those who arrive
           before the queue has drained. Near zero when idle, so idle workers are used freely; near saturation sessions hold still.
    evict  seconds to recompute what would no longer fit, with every live session at its expected peak; zero at home.
    crowd  the expected waits that this session and the others at home there will cause each other.

    A session whose home has nothing to prefill stays there without further ado: no other worker can be cheaper by more than
    a difference in decode speed, which does not pay for a second copy of its cache.
    """

    name = "warm"

    def rank(self, placement: Placement, candidates: Sequence[Worker]) -> list[tuple[Any, ...]]:
        now, total, session, sessions = placement.now, placement.prompt_tokens, placement.session, placement.sessions
        cached, restore = placement.cached, placement.restore
        home = session.home if session is not None else None
        first = home is None
        if (
            home is not None
            and not home.prefilling
            and not home.others_prefilling
            and home.decoding + home.others_decoding < home.slots
            and home.id in cached
            and home in candidates
        ):
            session.regret = 0.0  # type: ignore[union-attr]
            return only(home)
        congestion = placement.congestion
        count = len(candidates)
        pressure = congestion.arrivals_per_s / count / (1.0 - min(congestion.work_per_s / count, 0.95))
        peak = sessions.expected_peak(session, total) if session is not None else total
        best_cached = max(cached.values()) if first and cached else 0.0
        repeated = crowding = 0.0
        if session is not None:
            if first:
                repeated = 1.0 - 1.0 / (1.0 + sessions.sharing(session))
            # expected waits per pair of sessions at home together: turns to come x length of what is met x chance to meet
            usual_token_s = sum([w.prefill_calibration.value * (w.per_token + w.per_pair * total) for w in candidates]) / count
            later = congestion.later_work_per_s
            met = later / congestion.later_arrivals_per_s if later > 0.0 else TURN_TOKENS * usual_token_s
            crowding = 2.0 * sessions.mean_turns * met * max(later, LEAST_LATER_USE * count) / (sessions.live * usual_token_s)
        output_tokens = placement.output_tokens * placement.decode_weight

        ranked: list[tuple[Any, ...]] = []
        for place, worker in enumerate(candidates):
            held = cached.get(worker.id, 0.0)
            scale = worker.prefill_calibration.value
            token_s = scale * (worker.per_token + worker.per_pair * total)
            own = scale * worker.base + (total - held) * token_s
            if held < best_cached:
                own -= (best_cached - held) * token_s * repeated
            prefilling = len(worker.prefilling)
            in_flight = prefilling + worker.decoding
            neighbours = living = worker.live_sessions
            working_set = worker.working_set
            if worker.others:
                prefilling += worker.others_prefilling
                in_flight += worker.others_prefilling + worker.others_decoding
                neighbours = living = living + worker.others_live_sessions
                working_set += worker.others_working_set
            wait = worker.wait_s(now) if prefilling or in_flight >= worker.slots else 0.0
            priced = own * pressure * (wait + own)
            decode = output_tokens * worker.joined_step_s(total)
            evict = 0.0
            if worker is home:
                neighbours -= 1  # itself
            else:
                over = working_set + peak - worker.capacity
                if over > 0.0:
                    evict = (over if over < peak else peak) * token_s
            crowd = crowding * neighbours * token_s
            restored = restore.get(worker.id, 0.0) if restore else 0.0
            cost = worker.network_s + wait + restored + own + priced + decode + evict + crowd
            ranked.append((cost, living, in_flight, place, worker, wait, own, priced, decode, evict, crowd, held, restored))
        ranked.sort()
        if session is not None and home is not None:
            _hold_still(session, home, ranked)
        elif count > 1:
            _break_ties(ranked, session is not None, placement.crowded)
        return ranked


def _break_ties(ranked: list[tuple[Any, ...]], comes_back: bool, crowded: bool) -> None:
    """Put first who carries the fewest sessions among those whose costs are as good as equal; for a request that belongs to no
    session, who has the fewest requests. Gateways that place sessions at the same time then go by the list, which all have in the
    same order: their costs differ by noise."""
    best = ranked[0]
    busy = best[5] + best[6]
    limit = best[0] + TIE_S * (1.0 + best[7] / busy if busy else 1.0)  # what waits differ by counts so much in the cost
    if ranked[1][0] >= limit:
        return
    first, second, third = (1, 2, 3 if crowded else 0) if comes_back else (2, 1, 3 if crowded else 0)
    best = min([(entry[first], entry[second], entry[third], entry[3], entry) for entry in ranked if entry[0] < limit])[4]
    if best is not ranked[0]:
        ranked.remove(best)
        ranked.insert(0, best)


def _hold_still(session: Session, home: Worker, ranked: list[tuple[Any, ...]]) -> None:
    """Put the home first unless leaving it has become worth what the other worker would have to compute.

    The rule of online page migration: what staying has cost beyond the best other worker is added up, never below zero, and
    the session moves when the sum reaches the price of a move. A long wait moves it at once, and many short ones do in time;
    a single one of the size of the recomputation does not: it is over before the next turn, and estimates are no better.
    """
    place = next((i for i, entry in enumerate(ranked) if entry[4] is home), None)
    if place is None or len(ranked) == 1:
        return
    at_home = ranked[place]
    elsewhere = ranked[0] if place else ranked[1]
    session.regret = max(0.0, session.regret + at_home[0] - elsewhere[0])
    if place and session.regret < max(elsewhere[6] + elsewhere[7], LEAST_MOVE_S):
        del ranked[place]
        ranked.insert(0, at_home)


class RoundRobin:
    """Workers in turn."""

    name = "round-robin"

    def __init__(self) -> None:
        self._next = 0

    def rank(self, placement: Placement, candidates: Sequence[Worker]) -> list[tuple[Any, ...]]:
        worker = candidates[self._next % len(candidates)]
        self._next += 1
        return only(worker)


class Random:
    """Any worker, evenly."""

    name = "random"

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)

    def rank(self, placement: Placement, candidates: Sequence[Worker]) -> list[tuple[Any, ...]]:
        return only(self._random.choice(candidates))


class LeastLoaded:
    """Fewest requests in flight, then least assigned prefill work."""

    name = "least-loaded"

    def rank(self, placement: Placement, candidates: Sequence[Worker]) -> list[tuple[Any, ...]]:
        return only(min(candidates, key=lambda w: (w.in_flight + w.others_in_flight, w.pending_s + w.others_pending_s)))


class SessionAffinity:
    """Hard affinity: highest random weight (rendezvous) hash of the session over the workers, whatever the load.

    A worker that leaves moves only its own sessions. A request without a session goes to the least loaded worker.
    """

    name = "session-affinity"

    def rank(self, placement: Placement, candidates: Sequence[Worker]) -> list[tuple[Any, ...]]:
        if placement.session is None:
            return LeastLoaded().rank(placement, candidates)
        key = repr(placement.session.key)
        return only(max(candidates, key=lambda w: xxh3_64_intdigest(f"{w.id}|{key}".encode())))


POLICIES: dict[str, Callable[[], Policy]] = {policy.name: policy for policy in (Warm, RoundRobin, Random, LeastLoaded, SessionAffinity)}
