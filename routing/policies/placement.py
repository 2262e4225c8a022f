"""What a policy is asked and what it answers: a placement and the candidates, and each candidate's cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from routing.fleet import Worker
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
    restore: Mapping[str, float] = field(default_factory=dict)  # worker id -> seconds to bring cached tokens back from host or disk
    crowded: bool = False  # other gateways are placing new sessions in these milliseconds
    waits: Mapping[Worker, float] | None = None  # seconds, where what a worker itself tells is not settled yet: see `tickets`
    own_alike: Mapping[Worker, int] | None = None  # new sessions that begin alike and this gateway has just sent there, in a crowd

    def shared(self, worker: Worker, held: float) -> float:
        """Of the `held` tokens of the prompt that are cached at a worker, those that other requests begin with as well and keep in its
        KV memory: at the session's home what was there before it came, elsewhere all."""
        session = self.session
        return held if session is None or worker is not session.home or session.shared > held else session.shared


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
