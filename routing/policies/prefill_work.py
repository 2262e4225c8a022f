"""Rules that count the prefill tokens in front of a request: LPWL (least prefill work left) and LMetric."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from routing.fleet import Worker
from routing.policies.placement import Placement
from routing.policies.scoring import in_flight, least_first, pending_tokens, scored, uncached_tokens


class LPWL:
    """Least prefill work left: pending prefill tokens + own uncached tokens; the least wins (cost in tokens).

    Ties go to the fewest requests, then round robin. No constants. Source: agentic-kvc, "least prefill work left" (2026-05).
    """

    name = "lpwl"

    def __init__(self) -> None:
        self._next = 0  # place in the list of candidates at which a tie is broken

    def rank(self, placement: Placement, candidates: Sequence[Worker]) -> list[tuple[Any, ...]]:
        entries = []
        for place, worker in enumerate(candidates):
            pending, own = pending_tokens(worker, placement), uncached_tokens(worker, placement)
            entries.append(scored(placement, place, worker, pending + own, wait=pending, own=own))
        count = len(entries)
        entries.sort(key=lambda entry: (entry[0], entry[2], (entry[3] - self._next) % count))
        self._next = (entries[0][3] + 1) % count
        return entries


class LMetric:
    """(pending prefill tokens + own uncached tokens) x (requests + 1); the least wins (cost in tokens x requests).

    Where a worker has nothing to prefill and holds the whole prompt, the product is zero whatever its batch: the rule's own
    degenerate case, kept. Ties are broken at random. Source: LMetric (OSDI'26, arXiv 2603.15202), its artifact
    blitz-serving/blitz-router: `Select min by prefill_tokens(req, s) * (s.bs + 1)`.
    """

    name = "lmetric"

    def __init__(self, seed: int | None = None) -> None:
        self._draw = random.Random(seed)

    def rank(self, placement: Placement, candidates: Sequence[Worker]) -> list[tuple[Any, ...]]:
        entries = []
        for place, worker in enumerate(candidates):
            pending, own = pending_tokens(worker, placement), uncached_tokens(worker, placement)
            cost = (pending + own) * (in_flight(worker) + 1)
            entries.append(scored(placement, place, worker, cost, wait=pending, own=own))
        return least_first(entries, self._draw)
