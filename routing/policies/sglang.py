"""SGLang's cache-aware routers: balance when the load is uneven, else go where the prefix is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from routing.fleet import Worker
from routing.policies.placement import Placement
from routing.policies.scoring import by_load, chosen_first, in_flight, least_first

CACHE_THRESHOLD = 0.3  # share of the prompt
BALANCE_ABS_THRESHOLD = 64  # requests
BALANCE_REL_THRESHOLD = 1.5


def imbalanced(candidates: Sequence[Worker], abs_threshold: int, rel_threshold: float) -> bool:
    """Whether the busiest worker has more than so many requests more than the idlest, and more than so many times as many."""
    loads = [in_flight(worker) for worker in candidates]
    least, most = min(loads), max(loads)
    return most - least > abs_threshold and most > rel_threshold * least


class PrefixThreshold:
    """The worker with the longest prefix where that is more than 30 % of the prompt, else the least loaded; the least loaded
    in any case while the fleet is imbalanced (cost in requests).

    The fleet is imbalanced when the loads are more than 64 requests and more than a factor of 1.5 apart. Equal matches and
    loads go by the list. Source: `cache_aware` of SGLang's router and SMG, with the defaults that SMG documents. Those keep an
    approximate tree of their own and find one holder per prefix in it.
    """

    name = "prefix-threshold"

    def __init__(
        self,
        cache_threshold: float = CACHE_THRESHOLD,
        balance_abs_threshold: int = BALANCE_ABS_THRESHOLD,
        balance_rel_threshold: float = BALANCE_REL_THRESHOLD,
    ) -> None:
        self.cache_threshold = cache_threshold
        self.balance_abs_threshold = balance_abs_threshold
        self.balance_rel_threshold = balance_rel_threshold

    def rank(self, placement: Placement, candidates: Sequence[Worker]) -> list[tuple[Any, ...]]:
        entries = by_load(placement, candidates)
        if not imbalanced(candidates, self.balance_abs_threshold, self.balance_rel_threshold):
            longest = max(entries, key=lambda entry: entry[11])
            if longest[11] > self.cache_threshold * placement.prompt_tokens:
                return chosen_first([longest], entries)
        return least_first(entries)
