"""Policies: given one request and the candidates, which worker. Every policy is one small class with one method.

`warm` is the product; the others are the rules of other routers, behind the same interface: baselines and fallbacks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

from routing.policies.baselines import LeastLoaded, PowerOfTwo, Random, RoundRobin, SessionAffinity
from routing.policies.dynamo import Dynamo, DynamoTwoTier
from routing.policies.llmd import StickyUntilSaturated
from routing.policies.mooncake import Mooncake, MooncakeLoadBalance
from routing.policies.placement import Congestion, Placement, Policy, Terms, only
from routing.policies.preble import Preble
from routing.policies.prefill_work import LPWL, LMetric
from routing.policies.sglang import PrefixThreshold
from routing.policies.warm import Warm

POLICIES: dict[str, Callable[[], Policy]] = {
    policy().name: policy
    for policy in (
        Warm, RoundRobin, Random, LeastLoaded, PowerOfTwo, SessionAffinity, PrefixThreshold, LPWL, LMetric, Dynamo, DynamoTwoTier,
        StickyUntilSaturated, Preble, Mooncake, MooncakeLoadBalance,
    )
}  # fmt: skip


def new_policy(name: str, seed: int) -> Policy:
    """A policy whose random choices follow from the seed. Raises KeyError."""
    policy = POLICIES[name]
    return policy(seed=seed) if "seed" in inspect.signature(policy).parameters else policy()  # type: ignore[call-arg]


__all__ = ["POLICIES", "Congestion", "Placement", "Policy", "Terms", "Warm", "new_policy", "only"]
