"""Baselines that know nothing of caches: in turn, at random, by load, of two, by session."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from xxhash import xxh3_64_intdigest

from routing.fleet import Worker
from routing.policies.placement import Placement, only
from routing.policies.scoring import in_flight, least_first, scored


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


class PowerOfTwo:
    """Of two workers drawn at random, the one with fewer requests in flight; equal: the first drawn (cost in requests)."""

    name = "power-of-two"

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)

    def rank(self, placement: Placement, candidates: Sequence[Worker]) -> list[tuple[Any, ...]]:
        drawn = self._random.sample(range(len(candidates)), min(2, len(candidates)))
        return least_first([scored(placement, place, candidates[place], float(in_flight(candidates[place]))) for place in drawn])


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
