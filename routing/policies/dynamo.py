"""NVIDIA Dynamo's KV router: its default cost, and the two-tier policy."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

from routing.fleet import Worker
from routing.policies.placement import Placement
from routing.policies.scoring import by_load, cached_by_tier, chosen_first, least_first, pending_tokens, scored
from routing.policies.sglang import imbalanced

BLOCK_TOKENS = 64.0
PREFILL_LOAD_SCALE = 1.0
DEVICE_CREDIT, HOST_CREDIT = 1.0, 0.75  # of a cached block
TEMPERATURE = 0.0

CACHE_THRESHOLD = 0.5  # share of the prompt
BALANCE_ABS_THRESHOLD = 32  # requests
BALANCE_REL_THRESHOLD = 1.1


class Dynamo:
    """prefill_load_scale x (pending prefill blocks + own blocks - credit for cached ones) + decode blocks; the least wins (cost
    in blocks of 64 tokens).

    decode blocks: the prompts of all requests in flight there, with this one. Dynamo counts a block that several of them share
    once; here it counts for each. Credit: 1.0 per block on the accelerator, 0.75 below it. Ties are broken at random; with a
    temperature above zero the worker is drawn, from a softmax over the costs (scaled to 0..1). `prefill_load_scale` is the knob
    that matters: Dynamo's own sweeps find 16 to 32 best for agents, 1 is the default.
    Source: Dynamo 1.6, lib/kv-router/src/scheduling/selector/default.rs and the frontend's defaults.
    """

    name = "dynamo"

    def __init__(self, prefill_load_scale: float = PREFILL_LOAD_SCALE, temperature: float = TEMPERATURE, seed: int | None = None) -> None:
        self.prefill_load_scale = prefill_load_scale
        self.temperature = temperature
        self._draw = random.Random(seed)

    def rank(self, placement: Placement, candidates: Sequence[Worker]) -> list[tuple[Any, ...]]:
        total = placement.prompt_tokens
        entries = []
        for place, worker in enumerate(candidates):
            device, below = cached_by_tier(worker, placement)
            pending = self.prefill_load_scale * pending_tokens(worker, placement) / BLOCK_TOKENS
            own = self.prefill_load_scale * max(total - DEVICE_CREDIT * device - HOST_CREDIT * below, 0.0) / BLOCK_TOKENS
            decode = (worker.active_tokens + worker.others_active_tokens + total) / BLOCK_TOKENS
            entries.append(scored(placement, place, worker, pending + own + decode, wait=pending, own=own, decode=decode))
        if self.temperature > 0.0:
            return self._sampled(entries)
        return least_first(entries, self._draw)

    def _sampled(self, entries: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        least_first(entries)
        least, most = entries[0][0], entries[-1][0]
        spread = (most - least) * self.temperature or 1.0
        weights = [math.exp((least - entry[0]) / spread) for entry in entries]
        return chosen_first(self._draw.choices(entries, weights), entries)


class DynamoTwoTier:
    """Load first, then cache (cost in requests).

    1. The least loaded, while the loads are more than 32 requests and more than a factor of 1.1 apart.
    2. Else, where more than half of the prompt is on some worker's accelerator, the least loaded of those that hold most of it.
    3. Else the least loaded. Equal ones go by the list.

    Source: Dynamo's dynamo-two-tier-cost-fn (September 2026), a port of the `cache_aware_zmq` policy of SGLang's router.
    """

    name = "dynamo-two-tier"

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
            overlaps = [cached_by_tier(worker, placement)[0] for worker in candidates]
            most = max(overlaps)
            if most > self.cache_threshold * placement.prompt_tokens:
                holders = [entry for entry, overlap in zip(entries, overlaps, strict=True) if overlap == most]
                return chosen_first(least_first(holders), entries)
        return least_first(entries)
