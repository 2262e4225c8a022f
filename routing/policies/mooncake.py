"""Mooncake's Conductor: the least estimated time to first token, with or without moving the KV cache; and its load balancing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from routing.fleet import Worker
from routing.policies.placement import Placement
from routing.policies.scoring import least_first, scored

BALANCING_THRESHOLD = 2.0  # kvcache_balancing_threshold: longest match over the local one; set by hand there, no value published


class Mooncake:
    """Least T_transfer + T_queue + T_prefill (cost in seconds).

    Where the longest match of all workers is at least `balancing_threshold` times the local one, the worker is priced as if it
    fetched the difference from its holder, at `transfer_token_s` per token: the chosen entry's `restore` is that time and its
    `cached` what is there afterwards. Without `transfer_token_s` (engines that cannot fetch from each other) every worker has
    only its own cache: the paper's local cache-aware policy. T_queue is the sum of predicted prefills, less what has passed.
    The paper also refuses requests that would miss their objective (429): that is admission, not placement.
    Source: Mooncake (FAST'25), Algorithm 1.
    """

    name = "mooncake"

    def __init__(self, transfer_token_s: float | None = None, balancing_threshold: float = BALANCING_THRESHOLD) -> None:
        self.transfer_token_s = transfer_token_s
        self.balancing_threshold = balancing_threshold

    def rank(self, placement: Placement, candidates: Sequence[Worker]) -> list[tuple[Any, ...]]:
        total, cached = placement.prompt_tokens, placement.cached
        longest = max([cached.get(worker.id, 0.0) for worker in candidates])
        entries = []
        for place, worker in enumerate(candidates):
            held = cached.get(worker.id, 0.0)
            transfer = placement.restore.get(worker.id, 0.0)
            if self.transfer_token_s is not None and held < longest and longest >= self.balancing_threshold * held:
                transfer += (longest - held) * self.transfer_token_s
                held = longest
            wait = worker.wait_s(placement.now)
            own = worker.prefill_s(total - held, total)
            entries.append(
                scored(placement, place, worker, transfer + wait + own, wait=wait, own=own, cached=held, restore=transfer),
            )
        return least_first(entries)


class MooncakeLoadBalance:
    """The shortest queue, in seconds of prefill: the load-balancing policy that Mooncake is compared with (FAST'25, figure 5)."""

    name = "mooncake-load-balance"

    def rank(self, placement: Placement, candidates: Sequence[Worker]) -> list[tuple[Any, ...]]:
        waits = [(place, worker, worker.wait_s(placement.now)) for place, worker in enumerate(candidates)]
        return least_first([scored(placement, place, worker, wait, wait=wait) for place, worker, wait in waits])
