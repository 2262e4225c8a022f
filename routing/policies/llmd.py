"""llm-d's token-aware rule: sticky until saturated."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from routing.fleet import Worker
from routing.policies.placement import Placement
from routing.policies.scoring import chosen_first, least_first, pending_tokens, scored, uncached_tokens

AFFINITY = 0.80  # affinityThreshold: a worker that holds this share of the prompt is sticky
MOST_PENALTY_S = 18.0  # maxTTFTPenaltyMs as shipped (the published study used 14 s)


def peak_prefill_rate(worker: Worker) -> float:
    """R_peak, tokens per second: one full chunk B in the time T(B) that the worker needs for it alone."""
    chunk = float(worker.profile.max_num_batched_tokens)
    return chunk / worker.prefill_s(chunk, chunk)


class StickyUntilSaturated:
    """Where the prompt is at least 80 % cached, unless waiting there costs `most_penalty_s` more than elsewhere; then the fewest
    uncached tokens, in flight and own (cost in tokens).

    The estimate of the time to first token is the uncached tokens in flight over R_peak, without the request itself. llm-d
    has one R_peak for the pool, measured at the chunk size; here every worker has its own, so that a mixed fleet is priced as
    well as the rule allows. Ties are broken at random. Source: llm-d-router, prefix-cache-affinity-filter (defaults of August
    2026: 0.80, 18,000 ms), then token-load-scorer and max-score-picker.
    """

    name = "llm-d"

    def __init__(self, most_penalty_s: float = MOST_PENALTY_S, affinity: float = AFFINITY, seed: int | None = None) -> None:
        self.most_penalty_s = most_penalty_s
        self.affinity = affinity
        self._draw = random.Random(seed)

    def rank(self, placement: Placement, candidates: Sequence[Worker]) -> list[tuple[Any, ...]]:
        sticky, others = [], []
        enough = self.affinity * placement.prompt_tokens
        sticky_s = others_s = float("inf")  # least estimated time to first token
        for place, worker in enumerate(candidates):
            pending, own = pending_tokens(worker, placement), uncached_tokens(worker, placement)
            entry = scored(placement, place, worker, pending + own, wait=pending, own=own)
            ttft_s = pending / peak_prefill_rate(worker)
            if placement.cached.get(worker.id, 0.0) >= enough:
                sticky.append(entry)
                sticky_s = min(sticky_s, ttft_s)
            else:
                others.append(entry)
                others_s = min(others_s, ttft_s)
        if not sticky or sticky_s - others_s > self.most_penalty_s:
            return least_first(sorted(sticky + others, key=lambda entry: entry[3]), self._draw)
        return chosen_first(least_first(sticky, self._draw), others)
