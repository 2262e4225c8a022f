"""What the rules of other routers have in common: the signals they read, and how candidates are put in order.

Every rule reads the same index as `warm` (what each worker holds of the prompt) and the same count of assigned work, so that
policies differ in their rule alone.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from routing.fleet import Worker
from routing.policies.placement import Placement

_COST = itemgetter(0)


def in_flight(worker: Worker) -> int:
    """Requests assigned to the worker and not yet over, running or waiting, of all gateways."""
    return len(worker.prefilling) + worker.decoding + worker.others_prefilling + worker.others_decoding


def pending_tokens(worker: Worker, placement: Placement) -> float:
    """Uncached prompt tokens assigned to the worker whose requests have not had their first token.

    Other gateways tell their prefills in seconds: as many tokens as the worker computes in that time.
    """
    pending = worker.pending_tokens
    if worker.others_pending_s:
        pending += worker.others_wait_s(placement.now) / worker.token_s(placement.prompt_tokens)
    return pending


def uncached_tokens(worker: Worker, placement: Placement) -> float:
    """Prompt tokens that the worker would have to compute."""
    return placement.prompt_tokens - placement.cached.get(worker.id, 0.0)


def cached_by_tier(worker: Worker, placement: Placement) -> tuple[float, float]:
    """Cached prompt tokens: (on the accelerator, below it). What has to be restored is taken to be in host memory."""
    held = placement.cached.get(worker.id, 0.0)
    restore_s = placement.restore.get(worker.id, 0.0)
    if not restore_s:
        return held, 0.0
    below = min(held, restore_s / (worker.profile.restore_host_s or worker.profile.restore_disk_s))
    return held - below, below


def scored(
    placement: Placement, place: int, worker: Worker, cost: float, *, wait: float = 0.0, own: float = 0.0, decode: float = 0.0,
    evict: float = 0.0, cached: float | None = None, restore: float = 0.0,
) -> tuple[Any, ...]:  # fmt: skip
    """A candidate's entry (fields of `Terms`): its cost and the parts that the rule has, in the rule's own unit."""
    held = placement.cached.get(worker.id, 0.0) if cached is None else cached
    living = worker.live_sessions + worker.others_live_sessions
    return (cost, living, in_flight(worker), place, worker, wait, own, 0.0, decode, evict, 0.0, held, restore)


def by_load(placement: Placement, candidates: Sequence[Worker]) -> list[tuple[Any, ...]]:
    """The candidates as they stand, each at the cost of its requests in flight."""
    return [scored(placement, place, worker, float(in_flight(worker))) for place, worker in enumerate(candidates)]


def least_first(entries: list[tuple[Any, ...]], draw: random.Random | None = None) -> list[tuple[Any, ...]]:
    """In the order of costs. Equal ones stay as they are, or `draw` says which of the cheapest is first."""
    entries.sort(key=_COST)
    if draw is not None:
        least = entries[0][0]
        ties = next((n for n, entry in enumerate(entries) if entry[0] != least), len(entries))
        if ties > 1:
            entries.insert(0, entries.pop(draw.randrange(ties)))
    return entries


def chosen_first(chosen: list[tuple[Any, ...]], entries: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Those that a filter has left, in their order, then the others by cost."""
    left = {entry[3] for entry in chosen}
    return chosen + least_first([entry for entry in entries if entry[3] not in left])
