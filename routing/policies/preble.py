"""Preble's E2: exploit a long match, else explore by the load of the last three minutes."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from routing.fleet import Worker
from routing.policies.placement import Placement
from routing.policies.scoring import chosen_first, in_flight, least_first, scored, uncached_tokens

WINDOW_S = 180.0
MATCH_THRESHOLD = 0.5  # share of the prompt above which the match decides
HIGH_LOAD = 1.5  # HIGH_LOAD_THRESHOLD: the most loaded worker over the least, above which prefixes move
REBALANCE_AFTER = 50  # requests placed before that starts


@dataclass(slots=True)
class _Load:
    """What a worker was given in the window."""

    requests: int = 0
    prefill_s: float = 0.0
    hit_tokens: float = 0.0
    prompt_tokens: float = 0.0

    def add(self, placed: _Placed, sign: int) -> None:
        self.requests += sign
        if not self.requests:  # an empty window resets the sums, so that rounding never accumulates
            self.prefill_s = self.hit_tokens = self.prompt_tokens = 0.0
            return
        self.prefill_s += sign * placed.prefill_s
        self.hit_tokens += sign * placed.hit_tokens
        self.prompt_tokens += sign * placed.prompt_tokens


@dataclass(slots=True)
class _Placed:
    at: float
    session: Hashable  # the prefix that it belongs to
    load: _Load
    prefill_s: float
    hit_tokens: float
    prompt_tokens: float


class Preble:
    """Where more than half of the prompt is cached, the holder of most of it with the fewest requests in the window; else the
    least load + eviction + own prefill (cost in seconds).

    load      prefill of the window's requests, and decoding of those in flight.
    eviction  recomputing what would no longer fit, by the share of prompts that were hits there: what a victim is worth. What
              fits is judged by the live sessions' working sets; Preble walks its copy of each cache in LRU order.
    rebalance once 50 requests were placed, a prefix leaves the most loaded worker for the least loaded one where the former
              carries at least 1.5 times as much, and takes its part of the window's load along, unless that would make the
              latter the more loaded of the two. Preble moves the cheapest prefixes; here it is sessions, when they ask.
    It also copies prefixes whose time to first token doubles: not done here, since a policy does not see that.
    Sources: Preble (ICLR'25), algorithm 1, and WukLab/preble, multi_node/global_scheduler_with_time.py (3-minute window, 1.5,
    50; that code leaves the own prefill out).
    """

    name = "preble"

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self.window_s = window_s
        self._loads: dict[str, _Load] = {}
        self._window: deque[_Placed] = deque()
        self._placed = 0

    def rank(self, placement: Placement, candidates: Sequence[Worker]) -> list[tuple[Any, ...]]:
        self._expire(placement.now)
        entries = [self._priced(placement, place, worker) for place, worker in enumerate(candidates)]
        most = max([entry[11] for entry in entries])
        if most > MATCH_THRESHOLD * placement.prompt_tokens:
            owners = sorted([entry for entry in entries if entry[11] == most], key=self._requests)
            ranked = chosen_first(self._rebalanced(placement, owners, entries), entries)
        else:
            ranked = least_first(entries)
        self._record(placement, ranked[0][4])
        return ranked

    def _priced(self, placement: Placement, place: int, worker: Worker) -> tuple[Any, ...]:
        load = self._loads.get(worker.id) or _Load()
        total, uncached = placement.prompt_tokens, uncached_tokens(worker, placement)
        busy = load.prefill_s
        decode = in_flight(worker) * placement.output_tokens * worker.step_s()
        own = worker.prefill_s(uncached, total)
        over = worker.working_set + worker.others_working_set + uncached - worker.capacity
        evict = 0.0
        if over > 0.0 and load.prompt_tokens:
            evict = min(over, uncached) * worker.token_s(total) * load.hit_tokens / load.prompt_tokens
        return scored(placement, place, worker, busy + decode + evict + own, wait=busy, own=own, decode=decode, evict=evict)

    def _requests(self, entry: tuple[Any, ...]) -> int:
        load = self._loads.get(entry[4].id)
        return load.requests if load is not None else 0

    def _rebalanced(self, placement: Placement, owners: list[tuple[Any, ...]], entries: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """The owners, or the least loaded worker, to which the session moves."""
        if self._placed < REBALANCE_AFTER or placement.session is None:
            return owners
        busiest, idlest = max(entries, key=_load), min(entries, key=_load)
        if owners[0] is not busiest or _load(busiest) < HIGH_LOAD * _load(idlest):
            return owners
        before = self._loads.get(busiest[4].id)
        moved = [placed for placed in self._window if placed.load is before and placed.session == placement.session.key]
        if len(moved) < 2 or _load(busiest) < _load(idlest) + sum([placed.prefill_s for placed in moved]):
            return owners
        for placed in moved:
            placed.load.add(placed, -1)
            placed.load = self._loads.setdefault(idlest[4].id, _Load())
            placed.load.add(placed, 1)
        return [idlest]

    def _record(self, placement: Placement, worker: Worker) -> None:
        total, uncached = placement.prompt_tokens, uncached_tokens(worker, placement)
        key = placement.session.key if placement.session is not None else None
        load = self._loads.setdefault(worker.id, _Load())
        placed = _Placed(placement.now, key, load, worker.prefill_s(uncached, total), total - uncached, total)
        load.add(placed, 1)
        self._window.append(placed)
        self._placed += 1

    def _expire(self, now: float) -> None:
        window = self._window
        while window and window[0].at < now - self.window_s:
            placed = window.popleft()
            placed.load.add(placed, -1)
            if not placed.load.requests:  # the worker may have left
                self._loads = {worker: load for worker, load in self._loads.items() if load.requests}


def _load(entry: tuple[Any, ...]) -> float:
    """A candidate's load: the window's prefill and what decodes there."""
    return entry[5] + entry[8]
