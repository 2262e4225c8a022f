"""Which pools serve which tiers: every way of sharing pools between tiers, and of leaving out tiers that do not pay for themselves."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from loadgen.recommend.request import Request, TierName
from loadgen.recommend.search import Found, Trial, value_per_hour

Tiers = tuple[TierName, ...]
_OPTIONS = 4  # of a pool, that are combined with those of others where a budget or a stock is tight


@dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """A part of the fleet and the tiers it serves."""

    tiers: Tiers
    trial: Trial


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Pools that together serve what is to be served. Costs per hour (GPUs where nothing has a price)."""

    pools: tuple[Pool, ...]
    value: float = 0.0  # what the output is worth per hour, by what tiers pay

    @property
    def tiers(self) -> Tiers:
        return tuple(tier for pool in self.pools for tier in pool.tiers)

    @property
    def cost(self) -> float:
        return sum(pool.trial.cost for pool in self.pools)

    @property
    def gpus(self) -> int:
        return sum(pool.trial.gpus for pool in self.pools)

    @property
    def profit(self) -> float:
        return self.value - self.cost

    @property
    def sharing(self) -> str:
        """latency | standard + throughput"""
        return " | ".join(" + ".join(pool.tiers) for pool in self.pools) or "nothing"


def partitions(tiers: Sequence[TierName]) -> Iterator[tuple[Tiers, ...]]:
    """Every way to divide tiers among pools."""
    if not tiers:
        yield ()
        return
    first, *others = tiers
    for size in range(len(others) + 1):
        for companions in itertools.combinations(others, size):
            rest = [tier for tier in others if tier not in companions]
            for divided in partitions(rest):
                yield ((first, *companions), *divided)


def served_sets(request: Request) -> list[Tiers]:
    """The sets of tiers that may be served: those that name no price are never left out."""
    tiers = list(request.tiers)
    optional = [tier for tier in tiers if request.tiers[tier].pays_per_million_output is not None]
    sets = []
    for size in range(len(optional), -1, -1):
        for kept in itertools.combinations(optional, size):
            served = tuple(tier for tier in tiers if tier in kept or tier not in optional)
            if served:
                sets.append(served)
    return sets


def groups(request: Request) -> list[Tiers]:
    """Every set of tiers that some plan gives a pool of its own, the largest first."""
    found = {group for served in served_sets(request) for divided in partitions(served) for group in divided}
    return sorted(found, key=lambda group: (-len(group), group))


def plans(request: Request, found: Mapping[Tiers, Found], limited: bool = True) -> list[Plan]:
    """The best plan of every sharing of pools, the best first: greatest profit where tiers pay, else least cost.

    `limited`: only plans within the budget and the stock of accelerators.
    """
    made = []
    for served in served_sets(request):
        for divided in partitions(served):
            options = [[Pool(group, trial) for trial in found[group].options[:_OPTIONS]] for group in divided]
            possible = [_plan(request, pools) for pools in itertools.product(*options)]
            possible = [plan for plan in possible if not limited or not exceeds(request, plan)]
            if possible:
                made.append(min(possible, key=_order))
    return sorted(made, key=_order)


def _plan(request: Request, pools: tuple[Pool, ...]) -> Plan:
    return Plan(pools, sum(value_per_hour(request, pool.tiers, pool.trial.runs) for pool in pools))


def _order(plan: Plan) -> tuple[float, int, float]:
    """Of equally good plans that with the fewest pools, then that with most room."""
    return (round(-plan.profit, 6), len(plan.pools), max(pool.trial.ratio for pool in plan.pools))


def exceeds(request: Request, plan: Plan) -> str | None:
    """Which limit a plan exceeds, in words; None for none."""
    budget = request.budget
    if budget.price_per_hour is not None and plan.cost > budget.price_per_hour + 1e-9:
        return f"{plan.cost:.2f} per hour, and the budget is {budget.price_per_hour:g}"
    if budget.gpus is not None and plan.gpus > budget.gpus:
        return f"{plan.gpus} GPUs, and the budget is {budget.gpus}"
    used: Counter[str | None] = Counter()
    for pool in plan.pools:
        used[pool.trial.candidate.profile.accelerator] += pool.trial.gpus
    for rentable in request.accelerators:
        if rentable.gpus is not None and used[rentable.name] > rentable.gpus:
            return f"{used[rentable.name]} x {rentable.name}, and there are {rentable.gpus}"
    return None
